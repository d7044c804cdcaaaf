"""What the magics of one shell share."""

from __future__ import annotations

import contextlib
from functools import cached_property
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics

from mlc_nb.notebook.imports import import_engine
from mlc_nb.notebook.one_line import one_line_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from IPython.core.interactiveshell import InteractiveShell

    from mlc_nb.notebook.batch_cell import BatchCells
    from mlc_nb.notebook.cell_engines import CellEngines
    from mlc_nb.notebook.chat_cell import ChatCells
    from mlc_nb.notebook.prompt_cell import PromptCells
    from mlc_nb.notebook.settings import MLCMagics

__all__ = ["MagicsOfShell", "ShellState"]


class ShellState:
    """What the magics of one shell work on.

    Parameters
    ----------
    settings
        What they do where no option says.
    cells
        Tells what was typed below a cell magic.
    """

    # Made when first used: loading the extension must not cost what the engine costs.

    def __init__(self, shell: InteractiveShell, settings: MLCMagics, cells: PromptCells) -> None:
        self.shell = shell
        self.settings = settings
        self.cells = cells

    @cached_property
    def engines(self) -> CellEngines:
        """The engines that the magics have loaded."""
        from mlc_nb.notebook.cell_engines import CellEngines

        return CellEngines(self.settings)

    @cached_property
    def chats(self) -> ChatCells:
        """The chat cells and their conversations."""
        from mlc_nb.notebook.chat_cell import ChatCells

        return ChatCells(self.shell, self.settings, self.engines)

    @cached_property
    def batches(self) -> BatchCells:
        """The batch cells."""
        from mlc_nb.notebook.batch_cell import BatchCells

        return BatchCells(self.shell, self.settings, self.engines)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """What a magic that talks to engines runs in: errors of ours are one line, and imports are whole."""
        with one_line_errors():
            import_engine()
            yield

    def variables(self, local_ns: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the variables that a magic can be given by name."""
        return {**self.shell.user_ns, **(local_ns or {})}

    def model_names(self) -> list[str]:
        """Return the models that are known by name here."""
        from mlc_nb.notebook.models_view import known_models

        return known_models()

    def chat_names(self) -> list[str]:
        """Return the names of the conversations."""
        return [conversation.name for conversation in self.chats.conversations]

    def show(self, bundle: dict[str, str]) -> None:
        """Show one output, by its representations."""
        self.shell.display_pub.publish(data=bundle, metadata={})


class MagicsOfShell(Magics):
    """Base of our groups of magics."""

    def __init__(self, state: ShellState) -> None:
        super().__init__(state.shell)
        self._state = state
