"""``asyncio.run`` inside a cell of an older kernel, for code of the user that needs it; the engines never do."""

from __future__ import annotations

import importlib.metadata
import sys

from packaging.version import Version

from mlc_nb.errors import MLCError

__all__ = ["allow_nested"]

_FIRST_WITHOUT = Version("7")


def allow_nested() -> None:
    """Let ``asyncio.run(...)`` work in cells of ipykernel 6, whose event loop runs already (by ``nest_asyncio``).

    `MLCEngine` and `AsyncMLCEngine` need no such thing: cells may use the one as it is and ``await`` the other.

    Raises
    ------
    MLCError
        The process is no notebook kernel, or its ipykernel is 7 or newer, where patching the loop can destroy it.
    """
    if "ipykernel" not in sys.modules:
        raise MLCError(
            "allow_nested() is for the event loop of a notebook kernel, and this process has none: leave the call out; "
            "asyncio.run(...) works as it is."
        )
    version = importlib.metadata.version("ipykernel")
    if Version(version) >= _FIRST_WITHOUT:
        raise MLCError(
            f"allow_nested() is for ipykernel before {_FIRST_WITHOUT}; this kernel has {version}, where patching the "
            "event loop can destroy it: write `await main()` in the cell instead of `asyncio.run(main())`."
        )
    import nest_asyncio

    nest_asyncio.apply()
