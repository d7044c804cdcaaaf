"""The integers that a compiled step reads, in buffers that are filled anew for each step."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlc_nb.runtime.step import SequenceSlice

__all__ = ["StepInputs"]


class StepInputs:
    """Arguments of calls that have one shape in common.

    Making arrays and tensors costs more than filling them, and one decode step after another has the same shapes.

    Parameters
    ----------
    shapes
        New tokens, slices, chunks of pages in the longest page table, and rows of wanted logits.
    chunk_pages
        Pages in a chunk.
    partials
        The attention workspace of such a call.
    as_tensor
        Makes the native view of an array.

    Attributes
    ----------
    tensors
        Token ids, positions and slices of the new tokens, page tables ``[slices, chunks, pages of a chunk]``, rows.
    """

    def __init__(
        self,
        shapes: tuple[int, int, int, int],
        chunk_pages: int,
        partials: Any,
        as_tensor: Callable[[npt.NDArray[Any]], Any],
    ) -> None:
        self.shapes = shapes
        self.partials = partials
        tokens, slices, chunks, rows = shapes
        self._token_ids = _aligned((tokens,))
        self._positions = _aligned((tokens,))
        self._slices = _aligned((tokens,))
        tables = _aligned((slices, chunks, chunk_pages))
        # What no sequence fills is not read, but must name a page.
        tables[...] = 0
        self._tables = tables.reshape(slices, chunks * chunk_pages)
        self._rows = _aligned((rows,))
        arrays = (self._token_ids, self._positions, self._slices, tables, self._rows)
        self.tensors = tuple(as_tensor(array) for array in arrays)

    def fill(self, slices: Sequence[SequenceSlice], rows: Sequence[int]) -> None:
        """Write the numbers of a step of these shapes."""
        tokens, num_slices, _, _ = self.shapes
        self._rows[:] = rows
        starts = [part.start_position for part in slices]
        if tokens == num_slices:
            self._token_ids[:] = [part.token_ids[0] for part in slices]
            self._positions[:] = starts
            self._slices[:] = range(num_slices)
        else:
            counts = [len(part.token_ids) for part in slices]
            self._token_ids[:] = np.fromiter(chain.from_iterable(part.token_ids for part in slices), np.int32, tokens)
            first_rows = np.cumsum(counts) - counts
            self._positions[:] = np.arange(tokens) + np.repeat(np.asarray(starts) - first_rows, counts)
            self._slices[:] = np.repeat(np.arange(num_slices), counts)
        width = self._tables.shape[1]
        for row, part in zip(self._tables, slices, strict=True):
            pages = part.page_table if len(part.page_table) <= width else part.page_table[:width]
            row[: len(pages)] = pages


def _aligned(shape: tuple[int, ...]) -> npt.NDArray[np.int32]:
    """An array that starts at a multiple of 64 bytes, as compiled code expects of its arguments."""
    size = 4 * int(np.prod(shape))
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(np.int32).reshape(shape)
