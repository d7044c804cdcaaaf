"""One progress bar, in a notebook or on a terminal."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["byte_bar", "working"]

_SECONDS_BETWEEN_UPDATES = 0.25
_SECONDS_BEFORE_SHOWING = 2.0


@contextlib.contextmanager
def byte_bar(description: str, *, enabled: bool = True) -> Iterator[Any]:
    """Show progress in bytes until the block ends, however it ends.

    Parameters
    ----------
    description
        What is being done, in a few words.
    enabled
        False shows nothing; the bar can be used all the same.

    Yields
    ------
    tqdm.tqdm
        A bar whose total is unknown; set ``total`` once it is known.
    """
    from tqdm.auto import tqdm

    bar = tqdm(
        desc=description,
        unit="B",
        unit_scale=True,
        unit_divisor=1000,
        mininterval=_SECONDS_BETWEEN_UPDATES,
        delay=_SECONDS_BEFORE_SHOWING,
        disable=not enabled,
    )
    try:
        yield bar
    finally:
        bar.close()


@contextlib.contextmanager
def working(description: str, *, enabled: bool = True) -> Iterator[Callable[[], None]]:
    """Show that something of unknown length goes on, until the block ends.

    Parameters
    ----------
    description
        What is being done, in a few words.
    enabled
        False shows nothing.

    Yields
    ------
    callable
        To be called now and then: brings the elapsed time up to date.
    """
    from tqdm.auto import tqdm

    bar = tqdm(
        desc=description,
        bar_format="{desc}: {elapsed}",
        mininterval=_SECONDS_BETWEEN_UPDATES,
        delay=_SECONDS_BEFORE_SHOWING,
        disable=not enabled,
    )
    try:
        yield lambda: None if bar.disable else bar.update()
    finally:
        bar.close()
