"""One progress bar, in a notebook or on a terminal, gone when the work is done.

What is over within two seconds shows none, so a warm start is silent.
"""

from __future__ import annotations

import contextlib
import html
import sys
import time
import uuid
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Bar", "byte_bar", "item_bar", "working"]

_SECONDS_BETWEEN_UPDATES = 0.25
_SECONDS_BEFORE_SHOWING = 2.0
_UNKNOWN_LENGTH = "{desc}: {elapsed}"


class Bar(Protocol):
    """What the work tells.

    Attributes
    ----------
    n, total
        How much is done, and of how much; None as long as nobody knows.
    """

    n: float
    total: float | None

    def update(self, n: float) -> object:
        """Count ``n`` more as done."""

    def close(self) -> None:
        """Take the bar away."""


class _CellBar:
    """A bar in the running cell of a kernel.

    It needs no widgets, is one output however often it changes, and leaves a saved notebook nothing to show.
    """

    def __init__(self, publisher: Any, description: str, form: dict[str, Any]) -> None:
        self.n: float = 0
        self.total: float | None = form.pop("total", None)
        self._publisher = publisher
        self._description = description
        self._form = form
        self._transient = {"display_id": uuid.uuid4().hex}
        self._started = time.monotonic()
        self._shown_at: float | None = None
        self._cell = publisher.parent_header

    def update(self, n: float) -> None:
        self.n += n
        now = time.monotonic()
        if self._shown_at is None and now - self._started < _SECONDS_BEFORE_SHOWING:
            return
        if self._shown_at is None or now - self._shown_at >= _SECONDS_BETWEEN_UPDATES:
            self._show(self._text(now - self._started))

    def close(self) -> None:
        if self._shown_at is not None:
            self._publish({"text/plain": ""})

    def _text(self, seconds: float) -> str:
        from tqdm.std import tqdm

        return str(tqdm.format_meter(self.n, self.total, seconds, prefix=self._description, ncols=90, **self._form))

    def _show(self, text: str) -> None:
        share = f"value='{self.n}' max='{self.total}'" if self.total else ""
        bar = f"<progress {share} style='width: 12em; margin-right: 1em'></progress>"
        without_bar = " ".join(part.strip() for part in text.split("|")[::2]) if self.total else text
        self._publish({"text/plain": text, "text/html": f"{bar}<small>{html.escape(without_bar)}</small>"})

    def _publish(self, bundle: dict[str, str]) -> None:
        update = self._shown_at is not None
        # Work in the background belongs to the cell that began it; ipykernel 6 knows the newest one only.
        newest = self._publisher.parent_header
        if newest != self._cell:
            self._publisher.set_parent(self._cell)
        try:
            self._publisher.publish(data=bundle, metadata={}, transient=self._transient, update=update)
        finally:
            if newest != self._cell:
                self._publisher.set_parent(newest)
        self._shown_at = time.monotonic()


class _NoBar:
    """Shows nothing."""

    def __init__(self) -> None:
        self.n: float = 0
        self.total: float | None = None

    def update(self, n: float) -> None:
        self.n += n

    def close(self) -> None:
        pass


@contextlib.contextmanager
def byte_bar(description: str, *, total: int | None = None, enabled: bool = True) -> Iterator[Bar]:
    """Show progress in bytes until the block ends, however it ends.

    Parameters
    ----------
    description
        What is being done, in a few words.
    total
        Bytes in all.
    enabled
        False shows nothing; the bar can be used all the same.

    Yields
    ------
    Bar
        Its ``total`` may be set once it is known.
    """
    bar = _bar(description, {"total": total, "unit": "B", "unit_scale": True, "unit_divisor": 1000}, enabled)
    with contextlib.closing(bar):
        yield bar


@contextlib.contextmanager
def item_bar(description: str, *, total: int, enabled: bool = True) -> Iterator[Callable[[], None]]:
    """Show how many of ``total`` things are done, until the block ends.

    Yields
    ------
    callable
        To be called when one more is done.
    """
    bar = _bar(description, {"total": total}, enabled)
    with contextlib.closing(bar):
        yield _counter(bar)


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
    bar = _bar(description, {"bar_format": _UNKNOWN_LENGTH}, enabled)
    with contextlib.closing(bar):
        yield _counter(bar)


def _counter(bar: Bar) -> Callable[[], None]:
    def count() -> None:
        bar.update(1)

    return count


def _bar(description: str, form: dict[str, Any], enabled: bool) -> Bar:
    if not enabled:
        return _NoBar()
    publisher = _cell_publisher()
    if publisher is not None:
        return _CellBar(publisher, description, form)
    from tqdm.std import tqdm

    bar: Bar = tqdm(
        desc=description, mininterval=_SECONDS_BETWEEN_UPDATES, delay=_SECONDS_BEFORE_SHOWING, leave=False, **form
    )
    return bar


def _cell_publisher() -> Any:
    """Return what publishes the outputs of a kernel's cells; None outside of kernels."""
    # Where this is a kernel, IPython is loaded: nothing else may load it.
    ipython: Any = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    return shell.display_pub if getattr(shell, "kernel", None) is not None else None
