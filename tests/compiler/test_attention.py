"""Paged attention against float64: append, partial attention of chunks, and their merge."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mlc_nb.compiler.kernels.cpu.attention import (
    CHUNK_PAGES,
    PAGE_SIZE,
    AttentionShape,
    attend_chunks,
    merge_chunks,
    rotate_and_append,
)
from mlc_nb.compiler.kernels.cpu.isa import isa_level
from tests.compiler.compiled import LEVELS, compile_kernel, run_kernel, tensor, use_threads

if TYPE_CHECKING:
    import numpy.typing as npt

CHUNK = PAGE_SIZE * CHUNK_PAGES
LAYERS = 2
LAYER = 1
STALE = 60000.0
# Ends of contexts around the edges of pages and chunks.
LENGTHS = (1, 15, 16, 17, 255, 256, 257, 530)
# Query heads, KV heads, head size: multi-head, groups of 3 and 8, sizes that no register divides evenly. They take
# seconds to compile, so that the levels share them.
SHAPES = [(3, 1, 64), (2, 2, 16), (16, 2, 80), (2, 1, 128)]


def cases() -> list[Any]:
    """Levels and shapes; float16 and float32 pages in turn, but float32 where float16 is not converted in hardware."""
    levels = [LEVELS[turn % len(LEVELS)] for turn in range(max(len(SHAPES), len(LEVELS)))]
    found = []
    for turn, level in enumerate(levels):
        sizes = SHAPES[turn % len(SHAPES)]
        half = isa_level(level).hardware_half and turn % 2 == 0
        shape = AttentionShape(LAYERS, *sizes, "float16" if half else "float32")
        found.append(pytest.param(level, shape, id=f"{level}-{'x'.join(map(str, sizes))}-{shape.kv_dtype}"))
    return found


CASES = cases()


@dataclass
class Contexts:
    """Sequences in a shared pool of pages, taken in random order, and their rotary embeddings."""

    level: str
    shape: AttentionShape
    pool: Any = field(init=False)
    tables: npt.NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(7)
        self.chunks = -(-max(LENGTHS) // CHUNK)
        pages = [-(-length // PAGE_SIZE) for length in LENGTHS]
        order = rng.permutation(sum(pages) + 3)
        self.tables = np.zeros((len(LENGTHS), self.chunks * CHUNK_PAGES), np.int32)
        for row, (count, end) in enumerate(zip(pages, np.cumsum(pages), strict=True)):
            self.tables[row, :count] = order[end - count : end]
        self.tables = self.tables.reshape(len(LENGTHS), self.chunks, CHUNK_PAGES)
        # Pages come with what their last owner left there: it must not matter, however large.
        self.pool = tensor(np.full(self.shape.pages_shape(len(order)), STALE, self.shape.kv_dtype))
        half = self.shape.head_dim // 2
        angles = np.arange(max(LENGTHS))[:, None] * 10000.0 ** (-np.arange(half) / half)
        self.cosines, self.sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        heads = self.shape.query_heads + 2 * self.shape.kv_heads
        self.qkv = [rng.standard_normal((length, heads * self.shape.head_dim)).astype(np.float32) for length in LENGTHS]
        for values in self.qkv:
            values[::5] *= 8  # some scores far apart, so that exp reaches zero
        self.append = compile_kernel(self.level, rotate_and_append, self.shape)
        self.attend = compile_kernel(self.level, attend_chunks, self.shape)
        self.merge = compile_kernel(self.level, merge_chunks, self.shape, 0)

    def add(self, tokens: list[tuple[int, int]]) -> npt.NDArray[np.float32]:
        """Append tokens given as (sequence, position); their queries float32 ``[t, heads, dim]``."""
        queries = tensor(np.full((len(tokens), self.shape.query_heads, self.shape.head_dim), np.nan, np.float32))
        sequences, positions = (np.array(column, np.int32) for column in zip(*tokens, strict=True))
        qkv = np.stack([self.qkv[sequence][position] for sequence, position in tokens])
        run_kernel(
            self.append, qkv, self.cosines, self.sines, positions, sequences, self.tables, self.pool, LAYER, queries
        )
        return queries.numpy()

    def attended(self, tokens: list[tuple[int, int]], queries: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """What tokens see of their own contexts: float32 ``[t, heads * dim]``."""
        heads, dim = self.shape.query_heads, self.shape.head_dim
        sequences, positions = (np.array(column, np.int32) for column in zip(*tokens, strict=True))
        chunks = int(positions.max()) // CHUNK + 1
        tables = np.ascontiguousarray(self.tables[:, :chunks])
        partials = tensor(np.full((len(tokens), chunks, heads, dim + 2), np.nan, np.float32))
        run_kernel(self.attend, queries, positions, sequences, tables, self.pool, partials, LAYER)
        output = tensor(np.full((len(tokens), heads * dim), np.nan, np.float32))
        run_kernel(self.merge, partials, positions, output)
        return output.numpy()

    def wanted(self, sequence: int, position: int) -> npt.NDArray[np.float64]:
        """Attention of one token in float64, with keys and values rounded to the pool's type."""
        heads, kv_heads, dim = self.shape.query_heads, self.shape.kv_heads, self.shape.head_dim
        values = self.qkv[sequence][: position + 1].reshape(position + 1, -1, dim).astype(np.float64)
        rotated = self.rotated(values[:, : heads + kv_heads])
        query = rotated[position, :heads].astype(np.float32).astype(np.float64) * dim**-0.5
        keys = rotated[:, heads:].astype(np.float32).astype(self.shape.kv_dtype).astype(np.float64)
        stored = values[:, heads + kv_heads :].astype(self.shape.kv_dtype).astype(np.float64)
        group = np.arange(heads) // self.shape.group
        scores = np.einsum("hd,thd->ht", query, keys[:, group])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("ht,thd->hd", weights, stored[:, group]).reshape(-1)

    def rotated(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Rotary embeddings of ``[positions, heads, dim]``, halves rotated."""
        low, high = np.split(values, 2, axis=-1)
        cosines, sines = (table[: len(values), None].astype(np.float64) for table in (self.cosines, self.sines))
        return np.concatenate([low * cosines - high * sines, high * cosines + low * sines], -1)


@pytest.mark.parametrize(("level", "shape"), CASES)
def test_attention(level: str, shape: AttentionShape) -> None:
    contexts = Contexts(level, shape)
    everything = [(sequence, position) for sequence, length in enumerate(LENGTHS) for position in range(length)]
    queries = contexts.add(everything)
    last = list(np.cumsum(LENGTHS) - 1)
    picked = [*last, *(place for place, (_, position) in enumerate(everything) if position in (16, 256, 300))]
    tokens = [everything[place] for place in picked]
    together = contexts.attended(tokens, queries[picked])

    wanted = np.stack([contexts.wanted(*token) for token in tokens])
    assert np.isfinite(together).all()
    # A key of float16 that rounds the other way, for a rotation that is off in its last float32 bit, is seen as well.
    tolerance = 2e-5 if shape.kv_dtype == "float32" else 2e-3
    assert np.abs(together - wanted).max() <= tolerance * np.abs(wanted).max()

    # In a prefill of everything, alone, in reverse order, and on two threads: the same bits.
    assert np.array_equal(contexts.attended(everything, queries)[picked], together)
    for token, query, result in zip(tokens, queries[picked], together, strict=True):
        assert np.array_equal(contexts.attended([token], query[None])[0], result), token
    assert np.array_equal(contexts.attended(tokens[::-1], queries[picked][::-1])[::-1], together)
    before = contexts.pool.numpy()
    try:
        use_threads(2)
        assert np.array_equal(contexts.add(everything), queries)
        assert np.array_equal(contexts.pool.numpy(), before)
        assert np.array_equal(contexts.attended(tokens, queries[picked]), together)
    finally:
        use_threads(1)


@pytest.mark.parametrize(("level", "shape"), [CASES[0], CASES[-1]])
def test_appending_one_by_one_writes_the_same_bits(level: str, shape: AttentionShape) -> None:
    whole, pieces = Contexts(level, shape), Contexts(level, shape)
    tokens = [(2, position) for position in range(LENGTHS[2])]
    queries = whole.add(tokens)
    alone = np.concatenate([pieces.add([token]) for token in tokens])
    assert np.array_equal(alone, queries)
    assert np.array_equal(whole.pool.numpy(), pieces.pool.numpy())
    untouched = np.ones(whole.pool.shape[0], bool)
    untouched[whole.tables[2, 0, 0]] = False
    assert (whole.pool.numpy()[untouched] == STALE).all()
    assert (whole.pool.numpy()[:, 1 - LAYER] == STALE).all()


@pytest.mark.skipif(not isa_level(LEVELS[0]).hardware_half, reason="no level here keeps float16 in its pages")
def test_what_float16_cannot_hold_is_stored_as_its_largest_number() -> None:
    """An infinity would outlive its request: times a weight of zero it makes NaNs of whoever gets the page next."""
    contexts = Contexts(LEVELS[0], AttentionShape(LAYERS, 3, 1, 64, "float16"))
    contexts.qkv[1][:] = np.where(contexts.qkv[1] > 0, np.float32(1e30), np.float32(-1e6))
    contexts.qkv[1][-1, ::7] = np.nan
    contexts.add([(1, position) for position in range(LENGTHS[1])])
    stored = contexts.pool.numpy()[contexts.tables[1, 0, 0], LAYER]
    assert np.isfinite(stored).all()
    assert stored.max() == np.finfo(np.float16).max
    assert stored.min() == np.finfo(np.float16).min


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_merged_results_can_be_quantized(level: str, terms: int) -> None:
    shape = AttentionShape(1, 4, 2, 64, "float32")
    tokens, chunks = 5, 3
    rng = np.random.default_rng(0)
    partials = rng.standard_normal((tokens, chunks, 4, 66)).astype(np.float32)
    partials[..., 65] = np.abs(partials[..., 65]) + 1
    positions = np.array([0, 255, 256, 600, 767], np.int32)
    plain = tensor(np.zeros((tokens, 256), np.float32))
    run_kernel(compile_kernel(level, merge_chunks, shape, 0), partials, positions, plain)
    codes = tensor(np.zeros((tokens, 8, isa_level(level).code_rows(terms), 8), np.int32))
    scales = tensor(np.zeros((tokens, 8, 2), np.float32))
    run_kernel(compile_kernel(level, merge_chunks, shape, terms), partials, positions, codes, scales)
    lanes = codes.numpy()[:, :, :terms].copy().view(np.int8).astype(np.float64)
    radix = 256.0 ** np.arange(terms)[::-1]
    values = (lanes * radix[:, None]).sum(2) * scales.numpy()[..., :1]
    largest = np.abs(plain.numpy()).max()
    assert np.abs(values.reshape(tokens, 256) - plain.numpy()).max() <= largest * (0.51 / 127 if terms == 1 else 5e-5)

    used = positions // CHUNK + 1
    for token in range(tokens):
        part = partials[token, : used[token]].astype(np.float64)
        factors = np.exp(part[..., 64] - part[..., 64].max(0))
        wanted = (part[..., :64] * factors[..., None]).sum(0) / (part[..., 65] * factors).sum(0)[:, None]
        np.testing.assert_allclose(plain.numpy()[token], wanted.reshape(-1), rtol=1e-5, atol=1e-6)
