"""Threads that cannot start."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from mlc_nb.errors import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["started"]

T = TypeVar("T")


def started(start: Callable[[], T]) -> T:
    """Return what ``start``, which starts a thread, returns.

    Raises
    ------
    OutOfMemoryError
        The system starts no further thread.
    """
    try:
        return start()
    except RuntimeError as error:
        raise OutOfMemoryError(
            f"The system starts no further thread for the engine: {error}. Free memory, or raise the limit of threads."
        ) from error
