"""Fills a compiled model's parameters from a model file, as the bundle's plan says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from mlc_nb.errors import ModelFormatError
from mlc_nb.quantization.packing import pack, packed_layout
from mlc_nb.runtime.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mlc_nb.weights.plan import LibraryMetadata, PackedWeight, SourceRows

__all__ = ["SourceTensorData", "floats", "load_parameters", "rope_tables"]


class SourceTensorData(Protocol):
    """What is needed of a tensor of the file; `mlc_nb.weights.gguf_file.GGUFTensor` is one."""

    @property
    def block_type(self) -> str:
        """Type of its blocks."""

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """Raw bytes, uint8 ``[rows, bytes per row]``."""


def load_parameters(
    metadata: LibraryMetadata, tensors: Mapping[str, SourceTensorData], progress: Callable[[int], object]
) -> list[npt.NDArray[Any]]:
    """Copy and repack all weights into one arena.

    Parameters
    ----------
    metadata
        The bundle's plan.
    tensors
        The file's tensors by name.
    progress
        Called with the bytes that were filled since the last call.

    Returns
    -------
    list of ndarray
        The parameters, in the order in which the compiled function takes them.

    Raises
    ------
    OutOfMemoryError
        If the weights do not fit in memory.
    """
    wanted: dict[int, tuple[tuple[int, ...], str]] = {v.parameter: ((v.size,), "float32") for v in metadata.vectors}
    for matrix in metadata.matrices:
        for part in packed_layout(matrix.block_type, matrix.rows, matrix.columns):
            wanted[matrix.parameters[part.name]] = (part.shape, part.dtype)
    ordered = [wanted[index] for index in range(len(wanted))]
    arena = Arena(Arena.needed(ordered), "the weights")
    parameters = [arena.array(shape, dtype) for shape, dtype in ordered]

    for vector in metadata.vectors:
        parameters[vector.parameter][...] = floats(tensors[vector.tensor])
    for matrix in metadata.matrices:
        _fill_matrix(matrix, tensors, parameters, progress)
    return parameters


def _fill_matrix(
    matrix: PackedWeight,
    tensors: Mapping[str, SourceTensorData],
    parameters: list[npt.NDArray[Any]],
    progress: Callable[[int], object],
) -> None:
    sources = [_rotated_rows(source, tensors[source.tensor].data) for source in matrix.sources]
    missing = matrix.rows - sum(len(source) for source in sources)
    if missing:
        sources.append(np.zeros((missing, sources[0].shape[1]), np.uint8))
    data = sources[0] if len(sources) == 1 else np.concatenate(sources)
    for name, packed in pack(matrix.block_type, data, matrix.columns).items():
        parameter = parameters[matrix.parameters[name]]
        parameter[...] = packed
        progress(parameter.nbytes)


def _rotated_rows(source: SourceRows, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Reorder rows (2 i, 2 i + 1) of each head to (i, i + half): rotary pairs become halves, as in GPT-NeoX."""
    if not source.interleaved_heads:
        return data
    rows, row_bytes = data.shape
    heads = data.reshape(source.interleaved_heads, -1, 2, row_bytes)
    reordered: npt.NDArray[np.uint8] = heads.transpose(0, 2, 1, 3).reshape(rows, row_bytes)
    return reordered


def floats(tensor: SourceTensorData) -> npt.NDArray[np.float32]:
    """The elements of an unquantized tensor, float32 ``[size]``."""
    raw = np.ascontiguousarray(tensor.data).reshape(-1)
    if tensor.block_type == "F32":
        return raw.view(np.float32)
    if tensor.block_type == "F16":
        return raw.view(np.float16).astype(np.float32)
    if tensor.block_type == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    raise ModelFormatError(f"a vector is stored as {tensor.block_type}; F32, F16 or BF16 was expected")


def rope_tables(
    metadata: LibraryMetadata, tensors: Mapping[str, SourceTensorData], positions: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosines and sines of the rotary angles, float32 ``[positions, dim / 2]`` each (formula in `RopeTable`)."""
    rope = metadata.rope
    half = rope.dim // 2
    frequencies = rope.base ** (-2.0 * np.arange(half, dtype=np.float64) / rope.dim) / rope.scale
    if rope.factors is not None:
        frequencies = frequencies / floats(tensors[rope.factors]).astype(np.float64)
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
    shape = (positions, half)
    arena = Arena(Arena.needed([(shape, "float32")] * 2), "the table of rotary embeddings")
    cosines, sines = arena.array(shape, "float32"), arena.array(shape, "float32")
    cosines[...], sines[...] = np.cos(angles), np.sin(angles)
    return cosines, sines
