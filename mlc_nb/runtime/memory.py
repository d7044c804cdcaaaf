"""How much memory things really take: what a runner holds, measured page by page."""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MemoryUse", "address_range", "resident_bytes"]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of a device's memory that a model runner holds now, by purpose.

    Attributes
    ----------
    weights, kv_cache
        Of these two, what is in memory: pages of the KV cache that no request has touched yet take none on a CPU.
    workspace
        What steps work in: partial results of attention, tables of rotary embeddings.
    logits
        The buffers that logits are written to.
    """

    weights: int = 0
    kv_cache: int = 0
    workspace: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.workspace + self.logits


def address_range(*arrays: npt.NDArray[Any]) -> tuple[int, int]:
    """First address and length of the memory that arrays of one mapping span; (0, 0) where there are none."""
    spans = [(array.ctypes.data, array.nbytes) for array in arrays if array.nbytes]
    if not spans:
        return 0, 0
    start = min(address for address, _ in spans)
    return start, max(address + size for address, size in spans) - start


def resident_bytes(ranges: Iterable[tuple[int, int]]) -> int:
    """Bytes of these ranges (first address, length) that are in memory; their length where the system does not tell."""
    return sum(_resident(start, length) for start, length in ranges)


def _resident(start: int, length: int) -> int:
    if not length or sys.platform != "linux":
        return length
    page = mmap.PAGESIZE
    first, end = start // page * page, -(-(start + length) // page) * page
    states = np.zeros((end - first) // page, np.uint8)
    failed = _mincore()(ctypes.c_void_p(first), ctypes.c_size_t(end - first), states.ctypes.data_as(ctypes.c_void_p))
    if failed:  # unmapped: it was released a moment ago
        return 0
    return min(int(np.count_nonzero(states & 1)) * page, length)


def _mincore() -> Any:
    return ctypes.CDLL(None, use_errno=True).mincore
