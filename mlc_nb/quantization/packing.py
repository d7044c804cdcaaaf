"""How weights lie in memory for the kernels, and how GGUF blocks are brought into that form without changing a value.

Sixteen output rows are stored side by side ("a row tile"), so that one vector register holds the same columns of
neighbouring rows. Quantized values keep their bits: four bytes of one row stay together in an int32, rows alternate.

GGUF block formats (ggml's ``ggml-common.h``), each of 32 weights along K, little-endian:

- Q8_0: float16 scale d, 32 int8 q; w = d * q.
- Q4_0: float16 d, 16 bytes; byte j holds q[j] in its low and q[j + 16] in its high nibble; w = d * (q - 8).
- Q4_1: float16 d, float16 m, 16 bytes as Q4_0; w = d * q + m.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mlc_nb.errors import ModelFormatError

__all__ = ["BLOCK", "BLOCK_BYTES", "ROW_TILE", "PackedPart", "pack", "packed_bytes", "packed_layout"]

BLOCK = 32
"""Weights in a quantized block."""

ROW_TILE = 16
"""Output rows stored side by side."""

BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
"""Bytes of one quantized block in a file."""

_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "uint16"}


@dataclass(frozen=True)
class PackedPart:
    """One array of a packed weight."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def packed_layout(block_type: str, rows: int, columns: int) -> tuple[PackedPart, ...]:
    """Arrays that hold a weight of ``rows`` x ``columns``.

    Returns
    -------
    tuple of PackedPart
        F32, F16, BF16: ``values`` ``[N/16, K, 16]`` (BF16 as uint16). Q8_0: ``quants`` int32
        ``[N/16, K/32, 8, 16]``, ``scales`` float16 ``[N/16, K/32, 16]``. Q4_0: the same with 4 words a block. Q4_1:
        besides, ``offsets`` like ``scales``.

    Raises
    ------
    ModelFormatError
        If the block type is unknown, or the sizes are not multiples of 16 rows and of a block.
    """
    if rows % ROW_TILE:
        raise ModelFormatError(f"a weight has {rows} rows; the kernels need a multiple of {ROW_TILE}")
    tiles = rows // ROW_TILE
    if block_type in _PLAIN:
        return (PackedPart("values", (tiles, columns, ROW_TILE), _PLAIN[block_type]),)
    if block_type not in BLOCK_BYTES:
        known = ", ".join([*_PLAIN, *BLOCK_BYTES])
        raise ModelFormatError(f"weights of type {block_type} are not supported; supported types are {known}")
    if columns % BLOCK:
        raise ModelFormatError(f"a {block_type} weight has {columns} columns; it needs a multiple of {BLOCK}")
    blocks = columns // BLOCK
    words = 8 if block_type == "Q8_0" else 4
    parts = [
        PackedPart("quants", (tiles, blocks, words, ROW_TILE), "int32"),
        PackedPart("scales", (tiles, blocks, ROW_TILE), "float16"),
    ]
    if block_type == "Q4_1":
        parts.append(PackedPart("offsets", (tiles, blocks, ROW_TILE), "float16"))
    return tuple(parts)


def packed_bytes(block_type: str, rows: int, columns: int) -> int:
    """Bytes of a packed weight."""
    parts = packed_layout(block_type, rows, columns)
    return sum(math.prod(part.shape) * np.dtype(part.dtype).itemsize for part in parts)


def pack(block_type: str, data: npt.NDArray[np.uint8], columns: int) -> dict[str, npt.NDArray[Any]]:
    """Bring the rows of a weight into the kernels' order.

    Parameters
    ----------
    block_type
        Type of the blocks in ``data``.
    data
        Raw bytes of the file, uint8 ``[N, bytes per row]``; N a multiple of 16.
    columns
        K.

    Returns
    -------
    dict
        Views (not copies) with the shapes of `packed_layout`, to be copied to their place by the caller.
    """
    rows = data.shape[0]
    packed_layout(block_type, rows, columns)
    tiles = rows // ROW_TILE
    if block_type in _PLAIN:
        values = data.view(_PLAIN[block_type]).reshape(tiles, ROW_TILE, columns)
        return {"values": values.transpose(0, 2, 1)}
    blocks = data.reshape(tiles, ROW_TILE, columns // BLOCK, BLOCK_BYTES[block_type])
    header = 4 if block_type == "Q4_1" else 2
    names = ("scales", "offsets")[: header // 2]
    headers = blocks[..., :header].view(np.float16).transpose(3, 0, 2, 1)
    parts: dict[str, npt.NDArray[Any]] = dict(zip(names, headers, strict=True))
    parts["quants"] = blocks[..., header:].view(np.int32).transpose(0, 2, 3, 1)
    return parts
