"""Kernel > Interrupt or a Stop button during an answer asks it to stop, at a place of our choosing."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

__all__ = ["StopRequest"]


class StopRequest:
    """Whether the user wants an answer to end.

    While entered on the main thread, a first SIGINT is such a request and a second one is a KeyboardInterrupt. A
    KeyboardInterrupt may come between any two bytecodes: in the middle of a message to the front end, or between the
    end of the answer and its place in the conversation. A flag that the stream looks at every few milliseconds may not.

    Attributes
    ----------
    requested
        Whether it was asked for, by SIGINT or by `request`.
    interrupted
        Whether SIGINT asked for it; cells in line behind this one then do not run either.
    """

    def __init__(self) -> None:
        self.requested = False
        self.interrupted = False
        self._before: Any = None
        self._actions: list[Callable[[], None]] = []

    def request(self) -> None:
        """Ask the answer to end; from any thread, as often as wanted."""
        self.requested = True
        for action in self._actions:
            action()

    def then(self, action: Callable[[], None]) -> None:
        """Have ``action`` called as soon as a stop is requested, at once if it was already; maybe more than once.

        It is called inside a signal handler, wherever the main thread is, or on another thread: it must take no lock.
        """
        self._actions.append(action)
        if self.requested:
            action()

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on_sigint)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _on_sigint(self, _signum: int, _frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        self.request()
