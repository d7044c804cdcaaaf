"""Layers that the architecture families share: packed products and the forms in which activations reach them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlc_nb.compiler.kernels.cpu import elementwise, linear
from mlc_nb.quantization.packing import BLOCK, ROW_TILE, packed_layout
from mlc_nb.weights.plan import PackedWeight, SourceRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm import tirx

    from mlc_nb.compiler.kernels.cpu.isa import IsaLevel
    from mlc_nb.models.tensors import SourceTensor

__all__ = [
    "ACTIVATION_TERMS",
    "Activations",
    "Norm",
    "PackedLinear",
    "StackedLinear",
    "embed",
    "gated_silu",
    "in_forms",
]

ACTIVATION_TERMS = {"float32": 0, "int8": 1, "int16": 2}
"""int8 terms of an activation, by ``CompileRequest.activation_dtype``."""


@dataclass(frozen=True)
class Activations:
    """Rows of activations in the forms that their readers need.

    Attributes
    ----------
    forms
        By the number of int8 terms: 0 holds float32 ``[m, C]``; 1 and 2 hold codes and scales, laid out as in
        `mlc_nb.compiler.kernels.cpu.elementwise`.
    """

    forms: dict[int, list[Tensor]]


def in_forms(
    name: str,
    build: Callable[[int], tirx.PrimFunc],
    inputs: list[Tensor],
    rows: Any,
    columns: int,
    readers: StackedLinear,
) -> Activations:
    """Run the kernel ``build(terms)`` for each form of its output that ``readers`` need."""
    forms: dict[int, list[Tensor]] = {}
    for terms in readers.forms:
        if terms:
            blocks = columns // BLOCK
            outputs = [
                Tensor.placeholder([rows, blocks, readers.level.code_rows(terms), 8], "int32"),
                Tensor.placeholder([rows, blocks, 2], "float32"),
            ]
            forms[terms] = list(op.tensor_ir_op(build(terms), f"{name}_quantized", inputs, outputs))
        else:
            output = Tensor.placeholder([rows, columns], "float32")
            forms[terms] = [op.tensor_ir_op(build(terms), name, inputs, output)]
    return Activations(forms)


class PackedLinear(nn.Module):
    """A product with one packed matrix whose blocks are all of one type.

    ``terms`` is the number of int8 terms of its activations where the matrix is quantized; 0 keeps them in float32.

    Its output has as many columns as the matrix has rows, filled up to a multiple of 16 with zeros.
    """

    def __init__(self, level: IsaLevel, sources: list[SourceTensor], terms: int) -> None:
        self.level = level
        self.sources = sources
        self.block_type = sources[0].block_type
        self.rows = -(-sum(source.rows for source in sources) // ROW_TILE) * ROW_TILE
        self.columns = sources[0].columns
        self.terms = terms if self.block_type.startswith("Q") else 0
        self.part_names = []
        for part in packed_layout(self.block_type, self.rows, self.columns):
            setattr(self, part.name, nn.Parameter(part.shape, part.dtype))
            self.part_names.append(part.name)

    @property
    def parts(self) -> list[nn.Parameter]:
        """The parameters, in the order of the kernels' arguments."""
        return [getattr(self, name) for name in self.part_names]

    def plan(self, position: dict[int, int]) -> PackedWeight:
        """How to fill the parameters; ``position`` maps the id of a parameter to its place in the parameter list."""
        return PackedWeight(
            parameters={name: position[id(getattr(self, name))] for name in self.part_names},
            block_type=self.block_type,
            rows=self.rows,
            columns=self.columns,
            sources=tuple(
                SourceRows(tensor=s.name, rows=s.rows, interleaved_heads=s.interleaved_heads) for s in self.sources
            ),
        )

    def forward(self, activations: Activations, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """``[m, K] -> float32 [m, N]``, plus the residual if there is one; written to ``out`` if that is given."""
        extra = [] if residual is None else [residual]
        if self.terms:
            kernel = _quantized_product(self.level, self.block_type, self.rows, self.columns, bool(extra), self.terms)
        else:
            kernel = _float_product(self.level, self.block_type, self.rows, self.columns, bool(extra))
        name = "quantized_product" if self.terms else "float_product"
        inputs = activations.forms[self.terms]
        arguments = [*inputs, *self.parts, *extra]
        if out is None:
            result = Tensor.placeholder([inputs[0].shape[0], self.rows], "float32")
            return op.tensor_ir_op(kernel, name, arguments, result)
        result = Tensor.placeholder(out.shape, "float32")
        return op.tensor_ir_inplace_op(kernel, name, [*arguments, out], [len(arguments)], result)


class StackedLinear(nn.Module):
    """A product with matrices stacked on each other's rows: one where their blocks are of one type, else several."""

    def __init__(self, level: IsaLevel, sources: list[SourceTensor], terms: int) -> None:
        same = len({source.block_type for source in sources}) == 1
        groups = [sources] if same else [[source] for source in sources]
        self.level = level
        self.products = nn.ModuleList([PackedLinear(level, group, terms) for group in groups])

    @property
    def linears(self) -> list[PackedLinear]:
        """The products, in the order of their rows."""
        return list(self.products)

    @property
    def forms(self) -> list[int]:
        """The numbers of int8 terms in which the products take their activations, each once."""
        return sorted({product.terms for product in self.linears})

    def forward(self, activations: Activations, residual: Tensor | None = None) -> Tensor:
        """``[m, K] -> float32 [m, N]``; a residual is only taken where there is a single product."""
        if len(self.linears) == 1:
            return self.linears[0](activations, residual)
        assert residual is None
        return op.concat([product(activations) for product in self.linears], dim=1)


class Norm(nn.Module):
    """RMSNorm whose output comes in the forms that its readers need."""

    def __init__(self, level: IsaLevel, tensor: str, size: int, epsilon: float) -> None:
        self.level = level
        self.tensor = tensor
        self.size = size
        self.epsilon = epsilon
        self.weight = nn.Parameter((size,), "float32")

    def forward(self, source: Tensor, readers: StackedLinear, picked: Tensor | None = None) -> Activations:
        """Normalise all rows of ``source`` float32 ``[m, C]``, or those that ``picked`` int32 ``[r]`` names."""
        inputs = [source, self.weight] if picked is None else [source, picked, self.weight]
        rows = (source if picked is None else picked).shape[0]

        def build(terms: int) -> tirx.PrimFunc:
            return _rms_norm(self.level, self.size, self.epsilon, terms, picked is not None)

        return in_forms("rms_norm", build, inputs, rows, self.size, readers)


def embed(level: IsaLevel, table: PackedLinear, token_ids: Tensor) -> Tensor:
    """Rows of a packed table: int32 ``[t]`` -> float32 ``[t, columns]``."""
    kernel = _embedding_rows(level, table.block_type, table.rows, table.columns)
    out = Tensor.placeholder([token_ids.shape[0], table.columns], "float32")
    return op.tensor_ir_op(kernel, "embedding_rows", [token_ids, *table.parts], out)


def gated_silu(level: IsaLevel, gate_up: Tensor, columns: int, readers: StackedLinear) -> Activations:
    """``silu(gate) * up`` of float32 ``[m, 2 * columns]`` in the forms that its readers need."""
    return in_forms(
        "gated_silu",
        lambda terms: _gated_silu(level, columns, terms),
        [gate_up],
        gate_up.shape[0],
        columns,
        readers,
    )


# Layers of equal shape share one kernel object, so that each is built once.
_quantized_product = cache(linear.quantized_product)
_float_product = cache(linear.float_product)
_rms_norm = cache(elementwise.rms_norm)
_gated_silu = cache(elementwise.gated_silu)
_embedding_rows = cache(elementwise.embedding_rows)
