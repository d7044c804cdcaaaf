"""Decode steps as CUDA graphs: one for each size of batch, rounded up, captured when it is first needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlc_nb.runtime.cuda_driver import call, driver

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlc_nb.runtime.cuda_driver import Context

__all__ = ["MOST_DECODES", "DecodeGraphs", "bucket_of"]

MOST_DECODES = 256
"""Decodes in the largest graph."""

_BUCKETS = (1, 2, 4, 8, *range(16, 64, 8), *range(64, MOST_DECODES + 1, 32))


def bucket_of(batch: int) -> int:
    """The size of the smallest graph for so many decodes; 0 where there is none."""
    return next((bucket for bucket in _BUCKETS if bucket >= batch), 0)


class DecodeGraphs:
    """The graphs of one engine.

    Parameters
    ----------
    context
        The device.
    queue
        Queues all launches of a step of so many decodes.
    """

    def __init__(self, context: Context, queue: Callable[[int], None]) -> None:
        self._context = context
        self._queue = queue
        self._graphs: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def launch(self, batch: int) -> None:
        """Queue a step of ``batch`` decodes, one of the sizes of `bucket_of`."""
        graph = self._graphs.get(batch)
        if graph is None:
            graph = self._graphs[batch] = self._capture(batch)
        (status,) = driver().cuGraphLaunch(graph, self._context.stream)
        if status:
            call((status,), "launching a step")

    def close(self) -> None:
        """Release the graphs; a second call does nothing."""
        for graph in self._graphs.values():
            driver().cuGraphExecDestroy(graph)
        self._graphs.clear()

    def _capture(self, batch: int) -> Any:
        cu = driver()
        stream = self._context.stream
        # Other threads of the process may use CUDA at the same time, torch for one.
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call(cu.cuStreamBeginCapture(stream, mode), "beginning to capture a step")
        try:
            self._queue(batch)
        finally:
            ended = cu.cuStreamEndCapture(stream)
        captured = call(ended, "capturing a step")
        try:
            return call(cu.cuGraphInstantiate(captured, 0), "preparing a captured step")
        finally:
            cu.cuGraphDestroy(captured)
