"""Errors that a notebook user can act on: the cell fails, and shows the message instead of a wall of traceback."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from mlc_nb.errors import MLCError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["answer_interrupted", "one_line_errors"]


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Let IPython show an `MLCError` that leaves the block as its name and message alone."""
    try:
        yield
    except MLCError as error:
        _show_as(error, f"{type(error).__name__}: {error}")
        raise


def answer_interrupted() -> KeyboardInterrupt:
    """Return what a cell raises after Kernel > Interrupt, so that cells in line behind it do not run either."""
    error = KeyboardInterrupt("the answer was stopped")
    _show_as(error, "KeyboardInterrupt: the answer was stopped; the conversation keeps what it said so far.")
    return error


def _show_as(error: BaseException, line: str) -> None:
    # IPython asks an exception for its own traceback before it makes one.
    vars(error)["_render_traceback_"] = lambda: [line]
