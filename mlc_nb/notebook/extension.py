"""What ``%load_ext mlc_nb`` adds to a shell, and how ``%unload_ext mlc_nb`` takes all of it away again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from mlc_nb.notebook.kernel_end import KernelEnd
from mlc_nb.notebook.magics.batches import BatchMagics
from mlc_nb.notebook.magics.chat import ChatMagics
from mlc_nb.notebook.magics.common import ShellState
from mlc_nb.notebook.magics.engines import EngineMagics
from mlc_nb.notebook.magics.overview import OverviewMagics, overview
from mlc_nb.notebook.prompt_cell import PromptCells
from mlc_nb.notebook.settings import MLCMagics
from mlc_nb.notebook.tab_completion import MagicMatcher, variables_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable

    from IPython.core.interactiveshell import InteractiveShell
    from IPython.core.magic import Magics

__all__ = ["GROUPS", "load", "parsers", "unload"]

GROUPS = (ChatMagics, BatchMagics, EngineMagics, OverviewMagics)
"""The classes whose methods are our magics."""

_PROMPT_CELLS = ("mlc_batch", "mlc_chat", "mlc_compare", "mlc_complete")

OverviewMagics.mlc.__doc__ = overview(GROUPS)


def parsers(groups: Iterable[type[Magics]]) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the magics of ``groups`` by name."""
    methods = {name: method for group in groups for name, method in vars(group).items()}
    return {name: method.parser for name, method in methods.items() if hasattr(method, "parser")}


class _Extension:
    """Everything that one shell got from us."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._cells = PromptCells(shell, names=_PROMPT_CELLS)
        self._settings = MLCMagics(parent=shell)
        state = ShellState(shell, self._settings, self._cells)
        self._groups = [group(state) for group in GROUPS]
        kernel = getattr(shell, "kernel", None)
        self._kernel_end = KernelEnd(kernel) if kernel is not None else None
        shell.register_magics(*self._groups)
        self._matcher = MagicMatcher(shell, parsers(GROUPS), self._values(state))
        # Where %config looks. The groups have put themselves there as well and have nothing to configure.
        self._configurables = cast("list[Any]", shell.configurables)
        self._configurables.append(self._settings)

    def _values(self, state: ShellState) -> dict[str, Callable[[], Iterable[str]]]:
        def variables() -> list[str]:
            return variables_of(self._shell)

        names = ("variables", "tools", "json_schema", "data", "output")
        return {
            **dict.fromkeys(names, variables),
            "model": state.model_names,
            "name": state.chat_names,
            "chat": state.chat_names,
            "setting": lambda: sorted(self._settings.trait_names(config=True)),
        }

    def remove(self) -> None:
        if self._kernel_end is not None:
            self._kernel_end.detach()
        self._cells.detach()
        self._matcher.detach()
        for ours in (self._settings, *self._groups):
            self._configurables.remove(ours)
        manager = self._shell.magics_manager
        for group in self._groups:
            manager.registry.pop(type(group).__name__, None)
        for magics in manager.magics.values():
            for name in [name for name, magic in magics.items() if getattr(magic, "__self__", None) in self._groups]:
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
