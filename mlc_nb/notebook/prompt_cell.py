"""Cells whose body is a prompt: it reaches the model byte for byte.

IPython cleans up every cell before it looks for a magic: it strips ``>>>`` and ``In [1]:`` prompts, dedents, and ends
the text with a newline. Good for code, wrong for a prompt that quotes a console session.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from IPython.core.interactiveshell import ExecutionInfo, InteractiveShell

__all__ = ["PromptCells"]


class PromptCells:
    """Takes the cells of some magics out of IPython's hands before it changes them.

    Parameters
    ----------
    shell
        The shell whose input is watched.
    names
        The cell magics, without ``%%``.
    """

    # IPython asks "is this input complete?" without such transforms: its own answer for cell magics then holds.
    has_side_effects = True

    def __init__(self, shell: InteractiveShell, names: Sequence[str]) -> None:
        self._shell = shell
        self._first_line = re.compile(rf"%%({'|'.join(names)})(?:[ \t]+(.*)|(;))?\s*")
        self._raw_cell = ""
        transforms: list[Any] = shell.input_transformer_manager.cleanup_transforms
        transforms.insert(0, self)
        shell.events.register("pre_run_cell", self._remember)

    def detach(self) -> None:
        """Leave the shell as it was."""
        self._shell.input_transformer_manager.cleanup_transforms.remove(self)
        self._shell.events.unregister("pre_run_cell", self._remember)

    def prompt(self, body: str) -> str:
        """Return what was typed below the magic, given the body that IPython handed to it.

        IPython ends a cell with a newline where there was none; this one newline is taken back. Everything else,
        leading and trailing space and blank lines included, stays. In a terminal the blank lines that end a cell are no
        part of it.
        """
        typed = self._raw_cell.lstrip("\r\n").partition("\n")[2]
        prompt = typed if body in (typed, typed + "\n") else body.removesuffix("\n")
        return prompt if getattr(self._shell, "kernel", None) is not None else prompt.rstrip("\n")

    def _remember(self, info: ExecutionInfo) -> None:
        self._raw_cell = info.raw_cell or ""

    def __call__(self, lines: list[str]) -> list[str]:
        """Turn a cell of one of our magics into its call, as IPython's own transform does a few steps later."""
        start = next((number for number, line in enumerate(lines) if line.strip()), None)
        if start is None:
            return lines
        match = self._first_line.fullmatch(lines[start])
        if match is None:
            return lines
        body = "".join(lines[start + 1 :]) or "\n"  # IPython refuses an empty body before the magic sees its options
        return [f"get_ipython().run_cell_magic({match[1]!r}, {(match[2] or match[3] or '').rstrip()!r}, {body!r})\n"]
