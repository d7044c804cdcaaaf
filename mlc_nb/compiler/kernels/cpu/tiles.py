"""The loops that all products share: over row tiles (threads), over activations, and over steps along K."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from tvm.tirx.script import builder as T  # noqa: N812 - the name that every TIR source uses

from mlc_nb.compiler.kernels.cpu.vector import ROW_TILE, VectorCode, quotient
from mlc_nb.quantization.packing import packed_layout

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Accumulate", "TileEmitter", "each_tile", "emit_tokens", "weight_arguments"]

Accumulate: TypeAlias = "Callable[[Any, Any, int, Any, Callable[[int, int], Any]], list[Any]]"
"""``(tile, first token, tokens, step, total of (token, vector))`` to a list of (token, vector, new total)."""


def weight_arguments(block_type: str, rows: int, columns: int) -> dict[str, Any]:
    """Declare the kernel arguments of a packed weight; buffers by the names of `packed_layout`."""
    return {
        part.name: T.match_buffer(T.arg(part.name, T.handle()), part.shape, part.dtype)
        for part in packed_layout(block_type, rows, columns)
    }


def each_tile(rows: int, emit: Callable[[Any], None]) -> None:
    """Emit ``emit(tile)`` for each row tile, over threads."""
    with T.parallel(0, rows // ROW_TILE) as tile:
        emit(tile)


def emit_tokens(emit_tile: Callable[[Any, int], None], m: Any, token_tile: int) -> None:
    """Emit ``emit_tile(first token, tokens)`` for full tiles of activations, then for halves of what remains."""
    count = token_tile
    with T.serial(0, quotient(m, count)) as full:
        emit_tile(full * count, count)
    while count > 1:
        half = count // 2
        with T.If((m & half) != 0), T.Then():
            emit_tile(quotient(m, count) * count, half)
        count = half


@dataclass(frozen=True)
class TileEmitter:
    """Emits one row tile for a few activations: totals over all steps along K, then the residual and the output.

    Attributes
    ----------
    tile
        The row tile.
    steps
        Along K.
    accumulate
        Emits one step.
    output, residual
        float32 ``[m, N]``; the residual may be None.
    """

    code: VectorCode
    tile: Any
    steps: int
    accumulate: Accumulate
    output: Any
    residual: Any
    totals: Any = None

    def __call__(self, first: Any, count: int) -> None:
        """Emit ``count`` activations from ``first``."""
        code = self.code
        totals = code.scratch(count * ROW_TILE) if self.totals is None else self.totals

        def at(token: int, vector: int) -> int:
            return token * ROW_TILE + vector * code.lanes

        for token in range(count):
            for vector in range(code.tile_vectors):
                code.store(totals, code.splat(0.0), at(token, vector))
        with T.serial(0, self.steps) as step:
            for token, vector, value in self.accumulate(
                self.tile, first, count, step, lambda token, vector: code.load(totals, at(token, vector))
            ):
                code.store(totals, value, at(token, vector))
        for token in range(count):
            for vector in range(code.tile_vectors):
                value = code.load(totals, at(token, vector))
                column = self.tile * ROW_TILE + vector * code.lanes
                if self.residual is not None:
                    value = value + code.load(self.residual, first + token, column)
                code.store(self.output, value, first + token, column)
