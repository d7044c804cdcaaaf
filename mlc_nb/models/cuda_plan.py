"""Collects what a model needs on a GPU (kernels, parameters, buffers) while its launches are put in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlc_nb.compiler.kernels.cuda.matrix import PLAIN_PAIR, CudaMatrix, dequantize_matrix, pack_matrix, pack_rows
from mlc_nb.errors import ModelFormatError
from mlc_nb.weights.launch_plan import Argument, Buffer, Kernel, Launch, Packing, Product, Size
from mlc_nb.weights.plan import PackedWeight, SourceRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlc_nb.compiler.kernels.cuda.kernel import CudaKernel
    from mlc_nb.models.tensors import SourceTensor

__all__ = ["NULL", "PlanBuilder", "Weight", "buffer", "number", "real", "same_type_runs", "size"]

_QUANTIZED = ("Q4_0", "Q4_1", "Q8_0")
_PLAIN = ("F32", "F16", "BF16")
_DEQUANTIZED = "dequantized"

NULL = Argument(kind="null")


def buffer(name: str, offset: int = 0) -> Argument:
    """The address of a buffer, or of what lies ``offset`` bytes behind it."""
    return Argument(kind="buffer", name=name, offset=offset)


def size(name: str) -> Argument:
    """A size of the step."""
    return Argument(kind="size", name=name)


def number(value: int) -> Argument:
    """A 32-bit integer."""
    return Argument(kind="number", value=value)


def real(value: float) -> Argument:
    """A float32."""
    return Argument(kind="real", value=value)


# What kernels call by these names, is the same for all of them.
_COMMON = {name: buffer(name) for name in ("positions", "sequences", "page_tables", "cosines", "sines", "pages")} | {
    name: size(name) for name in ("tokens", "rows", "page_table_width", "num_pages")
}


@dataclass(frozen=True)
class Weight:
    """A matrix and where its arrays are in the parameter list."""

    matrix: CudaMatrix
    parameters: dict[str, int]

    @property
    def arguments(self) -> dict[str, Argument]:
        """Arguments of a kernel that reads it."""
        return {
            name: Argument(kind="parameter", value=self.parameters[name]) if name in self.parameters else NULL
            for name in ("values", "scales", "offsets")
        }


class PlanBuilder:
    """The parts of a plan so far.

    Parameters
    ----------
    dtype
        Of activations, and of weights that are not quantized: ``float16`` or ``bfloat16``.

    Attributes
    ----------
    kernels, parameters, packing, matrices
        What was collected.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.kernels: dict[str, CudaKernel] = {}
        self.parameters: list[int] = []
        self.packing: list[Packing] = []
        self.matrices: list[PackedWeight] = []
        self._buffers: dict[str, Size | int] = {}
        self._grid_sizes: dict[str, str] = {}
        self._dequantized_bytes = 0

    def weight(self, sources: Sequence[SourceTensor], pair: int = PLAIN_PAIR) -> Weight:
        """A matrix of tensors stacked on each other's rows, all of one type.

        Raises
        ------
        ModelFormatError
            If the kernels cannot take their type or sizes.
        """
        block_type, columns = sources[0].block_type, sources[0].columns
        rows = sum(source.rows for source in sources)
        names = ", ".join(source.name for source in sources)
        if len({source.block_type for source in sources}) > 1:
            raise ModelFormatError(
                f"{names} are stored in different types, which the kernels for GPUs cannot take together; use device "
                "'cpu', or a file that stores them in one type"
            )
        if block_type in _QUANTIZED and self.dtype != "float16":
            raise ModelFormatError(f"{names}: quantized weights need activations in float16 on a GPU, not {self.dtype}")
        if block_type not in (*_QUANTIZED, *_PLAIN):
            known = ", ".join((*_PLAIN, *_QUANTIZED))
            raise ModelFormatError(f"weights of type {block_type} ({names}) are not supported; supported are {known}")
        multiple = 32 if block_type in _QUANTIZED else 8
        if columns % multiple:
            raise ModelFormatError(f"{names}: {columns} columns; the kernels for GPUs need a multiple of {multiple}")
        stored = block_type if block_type in _QUANTIZED else "BF16" if self.dtype == "bfloat16" else "F16"
        matrix = CudaMatrix(stored, rows, columns, pair)
        parameters = {name: self._parameter(count) for name, count in matrix.array_bytes.items()}
        weight = Weight(matrix, parameters)
        kernel = pack_matrix(matrix) if matrix.quantized else pack_rows(matrix, block_type)
        first_row = 0
        for source in sources:
            head_size = source.rows // source.interleaved_heads if source.interleaved_heads else 0
            arguments = {
                **{name: weight.arguments[name] for name in ("values", "scales", "offsets")},
                "source": buffer("source"),
                "first_row": size("first_row"),
                "interleaved_head_size": number(head_size),
            }
            launch = self.launch(kernel, **{a.name: arguments[a.name] for a in kernel.arguments if a.name in arguments})
            self.packing.append(
                Packing(tensor=source.name, launch=launch, first_row=first_row, row_group=head_size or 1)
            )
            first_row += source.rows
        self.matrices.append(
            PackedWeight(
                parameters=parameters,
                block_type=stored,
                rows=-(-rows // 16) * 16,
                columns=columns,
                sources=tuple(
                    SourceRows(tensor=s.name, rows=s.rows, interleaved_heads=s.interleaved_heads) for s in sources
                ),
            )
        )
        return weight

    def vector(self, elements: int) -> int:
        """The parameter of a float32 vector."""
        return self._parameter(4 * elements)

    def buffer(self, name: str, elements: Size | int, dtype: str) -> Argument:
        """Memory for ``elements`` of ``dtype``."""
        width = 4 if dtype in ("float32", "int32", "uint32") else 2
        self._buffers[name] = elements * width
        return buffer(name)

    def launch(self, kernel: CudaKernel, grid_size: str = "", /, **arguments: Argument) -> Launch:
        """A launch of ``kernel``; arguments that are not given are the same for all kernels, or null.

        ``grid_size`` is the step's name of the one size that the grid depends on, where the kernel has another.
        """
        self.kernels[kernel.entry] = kernel
        self._grid_sizes[kernel.entry] = grid_size
        unknown = arguments.keys() - {argument.name for argument in kernel.arguments}
        assert not unknown, (kernel.entry, unknown)
        chosen = []
        for argument in kernel.arguments:
            value = arguments.get(argument.name, _COMMON.get(argument.name, NULL))
            assert argument.scalar == (value.kind in ("size", "number", "real")), (kernel.entry, argument.name)
            chosen.append(value)
        return Launch(kernel=kernel.entry, arguments=tuple(chosen))

    def product(
        self,
        weight: Weight,
        inputs: Argument,
        output: Argument,
        m: str,
        output_dtype: str,
        *,
        stride: int = 0,
        add: bool = False,
    ) -> list[Launch | Product]:
        """A product by cuBLAS, of the dequantized matrix where it is quantized."""
        matrix = weight.matrix
        steps: list[Launch | Product] = []
        values = weight.arguments["values"]
        if matrix.quantized:
            self._dequantized_bytes = max(self._dequantized_bytes, 2 * matrix.rows * matrix.columns)
            values = buffer(_DEQUANTIZED)
            steps.append(self.launch(dequantize_matrix(matrix), **weight.arguments, out=values))
        steps.append(
            Product(
                weight=values,
                inputs=inputs,
                output=output,
                m=m,
                rows=matrix.rows,
                columns=matrix.columns,
                output_stride=stride or matrix.rows,
                dtype=matrix.activation_dtype,
                output_dtype=output_dtype,
                add=add,
            )
        )
        return steps

    def described_kernels(self) -> dict[str, Kernel]:
        """The kernels as a plan holds them."""
        return {entry: _described(kernel, self._grid_sizes[entry]) for entry, kernel in self.kernels.items()}

    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers as a plan holds them."""
        sizes: dict[str, Size | int] = dict(self._buffers)
        if self._dequantized_bytes:
            sizes[_DEQUANTIZED] = self._dequantized_bytes
        return tuple(Buffer(name=name, size=str(count)) for name, count in sizes.items())

    def _parameter(self, count: int) -> int:
        self.parameters.append(count)
        return len(self.parameters) - 1


def same_type_runs(sources: Sequence[SourceTensor]) -> list[list[SourceTensor]]:
    """Neighbours of one block type together."""
    runs: list[list[SourceTensor]] = []
    for source in sources:
        if runs and runs[-1][0].block_type == source.block_type:
            runs[-1].append(source)
        else:
            runs.append([source])
    return runs


def _described(kernel: CudaKernel, grid_size: str) -> Kernel:
    sizes: dict[str, Any] = {name: Size(grid_size or name) for name in kernel.sizes}
    x, y, z = (str(extent) for extent in kernel.grid(**sizes))
    return Kernel(entry=kernel.entry, grid=(x, y, z), threads=kernel.threads, shared_bytes=kernel.shared_bytes)
