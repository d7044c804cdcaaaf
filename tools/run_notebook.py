"""Run a notebook in a real kernel and print what its cells print, while they print it.

``make demo`` is ``python -m tools.run_notebook notebooks/quickstart.ipynb``. Nothing is written back to the notebook.
"""

from __future__ import annotations

import argparse
import sys
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LiveNotebook", "main"]

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class LiveNotebook(NotebookClient):
    """A notebook client that echoes cells and their outputs to a text stream as they arrive.

    Parameters
    ----------
    notebook
        The notebook, as nbformat read it.
    out
        Where to print.
    **options
        Traits of ``NotebookClient`` such as ``timeout`` (seconds a cell).
    """

    def __init__(self, notebook: nbformat.NotebookNode, *, out: TextIO, **options: Any) -> None:
        super().__init__(notebook, on_cell_start=self._show_source, **options)
        self._out = out
        self._displays: dict[str, str] = {}
        self._growing: str | None = None  # the display whose text the cursor stands behind
        self._rewritten: str | None = None  # its newest state, where that does not go on from what is printed

    def process_message(
        self, msg: dict[str, Any], cell: nbformat.NotebookNode, cell_index: int
    ) -> nbformat.NotebookNode | None:
        """Print one message of the kernel, then let nbclient record it."""
        content = msg["content"]
        kind = msg["msg_type"]
        if kind == "stream":
            self._end_display()
            self._print(content["text"])
        elif kind in ("display_data", "update_display_data", "execute_result"):
            self._show_display(content)
        return super().process_message(msg, cell, cell_index)

    def _show_source(self, cell: nbformat.NotebookNode, **_hook_arguments: object) -> None:
        self._end_display()
        if cell.cell_type == "code":
            self._print("".join(f"\n>>> {line}" for line in cell.source.splitlines()) + "\n")
        elif cell.cell_type == "markdown":
            self._print(f"\n{cell.source}\n")

    def _show_display(self, content: Mapping[str, Any]) -> None:
        data: Mapping[str, Any] = content["data"]
        if WIDGET_VIEW in data:
            return
        text: str = data.get("text/markdown", data.get("text/plain", ""))
        display_id = (content.get("transient") or {}).get("display_id")
        if display_id is None:
            self._end_display()
            self._print(f"{text}\n")
            return
        if self._growing != display_id:
            self._end_display()
        shown = self._displays.get(display_id, "")
        self._growing = display_id
        if text.startswith(shown):
            self._print(text[len(shown) :])
            self._displays[display_id], self._rewritten = text, None
        else:
            # It may be rewritten many times, as a table that fills: its last state tells all.
            self._rewritten = text

    def _end_display(self) -> None:
        if self._growing is None:
            return
        shown = self._displays[self._growing]
        if self._rewritten is not None:
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(shown, self._rewritten, strict=False)))
            line_start = self._rewritten.rfind("\n", 0, same) + 1
            self._print("\n" * bool(shown) + self._rewritten[line_start:])
            self._displays[self._growing], self._rewritten = self._rewritten, None
        self._print("\n" * bool(self._displays[self._growing]))
        self._growing = None

    def _print(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def main(arguments: list[str] | None = None) -> int:
    """Run the notebook that the command line names; 0 when every cell ran, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tools.run_notebook", description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=Path, help="the .ipynb file to run")
    parser.add_argument("--timeout", type=int, default=900, help="seconds that one cell may take (default 900)")
    options = parser.parse_args(arguments)

    notebook = nbformat.read(options.notebook, as_version=4)
    client = LiveNotebook(
        notebook,
        out=sys.stdout,
        timeout=options.timeout,
        kernel_name="python3",
        # ipykernel warns of every kernel on a TCP port, this one on the loopback interface included.
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
        resources={"metadata": {"path": str(options.notebook.parent)}},
    )
    try:
        client.execute()
    except CellExecutionError as error:
        print(f"\n{options.notebook}: a cell failed\n{error}", file=sys.stderr)
        return 1
    except CellTimeoutError:
        print(f"\n{options.notebook}: a cell took longer than {options.timeout} s", file=sys.stderr)
        return 1
    except DeadKernelError:
        print(f"\n{options.notebook}: the kernel died while a cell ran", file=sys.stderr)
        return 1
    print(f"\n\n{options.notebook}: every cell ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
