"""Kernel > Interrupt during an answer asks it to stop, at a place of our choosing."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

__all__ = ["StopRequest"]


class StopRequest:
    """While entered on the main thread, a first SIGINT sets ``requested`` and a second one is a KeyboardInterrupt.

    A KeyboardInterrupt may come between any two bytecodes: in the middle of a message to the front end, or between the
    end of the answer and its place in the conversation. A flag that the stream looks at every few milliseconds may not.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: Any = None
        self._action: Callable[[], None] | None = None

    def then(self, action: Callable[[], None]) -> None:
        """Have ``action`` called as soon as a stop is requested, at once if it was already.

        It is called inside a signal handler, wherever the main thread is: it must take no lock.
        """
        self._action = action
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
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._action is not None:
            self._action()
