"""Products of activations and packed weights: ``output[m, n] = sum_k input[m, k] * weight[n, k]``.

Weights come packed by `mlc_nb.quantization.packing`: 16 output rows side by side, so that a vector lane is an output
row and no lane is ever summed with another. One register tile is 16 rows by `IsaLevel.token_tile` activations; what
remains of the activations runs through smaller tiles with the same arithmetic in the same order, block by block
along K. `tiles` has these loops, `pair_product` the products of 16-bit activations where int16 is what multiplies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm.tirx.script import builder as T  # noqa: N812 - the name that every TIR source uses

from mlc_nb.compiler.kernels.cpu.pair_product import PANEL_FROM, PairPanel
from mlc_nb.compiler.kernels.cpu.tiles import TileEmitter, each_tile, emit_tokens, weight_arguments
from mlc_nb.compiler.kernels.cpu.vector import VectorCode, build_kernel
from mlc_nb.quantization.packing import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tvm import tirx

    from mlc_nb.compiler.kernels.cpu.isa import IsaLevel

__all__ = ["TERM_BITS", "decode_columns", "float_product", "quantized_product"]

_NIBBLES = 0x0F0F0F0F

TERM_BITS = 8
"""The first of two int8 terms counts ``2**TERM_BITS`` times the second."""


def quantized_product(
    level: IsaLevel, block_type: str, rows: int, columns: int, residual: bool, terms: int
) -> tirx.PrimFunc:
    """Product of quantized activations and quantized weights.

    Sums within a block are exact integers; blocks are added up in float32, in order.

    Arguments of the kernel: activations int32 ``[m, K / 32, code rows, 8]``, their scales float32
    ``[m, K / 32, 2]`` (both as `mlc_nb.compiler.kernels.cpu.elementwise` lays them out), the packed weights, with
    ``residual`` float32 ``[m, N]`` that is added, and the output float32 ``[m, N]``.

    Parameters
    ----------
    level
        The ISA level to emit for.
    block_type
        ``Q4_0``, ``Q4_1`` or ``Q8_0``.
    rows, columns
        N (a multiple of 16) and K (a multiple of 32).
    residual
        Whether the kernel adds a residual.
    terms
        int8 terms of an activation: 1, or 2 for 16-bit activations.
    """
    code = VectorCode(level)
    blocks = columns // BLOCK

    def body() -> None:
        m = T.int32()
        activations = T.match_buffer(T.arg("activations", T.handle()), (m, blocks, level.code_rows(terms), 8), "int32")
        scales = T.match_buffer(T.arg("scales", T.handle()), (m, blocks, 2), "float32")
        weights = weight_arguments(block_type, rows, columns)
        added = T.match_buffer(T.arg("residual", T.handle()), (m, rows), "float32") if residual else None
        output = T.match_buffer(T.arg("output", T.handle()), (m, rows), "float32")

        def combined(sums: list[list[Any]]) -> list[list[Any]]:
            """Of each token the sum over its terms, weighted with their radix."""
            if terms == 1:
                return sums
            shift = code.splat(TERM_BITS, "int32")
            return [
                [(high << shift) + low for high, low in zip(sums[row], sums[row + 1], strict=True)]
                for row in range(0, len(sums), 2)
            ]

        def integer_sums(tile: Any, first: Any, count: int, block: Any) -> list[list[Any]]:
            # Every term of every token is a row of its own until its integer sums are complete.
            places = [(token, term) for token in range(count) for term in range(terms)]
            sums = [[code.dot_start() for _ in range(code.tile_vectors)] for _ in places]

            def activation(place: tuple[int, int], group: int) -> Any:
                token, term = place
                return code.bind(T.broadcast(activations[first + token, block, term, group], code.lanes))

            if block_type == "Q8_0":
                for vector in range(code.tile_vectors):
                    groups = [
                        code.bind(code.load(weights["quants"], tile, block, group, vector * code.lanes))
                        for group in range(8)
                    ]
                    bias = code.dot_bytes_bias(groups)
                    for row, place in enumerate(places):
                        total = code.dot_start()
                        for group in range(8):
                            total = code.dot_bytes(total, groups[group], activation(place, group))
                        sums[row][vector] = code.dot_bytes_finish(total, bias)
                return combined(sums)
            mask = code.splat(_NIBBLES, "int32")
            for group in range(4):
                pairs = [(activation(place, group), activation(place, group + 4)) for place in places]
                for vector in range(code.tile_vectors):
                    word = code.bind(code.load(weights["quants"], tile, block, group, vector * code.lanes))
                    low = code.bind(word & mask)
                    high = code.bind((word >> code.splat(4, "int32")) & mask)
                    for row in range(len(places)):
                        total = code.dot_nibbles(sums[row][vector], low, pairs[row][0])
                        sums[row][vector] = code.dot_nibbles(total, high, pairs[row][1])
            return combined([[code.dot_nibbles_finish(total) for total in vectors] for vectors in sums])

        def accumulate(tile: Any, first: Any, count: int, block: Any, total: Callable[[int, int], Any]) -> list[Any]:
            sums = integer_sums(tile, first, count, block)
            results: list[Any] = []
            for vector in range(code.tile_vectors):
                at = vector * code.lanes
                scale = code.bind(code.half_to_float(code.load(weights["scales"], tile, block, at)))
                offset = None
                if block_type == "Q4_1":
                    offset = code.bind(code.half_to_float(code.load(weights["offsets"], tile, block, at)))
                elif block_type == "Q4_0":
                    offset = code.bind(scale * code.splat(-8.0))
                for token in range(count):
                    value = T.Cast(code.f32, sums[token][vector])
                    both = scale * code.splat(scales[first + token, block, 0])
                    value = code.fma(value, both, total(token, vector))
                    if offset is not None:
                        value = code.fma(offset, code.splat(scales[first + token, block, 1]), value)
                    results.append((token, vector, value))
            return results

        def on_the_way(tile: Any) -> None:
            emit = TileEmitter(code, tile, blocks, accumulate, output, added)
            emit_tokens(emit, m, max(1, level.token_tile // terms))

        def unpacked_once(tile: Any) -> None:
            PairPanel(code, block_type, weights, blocks, tile).emit(activations, scales, output, added, m)

        if terms != 2 or not level.multiplies_pairs:
            each_tile(rows, on_the_way)
            return
        # Two loops over tiles, not one with two cases: TVM would allocate the panel in both.
        with T.If(m < PANEL_FROM):
            with T.Then():
                each_tile(rows, on_the_way)
            with T.Else():
                each_tile(rows, unpacked_once)

    return build_kernel(body)


def float_product(level: IsaLevel, block_type: str, rows: int, columns: int, residual: bool) -> tirx.PrimFunc:
    """Product of float32 activations and weights of any block type, decoded to float32 lane by lane.

    Arguments of the kernel: activations float32 ``[m, K]``, the packed weights, with ``residual`` float32 ``[m, N]``,
    and the output float32 ``[m, N]``. Parameters as in `quantized_product`; ``block_type`` may also be ``F32``, ``F16``
    or ``BF16``.
    """
    code = VectorCode(level)

    def body() -> None:
        m = T.int32()
        activations = T.match_buffer(T.arg("activations", T.handle()), (m, columns), "float32")
        weights = weight_arguments(block_type, rows, columns)
        added = T.match_buffer(T.arg("residual", T.handle()), (m, rows), "float32") if residual else None
        output = T.match_buffer(T.arg("output", T.handle()), (m, rows), "float32")
        step = BLOCK if block_type.startswith("Q") else 4
        while columns % step:
            step //= 2

        def accumulate(tile: Any, first: Any, count: int, block: Any, total: Callable[[int, int], Any]) -> list[Any]:
            results: list[Any] = []
            for vector in range(code.tile_vectors):
                sums = [total(token, vector) for token in range(count)]
                decoded = decode_columns(code, block_type, weights, tile, block, vector * code.lanes, step)
                for offset, weight in decoded:
                    for token in range(count):
                        value = code.splat(activations[first + token, block * step + offset])
                        sums[token] = code.bind(code.fma(weight, value, sums[token]))
                results.extend((token, vector, value) for token, value in enumerate(sums))
            return results

        each_tile(
            rows,
            lambda tile: emit_tokens(
                TileEmitter(code, tile, columns // step, accumulate, output, added), m, level.token_tile
            ),
        )

    return build_kernel(body)


def decode_columns(
    code: VectorCode, block_type: str, weights: dict[str, Any], tile: Any, block: Any, at: Any, step: int
) -> Iterator[tuple[int, Any]]:
    """Yield (column within the step, float32 weights of one vector of rows) for each of the ``step`` columns.

    ``at`` is the first of the vector's rows within the tile; the columns start at ``block * step``.
    """
    if not block_type.startswith("Q"):
        for column in range(step):
            value = code.load(weights["values"], tile, block * step + column, at)
            if block_type == "F16":
                value = code.half_to_float(value)
            elif block_type == "BF16":
                value = code.bfloat16_bits_to_float(value)
            yield column, code.bind(value)
        return
    scale = code.bind(code.half_to_float(code.load(weights["scales"], tile, block, at)))
    if block_type == "Q8_0":
        for group in range(8):
            word = code.bind(code.load(weights["quants"], tile, block, group, at))
            for byte in range(4):
                quant = (word << code.splat(24 - 8 * byte, "int32")) >> code.splat(24, "int32")
                yield 4 * group + byte, code.bind(T.Cast(code.f32, quant) * scale)
        return
    if block_type == "Q4_1":
        offset = code.bind(code.half_to_float(code.load(weights["offsets"], tile, block, at)))
    else:
        offset = code.bind(scale * code.splat(-8.0))
    for group in range(4):
        word = code.bind(code.load(weights["quants"], tile, block, group, at))
        for byte in range(4):
            for high in range(2):
                quant = (word >> code.splat(8 * byte + 4 * high, "int32")) & code.splat(15, "int32")
                yield 4 * group + byte + 16 * high, code.bind(code.fma(T.Cast(code.f32, quant), scale, offset))
