"""The file's tensors as an architecture asks for them: checked to be there and to have the right sizes."""

from __future__ import annotations

from dataclasses import dataclass

from mlc_nb.errors import ModelFormatError

__all__ = ["SourceTensor", "matrix", "vector"]


@dataclass(frozen=True)
class SourceTensor:
    """A matrix of the file: its name, block type, ``rows`` x ``columns``, and how its rows are ordered."""

    name: str
    block_type: str
    rows: int
    columns: int
    interleaved_heads: int = 0


def matrix(
    tensors: dict[str, tuple[str, tuple[int, ...]]], name: str, rows: int, columns: int, heads: int = 0
) -> SourceTensor:
    """The file's matrix ``name``, checked against the sizes that the hyperparameters call for.

    Raises
    ------
    ModelFormatError
        If it is missing or of another shape.
    """
    if name not in tensors:
        raise ModelFormatError(f"the file has no tensor {name!r}, which its architecture needs; the file is incomplete")
    block_type, shape = tensors[name]
    if shape != (rows, columns):
        raise ModelFormatError(
            f"tensor {name!r} has shape {list(shape)}, but the file's hyperparameters call for [{rows}, {columns}]"
        )
    return SourceTensor(name, block_type, rows, columns, heads)


def vector(tensors: dict[str, tuple[str, tuple[int, ...]]], name: str, size: int) -> str:
    """The name of the file's vector, checked to be there, unquantized and of the right size.

    Raises
    ------
    ModelFormatError
        If it is missing, of another shape, or quantized.
    """
    if name not in tensors:
        raise ModelFormatError(f"the file has no tensor {name!r}, which its architecture needs; the file is incomplete")
    block_type, shape = tensors[name]
    if shape != (size,) or block_type not in ("F32", "F16", "BF16"):
        raise ModelFormatError(
            f"tensor {name!r} is {block_type} of shape {list(shape)}; its architecture needs {size} unquantized "
            "elements (F32, F16 or BF16)"
        )
    return name
