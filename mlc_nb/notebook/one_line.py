"""Errors that a notebook user can act on: the cell fails, and shows the message instead of a wall of traceback."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from mlc_nb.errors import MLCError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["one_line_errors"]


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Let IPython show an `MLCError` or a KeyboardInterrupt that leaves the block as its name and message alone."""
    try:
        yield
    except (MLCError, KeyboardInterrupt) as error:
        line = f"{type(error).__name__}: {str(error) or 'stopped'}"
        # IPython asks an exception for its own traceback before it makes one.
        vars(error)["_render_traceback_"] = lambda: [line]
        raise
