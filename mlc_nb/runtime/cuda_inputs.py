"""The integers that a step reads, on their way to the GPU.

A step's numbers are written to page-locked memory and copied from there on the engine's stream, behind the step before
and in front of their own: no step's tables can be overwritten while it reads them. The host may be one step ahead; it
writes to the memory of the step before last, after the copy out of it is known to have ended.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mlc_nb.runtime.cuda_driver import call, driver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlc_nb.runtime.cuda_driver import Context
    from mlc_nb.runtime.step import SequenceSlice

__all__ = ["InputSizes", "StepInputs", "host_array"]

_ALIGNMENT = 64  # elements
_SLOTS = 2


@dataclass(frozen=True)
class InputSizes:
    """The most of everything in a step.

    Attributes
    ----------
    tokens
        New tokens.
    sequences
        Sequences, each with its page table.
    rows
        Rows whose logits are wanted.
    page_table_width
        Pages of the longest sequence.
    tile_rows
        Tokens of one sequence that a block of the prefill attention takes.
    """

    tokens: int
    sequences: int
    rows: int
    page_table_width: int
    tile_rows: int

    @property
    def tiles(self) -> int:
        """The most tiles: every sequence may end in one that is not full."""
        return -(-self.tokens // self.tile_rows) + self.sequences


@dataclass(frozen=True)
class _Slot:
    """One of the host's copies, and the event behind the copies out of it."""

    numbers: npt.NDArray[np.int32]
    tables: npt.NDArray[np.int32]
    event: Any


