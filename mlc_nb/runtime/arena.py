"""Memory for weights and KV pages: one anonymous mapping an engine, given back to the system as a whole."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from mlc_nb.errors import OutOfMemoryError

__all__ = ["Arena"]

_ALIGNMENT = 64


class Arena:
    """A zero-filled mapping from which arrays are cut; pages that nobody touches cost nothing.

    Parameters
    ----------
    size
        Bytes; `needed` adds them up.
    purpose
        What the memory is for, in the error: "there is no memory for <purpose>".

    Raises
    ------
    OutOfMemoryError
        If the system does not grant the mapping.
    """

    def __init__(self, size: int, purpose: str) -> None:
        self.size = max(size, _ALIGNMENT)
        self._used = 0
        try:
            self._mapping = _anonymous(self.size)
        except (OSError, OverflowError, ValueError) as error:
            raise OutOfMemoryError(
                f"there is no memory for {purpose}: {self.size / 2**20:,.0f} MiB are needed, and the system does not "
                f"grant them ({error}). Free memory or choose a smaller model or a smaller max_total_sequence_length."
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._advise_huge_pages()

    def _advise_huge_pages(self) -> None:
        try:
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return  # a kernel without huge pages serves small ones

    @staticmethod
    def needed(shapes: list[tuple[tuple[int, ...], str]]) -> int:
        """Bytes for arrays of these shapes and dtypes."""
        return sum(_aligned(_nbytes(shape, dtype)) for shape, dtype in shapes)

    def array(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        """Cut the next array, aligned to 64 bytes."""
        size = _nbytes(shape, dtype)
        start, self._used = self._used, self._used + _aligned(size)
        view = memoryview(self._mapping)[start : start + size]
        return np.frombuffer(view, dtype=dtype).reshape(shape)


def _anonymous(size: int) -> mmap.mmap:
    """Private memory where the system tells private from shared: only that may come in huge pages."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, size)


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    size = np.dtype(dtype).itemsize
    for extent in shape:
        size *= extent
    return size


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
