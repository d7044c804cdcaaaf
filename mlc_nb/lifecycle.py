"""Every way this process can end on its own terms leads to one place: whatever still runs is terminated, within 2 s.

Normal exit, ``sys.exit``, an uncaught exception and Ctrl-C arrive as soon as the main thread ends, before Python waits
for the threads that are no daemons (they may be reading a stream), and at the latest through `atexit`; SIGTERM through
a handler that keeps what was there before, exit status included. A notebook kernel adds its own shutdown
(`notebook/kernel_end.py`).
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - registers its own end first, see the bottom
import contextlib
import os
import queue
import signal
import threading
from typing import TYPE_CHECKING, Any

from mlc_nb.errors import EngineTerminatedError, RequestAborted

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["GRACE_S", "at_end", "end_now"]

GRACE_S = 1.5
"""Seconds that everything together may take to stop; 2 s is promised, the rest is the interpreter's own way out."""


def at_end(terminate: Callable[[float], None]) -> None:
    """Have ``terminate(seconds)`` called when this process ends; the same callable is kept once.

    Call it again whenever there is something new to terminate: a handler for SIGTERM can only be set by the main
    thread, so an earlier call from another thread may have left it unset.
    """
    _ending.add(terminate)


def end_now() -> None:
    """Terminate everything as if the process ended; safe in a signal handler, bounded by `GRACE_S`."""
    _ending.run()


class _Ending:
    """What to terminate in this process, and the thread that does it.

    The thread starts with the first engine and sleeps: a signal handler may interrupt a holder of any lock, so it must
    not take locks itself, and during shutdown no thread can start.
    """

    def __init__(self) -> None:
        self._terminators: list[Callable[[float], None]] = []
        self._orders: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._running = False
        self._anything_new = False

    def add(self, terminate: Callable[[float], None]) -> None:
        if terminate not in self._terminators:
            self._terminators.append(terminate)
        self._anything_new = True
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="mlc_nb-ending", daemon=True)
            thread.start()
            self._thread = thread  # only now: where none can start, the next call tries again
        _chain_sigterm()

    def run(self) -> None:
        if self._running or not self._terminators:
            return
        self._running = True
        done = threading.Event()
        self._orders.put(done)
        done.wait(GRACE_S)
        self._running = False

    def run_if_new(self) -> None:
        """Run unless nothing was added since this was last called."""
        if self._anything_new:
            self._anything_new = False
            self.run()

    def _serve(self) -> None:
        while True:
            done = self._orders.get()
            for terminate in self._terminators:
                # One that fails must not keep the others alive, and an ending process has nobody to tell.
                with contextlib.suppress(Exception):
                    terminate(GRACE_S)
            done.set()


_ending: _Ending = globals().get("_ending") or _Ending()  # see registry
_Handler = Any  # what signal.getsignal returns: a callable, SIG_DFL, SIG_IGN or None
_before: _Handler = globals().get("_before")


def _at_end_of_main_thread() -> None:
    # Python waits for other threads next. One may have nothing to do with us and last, so Ctrl-C works again then.
    found: _Handler = None
    if threading.current_thread() is threading.main_thread():
        found = signal.getsignal(signal.SIGINT)
    if found is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.excepthook = _quiet_for_ended_engines(threading.excepthook)
    try:
        _ending.run_if_new()
    finally:
        if found is not None:
            signal.signal(signal.SIGINT, found)


def _at_exit() -> None:
    if threading.current_thread() is threading.main_thread():
        # The process is ending already; a second Ctrl-C would only print a traceback.
        with contextlib.suppress(ValueError, OSError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.excepthook = _quiet_for_ended_engines(threading.excepthook)
    _ending.run_if_new()


def _quiet_for_ended_engines(report: Callable[[threading.ExceptHookArgs], object]) -> Callable[..., object]:
    # That the answers of daemon threads end with the process is not worth a traceback.
    def report_others(details: threading.ExceptHookArgs) -> None:
        daemon = details.thread is None or details.thread.daemon
        if not daemon or not issubclass(details.exc_type, (RequestAborted, EngineTerminatedError)):
            report(details)

    return report_others


def _chain_sigterm() -> None:
    global _before
    if threading.current_thread() is not threading.main_thread():
        return
    found: _Handler = signal.getsignal(signal.SIGTERM)
    # SIG_IGN: somebody wants this process to live on. None: a handler of C code that cannot be chained.
    if found in (_on_sigterm, signal.SIG_IGN, None) or _before is not None:
        return
    _before = found
    signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(signum: int, frame: FrameType | None) -> None:
    _ending.run()
    if callable(_before):
        _before(signum, frame)
    else:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)


def _forget() -> None:
    # A forked child owns nothing of its parent's: it has neither the engines' threads nor this one.
    global _ending
    _ending = _Ending()


atexit.register(_at_exit)
# The last registered is called first: before the one of executors, which waits for their threads.
_register_before_join: Callable[[Callable[[], None]], object] | None = getattr(threading, "_register_atexit", None)
if _register_before_join is not None:
    with contextlib.suppress(RuntimeError):  # the process is ending already
        _register_before_join(_at_end_of_main_thread)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
