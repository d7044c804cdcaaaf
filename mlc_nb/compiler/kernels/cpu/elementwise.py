"""Kernels over rows of activations: RMSNorm, gated SiLU, quantization, and embedding look-up.

Quantized activations are codes q in blocks of 32 with a float32 scale s, so that x ~ s * q; beside it goes
``s * sum(q)``, which products with an offset per block (Q4_0, Q4_1) need. With one int8 term s is max|x| / 127. With
two, s is max|x| / 32,512 and ``q = 256 * first + second``: 16-bit activations from int8 instructions. Layouts: codes
int32 ``[m, C / 32, terms, 8]``, four int8 a word; scales float32 ``[m, C / 32, 2]``. At a level that
`multiplies_pairs`, two terms are followed by the 32 codes q themselves as int16, two a word, which are two rows more
(`IsaLevel.code_rows`): of each four columns 0 and 2, then 1 and 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import tirx
from tvm.tirx.script import builder as T  # noqa: N812 - the name that every TIR source uses

from mlc_nb.compiler.kernels.cpu.linear import TERM_BITS, decode_columns
from mlc_nb.compiler.kernels.cpu.tiles import weight_arguments
from mlc_nb.compiler.kernels.cpu.vector import ROW_TILE, VectorCode, build_kernel, parallel_rows, quotient, remainder
from mlc_nb.quantization.packing import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlc_nb.compiler.kernels.cpu.isa import IsaLevel

__all__ = ["ActivationSink", "embedding_rows", "gated_silu", "rms_norm"]


# Codes of activations run from minus this to this, by the number of terms.
_LARGEST_CODE = {1: 127.0, 2: 127.0 * (1 << TERM_BITS)}
_SMALLEST_NORMAL = 2.0**-126


class ActivationSink:
    """Where a kernel leaves a row of activations: as float32 (no terms), or quantized with one or two int8 terms."""

    def __init__(self, code: VectorCode, rows: Any, columns: int, terms: int) -> None:
        self.code = code
        self.columns = columns
        self.terms = terms
        if terms:
            blocks = columns // BLOCK
            self.quants = T.match_buffer(
                T.arg("quants", T.handle()), (rows, blocks, code.level.code_rows(terms), 8), "int32"
            )
            self.scales = T.match_buffer(T.arg("scales", T.handle()), (rows, blocks, 2), "float32")
        else:
            self.values = T.match_buffer(T.arg("values", T.handle()), (rows, columns), "float32")

    def write(self, row: Any, value_at: Callable[[Any], Any]) -> None:
        """Emit the loop that fills one row; ``value_at(column)`` gives a vector that starts at that column."""
        code = self.code
        if not self.terms:
            with T.serial(0, self.columns // code.lanes) as i:
                code.store(self.values, value_at(i * code.lanes), row, i * code.lanes)
            return
        largest_code = T.float32(_LARGEST_CODE[self.terms])
        with T.serial(0, self.columns // BLOCK) as block:
            vectors = [code.bind(value_at(block * BLOCK + at)) for at in range(0, BLOCK, code.lanes)]
            magnitudes = [tirx.max(vector, code.splat(0.0) - vector) for vector in vectors]
            largest = code.bind(code.reduce(magnitudes, tirx.max))
            scale = code.bind(largest / largest_code)
            # Below the normal numbers 1 / scale would be infinite: such a block counts as zeros.
            inverse = code.bind(T.Select(scale >= T.float32(_SMALLEST_NORMAL), T.float32(1) / scale, T.float32(0)))
            codes = [code.bind(code.round_to_int(vector * code.splat(inverse))) for vector in vectors]
            if self.terms == 2:
                codes = self._store_terms(row, block, codes)
                if code.level.multiplies_pairs:
                    self._store_pairs(row, block, codes)
            else:
                self._store_bytes(row, block, 0, codes)
            total = code.reduce(codes, lambda a, b: a + b, "int32")
            T.buffer_store(self.scales, scale, [row, block, 0])
            T.buffer_store(self.scales, scale * T.Cast("float32", total), [row, block, 1])

    def _store_terms(self, row: Any, block: Any, codes: list[Any]) -> list[Any]:
        """Split 16-bit codes into two int8 terms, both in -127 to 127, and return the codes that the terms make up."""
        code = self.code
        shift, half = code.splat(TERM_BITS, "int32"), code.splat(1 << (TERM_BITS - 1), "int32")
        high = [code.bind((value + half) >> shift) for value in codes]
        # A low term of -128 would not survive the sign transfer of pmaddubsw; one unit of 1 / 32,512 is given away.
        low = [
            code.bind(tirx.max(value - (top << shift), code.splat(-127, "int32")))
            for value, top in zip(codes, high, strict=True)
        ]
        self._store_bytes(row, block, 0, high)
        self._store_bytes(row, block, 1, low)
        return [code.bind((top << shift) + rest) for top, rest in zip(high, low, strict=True)]

    def _store_pairs(self, row: Any, block: Any, values: list[Any]) -> None:
        """Store the int32 lanes of a block as int16, two to a word, in the order of `VectorCode.nibble_pairs`."""
        code = self.code
        words = code.lanes // 2
        for index, value in enumerate(values):
            packed = T.Cast(f"int16x{code.lanes}", code.swap_middle(value))
            place, word = divmod(index * words, 8)
            code.store(self.quants, T.reinterpret(f"int32x{words}", packed), row, block, 2 + place, word, lanes=words)

    def _store_bytes(self, row: Any, block: Any, term: int, values: list[Any]) -> None:
        """Store the int32 lanes of a block as bytes, four to a word."""
        code = self.code
        words = code.lanes // 4
        for index, value in enumerate(values):
            packed = T.Cast(f"int8x{code.lanes}", value)
            if words > 1:
                packed = T.reinterpret(f"int32x{words}", packed)
                code.store(self.quants, packed, row, block, term, index * words, lanes=words)
            else:
                T.buffer_store(self.quants, T.reinterpret("int32", packed), [row, block, term, index])


def rms_norm(level: IsaLevel, columns: int, epsilon: float, terms: int, gather: bool) -> tirx.PrimFunc:
    """``x * weight / sqrt(mean(x**2) + epsilon)`` for each row.

    Arguments: input float32 ``[m, C]``, with ``gather`` row numbers int32 ``[r]`` (only these rows are computed),
    weight float32 ``[C]``, then the output: float32 ``[m, C]``, or quantized as in the head of this module.
    """
    code = VectorCode(level.dividing(columns))

    def body() -> None:
        m = T.int32()
        source = T.match_buffer(T.arg("source", T.handle()), (m, columns), "float32")
        rows = m
        if gather:
            rows = T.int32()
            picked = T.match_buffer(T.arg("picked", T.handle()), (rows,), "int32")
        weight = T.match_buffer(T.arg("weight", T.handle()), (columns,), "float32")
        sink = ActivationSink(code, rows, columns, terms)

        def emit(row: Any) -> None:
            origin = T.Bind(picked[row]) if gather else row
            squares = code.scratch(code.lanes)
            code.store(squares, code.splat(0.0), 0)
            with T.serial(0, columns // code.lanes) as i:
                value = code.bind(code.load(source, origin, i * code.lanes))
                code.store(squares, code.fma(value, value, code.load(squares, 0)), 0)
            total = code.reduce([code.load(squares, 0)], lambda a, b: a + b)
            mean = total * T.float32(1.0 / columns) + T.float32(epsilon)
            scale = code.bind(T.float32(1) / tirx.sqrt(mean))
            sink.write(
                row,
                lambda column: code.load(source, origin, column) * code.splat(scale) * code.load(weight, column),
            )

        parallel_rows(rows, emit)

    return build_kernel(body)


def gated_silu(level: IsaLevel, columns: int, terms: int) -> tirx.PrimFunc:
    """``silu(gate) * up`` where a row of the input is gate then up.

    Arguments: input float32 ``[m, 2 * C]``, then the output: float32 ``[m, C]`` or quantized.
    """
    code = VectorCode(level.dividing(columns))

    def body() -> None:
        m = T.int32()
        source = T.match_buffer(T.arg("source", T.handle()), (m, 2 * columns), "float32")
        sink = ActivationSink(code, m, columns, terms)

        def value_at(row: Any, column: Any) -> Any:
            gate = code.bind(code.load(source, row, column))
            sigmoid_inverse = code.splat(1.0) + code.exp(code.splat(0.0) - gate)
            return gate / sigmoid_inverse * code.load(source, row, columns + column)

        parallel_rows(m, lambda row: sink.write(row, lambda column: value_at(row, column)))

    return build_kernel(body)


def embedding_rows(level: IsaLevel, block_type: str, rows: int, columns: int) -> tirx.PrimFunc:
    """Rows of a packed embedding table as float32.

    Arguments: token ids int32 ``[m]`` (each in 0 to N - 1), the packed table, output float32 ``[m, C]``.
    """
    code = VectorCode(level)

    def body() -> None:
        m = T.int32()
        token_ids = T.match_buffer(T.arg("token_ids", T.handle()), (m,), "int32")
        table = weight_arguments(block_type, rows, columns)
        output = T.match_buffer(T.arg("output", T.handle()), (m, columns), "float32")
        step = BLOCK if block_type.startswith("Q") else 1

        def emit(row: Any) -> None:
            token = T.Bind(token_ids[row])
            # The vector that holds the row is decoded whole and one lane of it kept: 16 neighbours share a tile.
            within = T.Bind(remainder(token, ROW_TILE))
            lanes = code.scratch(code.lanes)
            with T.serial(0, columns // step) as block:
                first = within - within % code.lanes
                for offset, value in decode_columns(
                    code, block_type, table, quotient(token, ROW_TILE), block, first, step
                ):
                    code.store(lanes, value, 0)
                    T.buffer_store(output, lanes[within % code.lanes], [row, block * step + offset])

        parallel_rows(m, emit)

    return build_kernel(body)
