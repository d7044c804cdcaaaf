"""What ``%load_ext mlc_nb`` adds to a shell, and how ``%unload_ext mlc_nb`` takes all of it away again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from mlc_nb.notebook.kernel_end import KernelEnd
from mlc_nb.notebook.magics import MLCMagics
from mlc_nb.notebook.prompt_cell import PromptCells

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["load", "unload"]


class _Extension:
    """Everything that one shell got from us."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._cells = PromptCells(shell, names=["mlc_chat"])
        self._magics = MLCMagics(shell, self._cells)
        kernel = getattr(shell, "kernel", None)
        self._kernel_end = KernelEnd(kernel) if kernel is not None else None
        shell.register_magics(self._magics)
        # Magics have put themselves there, which is how %config finds them.
        self._configurables = cast("list[Any]", shell.configurables)

    def remove(self) -> None:
        if self._kernel_end is not None:
            self._kernel_end.detach()
        self._cells.detach()
        self._configurables.remove(self._magics)
        manager = self._shell.magics_manager
        manager.registry.pop(type(self._magics).__name__, None)
        for magics in manager.magics.values():
            for name in [name for name, magic in magics.items() if getattr(magic, "__self__", None) is self._magics]:
                del magics[name]


_extensions: WeakKeyDictionary[InteractiveShell, _Extension] = WeakKeyDictionary()


def load(shell: InteractiveShell) -> None:
    """Add magics, prompt cells and the shutdown hook to ``shell``, once."""
    if shell not in _extensions:
        _extensions[shell] = _Extension(shell)


def unload(shell: InteractiveShell) -> None:
    """Take back what `load` added; engines stay loaded."""
    extension = _extensions.pop(shell, None)
    if extension is not None:
        extension.remove()
