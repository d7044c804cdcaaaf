"""What every device's memory has in common: what engines need of it and hold of it, and how that is measured."""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["DeviceMemory", "MemoryNeeds", "MemoryRow", "MemoryUse", "address_range", "device_memory", "resident_bytes"]


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


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes of a device's memory that an engine is going to take.

    Attributes
    ----------
    weights, workspace, logits
        As in `MemoryUse`, with the buffers between the kernels of a step.
    kv_token
        The KV cache of one token.
    """

    weights: int
    kv_token: int
    workspace: int
    logits: int

    @property
    def fixed(self) -> int:
        """All but the KV cache."""
        return self.weights + self.workspace + self.logits


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A line of a table of memory: what for, and bytes."""

    purpose: str
    size: int


class DeviceMemory(Protocol):
    """The memory of one device."""

    def free_bytes(self) -> int:
        """Bytes that this process may still take."""

    def total_bytes(self) -> int:
        """Bytes of the whole device, as far as this process may have them."""

    def process_bytes(self) -> int:
        """Measure what this process takes in all."""

    def process_rows(self, engine_bytes: int) -> list[MemoryRow]:
        """Measure what this process takes besides the ``engine_bytes`` that its engines measured."""


def device_memory(device: str) -> DeviceMemory:
    """Return the memory of a device that `mlc_nb.runtime.devices.resolve_device` named."""
    if device == "cpu":
        from mlc_nb.runtime.cpu_memory import CpuMemory

        return CpuMemory()
    from mlc_nb.runtime.cuda_memory import CudaMemory
    from mlc_nb.runtime.devices import find_cuda_device

    return CudaMemory(find_cuda_device(device))


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
