"""Threads for the parallel loops of one library's kernels; what they do is ``compiler/kernels/cpu/crew.ll``."""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import Any

__all__ = ["WorkerCrew"]

_JOIN_SECONDS = 1.0


class WorkerCrew:
    """The threads that share each parallel loop with the thread that runs a step. They sleep between steps.

    Parameters
    ----------
    kernels
        The linked library.
    threads
        Threads in all, with the one that calls the kernels.
    """

    def __init__(self, kernels: Any, threads: int) -> None:
        self._kernels = kernels
        # Private pages are zeros, and begin at a cache line.
        self._memory = mmap.mmap(-1, kernels["crew_size"](threads), mmap.MAP_PRIVATE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        kernels["crew_begin"](self._address, threads)
        work = kernels["crew_work"]
        self._threads = [
            threading.Thread(target=work, args=(self._address, number), name=f"mlc_nb kernels {number}", daemon=True)
            for number in range(1, threads)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads; no kernel may run, and none of this library's may afterwards. A second call is harmless."""
        self._kernels["crew_end"](self._address)
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
