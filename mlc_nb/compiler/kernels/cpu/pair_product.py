"""Products of many 16-bit activations and quantized weights by ``pmaddwd``, which multiplies int16 in pairs.

A row tile's weights are unpacked to int16 once; what is left for each activation is one multiplication and one addition
for every pair. (Few activations are not worth the unpacking.) Sums within a block are exact integers, and blocks are
added up in float32 in the same order as everywhere, so the number of activations does not show in the answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm.tirx.script import builder as T  # noqa: N812 - the name that every TIR source uses

from mlc_nb.compiler.kernels.cpu.tiles import TileEmitter, emit_tokens
from mlc_nb.compiler.kernels.cpu.vector import ROW_TILE, VectorCode, quotient, remainder
from mlc_nb.quantization.packing import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PANEL_FROM", "PairPanel"]

PANEL_FROM = 8
"""Activations from which on unpacking a row tile pays."""

_PAIRS = BLOCK // 2
_PAIR_ROW = 2
"""The first row of codes that holds int16 (`mlc_nb.compiler.kernels.cpu.elementwise`)."""


@dataclass(frozen=True)
class PairPanel:
    """One row tile's weights as int16 pairs, and its products.

    Attributes
    ----------
    code, block_type
        What to emit, and for which blocks.
    weights
        The packed weight.
    blocks
        Along K.
    tile
        The row tile.
    """

    code: VectorCode
    block_type: str
    weights: dict[str, Any]
    blocks: int
    tile: Any

    def emit(self, activations: Any, scales: Any, output: Any, residual: Any, m: Any) -> None:
        """Unpack the tile, and multiply all ``m`` activations with it."""
        code = self.code
        token_tile = code.level.token_tile
        pairs = T.alloc_buffer((self.blocks, _PAIRS, ROW_TILE), "int32")
        factors = T.alloc_buffer((self.blocks, self._num_factors, ROW_TILE), "float32")
        # Totals in memory: there are not enough registers for them, and LLVM's spills are not aligned.
        totals = T.alloc_buffer((token_tile * ROW_TILE,), "float32")
        self._unpack(pairs, factors)

        def accumulate(_tile: Any, first: Any, count: int, block: Any, total: Callable[[int, int], Any]) -> list[Any]:
            sums = self._integer_sums(pairs, activations, first, count, block)
            results: list[Any] = []
            for vector in range(code.tile_vectors):
                scale, *offset = [
                    code.bind(code.load(factors, block, index, vector * code.lanes))
                    for index in range(self._num_factors)
                ]
                for token in range(count):
                    both = scale * code.splat(scales[first + token, block, 0])
                    value = code.fma(T.Cast(code.f32, sums(token, vector)), both, total(token, vector))
                    if offset:
                        value = code.fma(offset[0], code.splat(scales[first + token, block, 1]), value)
                    results.append((token, vector, value))
            return results

        emit_tokens(TileEmitter(code, self.tile, self.blocks, accumulate, output, residual, totals), m, token_tile)

    @property
    def _num_factors(self) -> int:
        return 1 if self.block_type == "Q8_0" else 2

    def _unpack(self, pairs: Any, factors: Any) -> None:
        code, weights = self.code, self.weights
        is_bytes = self.block_type == "Q8_0"
        numbers = (0, 1) if is_bytes else (0, 1, 8, 9)
        with T.serial(0, self.blocks) as block:
            for at in range(0, ROW_TILE, code.lanes):
                for group in range(8 if is_bytes else 4):
                    word = code.bind(code.load(weights["quants"], self.tile, block, group, at))
                    vectors = code.byte_pairs(word) if is_bytes else code.nibble_pairs(word)
                    for number, vector in zip(numbers, vectors, strict=True):
                        code.store(pairs, vector, block, 2 * group + number, at)
                scale = code.bind(code.half_to_float(code.load(weights["scales"], self.tile, block, at)))
                code.store(factors, scale, block, 0, at)
                if self.block_type == "Q4_1":
                    offset = code.half_to_float(code.load(weights["offsets"], self.tile, block, at))
                    code.store(factors, offset, block, 1, at)
                elif self.block_type == "Q4_0":
                    code.store(factors, scale * code.splat(-8.0), block, 1, at)

    def _integer_sums(
        self, pairs: Any, activations: Any, first: Any, count: int, block: Any
    ) -> Callable[[int, int], Any]:
        """Emit the sums of one block; the result gives that of a token and a vector of rows."""
        code = self.code
        sums = code.scratch(count * ROW_TILE, "int32")

        def at(token: int, vector: int) -> int:
            return token * ROW_TILE + vector * code.lanes

        places = [(token, vector) for token in range(count) for vector in range(code.tile_vectors)]
        for place in places:
            code.store(sums, code.splat(0, "int32"), at(*place))
        with T.serial(0, _PAIRS) as pair:
            vectors = [
                code.bind(code.load(pairs, block, pair, vector * code.lanes)) for vector in range(code.tile_vectors)
            ]
            row, word = quotient(pair, 8), remainder(pair, 8)
            for token in range(count):
                value = activations[first + token, block, _PAIR_ROW + row, word]
                spread = code.bind(T.broadcast(value, code.lanes))
                for vector, weight in enumerate(vectors):
                    index = at(token, vector)
                    code.store(sums, code.dot_pairs(code.load(sums, index), weight, spread), index)
        return lambda token, vector: code.load(sums, at(token, vector))
