"""Coroutines that a cell waits for: the kernel's loop runs already, so they get a thread and a loop of their own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from mlc_nb.notebook.interrupt import StopRequest

__all__ = ["run_off_loop"]

ResultT = TypeVar("ResultT")
_SECONDS_BETWEEN_TICKS = 0.05


def run_off_loop(
    work: Callable[[], Coroutine[Any, Any, ResultT]], stop: StopRequest, tick: Callable[[], None]
) -> ResultT | None:
    """Run ``work`` on a thread of its own and return its result, or None where ``stop`` cancelled it.

    Parameters
    ----------
    tick
        Called on this thread many times a second until then.
    """
    outcome: concurrent.futures.Future[ResultT | None] = concurrent.futures.Future()

    async def main() -> ResultT:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None  # this one

        def cancel() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: there is nothing to cancel
                loop.call_soon_threadsafe(task.cancel)

        stop.then(cancel)
        return await work()

    def run() -> None:
        try:
            outcome.set_result(asyncio.run(main()))
        except asyncio.CancelledError:
            outcome.set_result(None)
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="mlc_nb cell", daemon=True).start()
    try:
        while not outcome.done():
            concurrent.futures.wait([outcome], timeout=_SECONDS_BETWEEN_TICKS)
            tick()
    except BaseException:
        stop.request()
        raise
    return outcome.result()