class StepInputs:
    """Token ids, positions, sequences, wanted rows and attention tiles of a step, and page tables.

    Parameters
    ----------
    context
        The device.
    sizes
        The most of everything.

    Attributes
    ----------
    places
        Addresses on the device, by the names of a launch plan.
    """

    def __init__(self, context: Context, sizes: InputSizes) -> None:
        self._context = context
        self._sizes = sizes
        self._starts, size = _places(sizes)
        self._pitch = 4 * sizes.page_table_width
        table_bytes = self._pitch * sizes.sequences
        self._bytes = 4 * size
        self._numbers = context.allocate(self._bytes, "the numbers of a step")
        self._tables = context.allocate(table_bytes, "page tables")
        self.places = {name: self._numbers + 4 * start for name, (start, _) in self._starts.items()}
        self.places["page_tables"] = self._tables
        self._slots = [self._slot(table_bytes) for _ in range(_SLOTS)]
        self._next = 0
        self._copy = driver().CUDA_MEMCPY2D()
        self._copy.srcMemoryType = driver().CUmemorytype.CU_MEMORYTYPE_HOST
        self._copy.dstMemoryType = driver().CUmemorytype.CU_MEMORYTYPE_DEVICE
        self._copy.dstDevice = self._tables
        self._copy.srcPitch = self._copy.dstPitch = self._pitch

    @staticmethod
    def needed(sizes: InputSizes) -> int:
        """Bytes of device memory that they take."""
        return 4 * (_places(sizes)[1] + sizes.page_table_width * sizes.sequences)

    def send(
        self, slices: Sequence[SequenceSlice], rows: Sequence[int], *, padded_tokens: int, padded_rows: int
    ) -> tuple[int, int]:
        """Queue the copies of a step.

        Parameters
        ----------
        slices
            Those of one new token first.
        rows
            Tokens whose logits are wanted.
        padded_tokens, padded_rows
            What the launches were captured for; tokens up to there are marked as none, rows name the first token.

        Returns
        -------
        tuple
            How many leading slices have one new token, and the number of tiles of the others.
        """
        slot = self._slots[self._next]
        self._next = (self._next + 1) % _SLOTS
        call(driver().cuEventSynchronize(slot.event), "waiting for a step's numbers to be copied")
        decodes, tiles, width = self._fill(slot, slices, rows, padded_tokens, padded_rows)
        stream = self._context.stream
        (status,) = driver().cuMemcpyHtoDAsync(self._numbers, slot.numbers.ctypes.data, self._bytes, stream)
        if status:
            call((status,), "copying a step's numbers")
        self._copy.srcHost = slot.tables.ctypes.data
        self._copy.WidthInBytes = 4 * width
        self._copy.Height = len(slices)
        (status,) = driver().cuMemcpy2DAsync(self._copy, stream)
        if status:
            call((status,), "copying page tables")
        call(driver().cuEventRecord(slot.event, stream), "marking a step's numbers as copied")
        return decodes, tiles

    def _fill(
        self, slot: _Slot, slices: Sequence[SequenceSlice], rows: Sequence[int], padded_tokens: int, padded_rows: int
    ) -> tuple[int, int, int]:
        counts = [len(part.token_ids) for part in slices]
        starts = [part.start_position for part in slices]
        tokens = sum(counts)
        token_ids, positions, sequences = (self._view(slot, name) for name in ("token_ids", "positions", "sequences"))
        decodes = next((index for index, count in enumerate(counts) if count != 1), len(counts))
        if decodes == len(slices):
            token_ids[:tokens] = [part.token_ids[0] for part in slices]
            positions[:tokens] = starts
            sequences[:tokens] = np.arange(tokens)
            tiles = 0
        else:
            token_ids[:tokens] = np.fromiter(chain.from_iterable(part.token_ids for part in slices), np.int32, tokens)
            first_rows = np.cumsum(counts) - counts
            positions[:tokens] = np.arange(tokens) + np.repeat(np.asarray(starts) - first_rows, counts)
            sequences[:tokens] = np.repeat(np.arange(len(slices)), counts)
            tiles = self._fill_tiles(slot, starts, counts, decodes)
        token_ids[tokens:padded_tokens] = 0
        positions[tokens:padded_tokens] = -1
        sequences[tokens:padded_tokens] = 0
        wanted = self._view(slot, "logit_rows")
        wanted[: len(rows)] = rows
        wanted[len(rows) : padded_rows] = 0
        width = 1
        for row, part in zip(slot.tables, slices, strict=False):
            pages = part.page_table
            row[: len(pages)] = pages
            width = max(width, len(pages))
        return decodes, tiles, width

    def _fill_tiles(self, slot: _Slot, starts: list[int], counts: list[int], decodes: int) -> int:
        found: list[tuple[int, int, int, int]] = []
        row, most = decodes, self._sizes.tile_rows
        for sequence in range(decodes, len(counts)):
            for done in range(0, counts[sequence], most):
                rows = min(most, counts[sequence] - done)
                found.append((row + done, rows, sequence, starts[sequence] + done))
            row += counts[sequence]
        # The longest contexts first, so that no block begins late what lasts.
        found.sort(key=lambda tile: -tile[3])
        self._view(slot, "tiles").reshape(-1, 4)[: len(found)] = found
        return len(found)

    def _view(self, slot: _Slot, name: str) -> npt.NDArray[np.int32]:
        start, end = self._starts[name]
        return slot.numbers[start:end]

    def _slot(self, table_bytes: int) -> _Slot:
        numbers = host_array(self._context, self._bytes).view(np.int32)
        tables = host_array(self._context, table_bytes).view(np.int32)
        numbers[:] = 0
        tables[:] = 0
        return _Slot(numbers, tables.reshape(self._sizes.sequences, -1), self._context.event())


def _places(sizes: InputSizes) -> tuple[dict[str, tuple[int, int]], int]:
    """Where the numbers lie: first and last element of each kind, and the number of all elements."""
    counts = {
        "token_ids": sizes.tokens,
        "positions": sizes.tokens,
        "sequences": sizes.tokens,
        "logit_rows": sizes.rows,
        "tiles": 4 * sizes.tiles,
    }
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for name, count in counts.items():
        places[name] = (end, end + count)
        end += -(-count // _ALIGNMENT) * _ALIGNMENT
    return places, end


def host_array(context: Context, size: int) -> npt.NDArray[np.uint8]:
    """Page-locked memory as an array of bytes; it must not be used once the context is closed."""
    address = context.allocate_host(size)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
