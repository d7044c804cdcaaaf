"""Where a cell's result is found afterwards: ``_``, ``Out`` and a variable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["keep"]


def keep(shell: InteractiveShell, result: object, name: str | None) -> None:
    """Make ``result`` the value of the running cell, and of the variable ``name`` if there is one.

    Returned from the magic, it would be displayed, and saved, a second time.
    """
    hook: Any = shell.displayhook
    hook.check_for_underscore()
    hook.update_user_ns(result)
    if name is not None:
        shell.user_ns[name] = result
