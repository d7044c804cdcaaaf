"""Random weights in the block types of GGUF files; their values as the gguf package decodes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np

from mlc_nb.quantization.packing import pack, packed_layout

if TYPE_CHECKING:
    import numpy.typing as npt

QUANTIZED = ("Q4_0", "Q4_1", "Q8_0")
PLAIN = ("F32", "F16", "BF16")


def random_blocks(block_type: str, rows: int, columns: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Raw bytes uint8 ``[rows, bytes per row]`` that use the whole range of their type: -128 in Q8_0, zero scales."""
    if block_type not in QUANTIZED:
        values = rng.standard_normal((rows, columns)).astype(np.float32)
        kind = gguf.GGMLQuantizationType[block_type]
        return np.ascontiguousarray(gguf.quants.quantize(values, kind)).view(np.uint8).reshape(rows, -1)
    blocks = rows * columns // 32
    scales = (rng.random(blocks) * 0.05).astype(np.float16)
    scales[::7] = 0.0
    scales[1::7] = 6e-8  # the smallest float16
    parts = [scales[:, None].view(np.uint8)]
    if block_type == "Q4_1":
        parts.append((-rng.random(blocks)).astype(np.float16)[:, None].view(np.uint8))
    quants = rng.integers(0, 256, (blocks, 32 if block_type == "Q8_0" else 16)).astype(np.uint8)
    quants[0] = 128
    quants[-1] = 255
    return np.concatenate([*parts, quants], axis=1).reshape(rows, -1)


def decoded(block_type: str, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """The weights that raw bytes stand for, as the gguf package reads them."""
    kind = gguf.GGMLQuantizationType[block_type]
    view = {"F32": np.float32, "F16": np.float16}.get(block_type, np.uint8)
    return np.asarray(gguf.quants.dequantize(data.view(view), kind), np.float64)


def packed(block_type: str, data: npt.NDArray[np.uint8], columns: int) -> list[npt.NDArray[np.generic]]:
    """The arrays that kernels take, in their order."""
    parts = pack(block_type, data, columns)
    return [np.ascontiguousarray(parts[part.name]) for part in packed_layout(block_type, len(data), columns)]
