"""Packed weights: every bit of the file at the place where the kernels look for it."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlc_nb.errors import ModelFormatError
from mlc_nb.quantization.packing import BLOCK_BYTES, pack, packed_bytes, packed_layout

SIZES = {"F32": 4, "F16": 2, "BF16": 2}
rows_and_columns = st.tuples(st.integers(1, 4).map(lambda n: 16 * n), st.integers(1, 5).map(lambda n: 32 * n))


@given(rows_and_columns, st.sampled_from([*SIZES, *BLOCK_BYTES]))
def test_parts_have_the_layout_s_shapes_and_cover_every_byte(size: tuple[int, int], block_type: str) -> None:
    rows, columns = size
    row_bytes = columns * SIZES[block_type] if block_type in SIZES else columns // 32 * BLOCK_BYTES[block_type]
    data = np.random.default_rng(rows * columns).integers(0, 256, (rows, row_bytes)).astype(np.uint8)
    parts = pack(block_type, data, columns)
    layout = packed_layout(block_type, rows, columns)
    assert [(part.name, part.shape, part.dtype) for part in layout] == [
        (part.name, parts[part.name].shape, str(parts[part.name].dtype)) for part in layout
    ]
    assert packed_bytes(block_type, rows, columns) == data.nbytes == sum(part.nbytes for part in parts.values())
    # Nothing but moved: the same bytes, counted.
    packed = np.concatenate([np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in parts.values()])
    assert np.array_equal(np.bincount(packed, minlength=256), np.bincount(data.reshape(-1), minlength=256))
    assert all(np.shares_memory(part, data) for part in parts.values())


@pytest.mark.parametrize("block_type", BLOCK_BYTES)
def test_weights_can_be_read_back_from_their_places(block_type: str) -> None:
    rows, columns = 48, 96
    kind = gguf.GGMLQuantizationType[block_type]
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    data = gguf.quants.quantize(values, kind)
    wanted = gguf.quants.dequantize(data, kind)
    parts = {name: np.ascontiguousarray(part) for name, part in pack(block_type, data, columns).items()}
    for row in range(rows):
        tile, lane = divmod(row, 16)
        for block in range(columns // 32):
            words = parts["quants"][tile, block, :, lane].copy().view(np.uint8)
            if block_type == "Q8_0":
                quants = words.view(np.int8).astype(np.float32)
            else:
                quants = np.concatenate([words & 15, words >> 4]).astype(np.float32)
            offset = np.float32(0)
            if block_type == "Q4_0":
                quants -= 8
            elif block_type == "Q4_1":
                offset = np.float32(parts["offsets"][tile, block, lane])
            decoded = quants * np.float32(parts["scales"][tile, block, lane]) + offset
            assert np.array_equal(decoded, wanted[row, block * 32 : block * 32 + 32])


@pytest.mark.parametrize(
    ("block_type", "rows", "columns", "message"),
    [
        ("Q4_1", 20, 64, "a weight has 20 rows; the kernels need a multiple of 16"),
        ("Q8_0", 16, 48, "a Q8_0 weight has 48 columns; it needs a multiple of 32"),
        ("Q6_K", 16, 256, "type Q6_K are not supported; supported types are F32, F16, BF16, Q8_0, Q4_0, Q4_1"),
    ],
)
def test_what_cannot_be_packed_is_named(block_type: str, rows: int, columns: int, message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        packed_layout(block_type, rows, columns)
