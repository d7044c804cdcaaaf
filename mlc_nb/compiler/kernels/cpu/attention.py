"""Attention over paged keys and values.

A page holds 16 tokens of one layer: for each KV head the keys transposed, ``[head_dim, 16]``, so that a vector lane is
a token and scores need no sum across lanes, then the values, ``[16, head_dim]``, so that a lane is a dimension.

Each query looks at its context in chunks of 256 tokens. A chunk's partial result (running maximum, sum of exponentials,
weighted values) never depends on the batch, and chunks are merged in order; so a token's result is the same alone and
in a batch, in a prefill and in a decode, with one thread and with many. Chunks are also what threads share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm import tirx
from tvm.tirx.script import builder as T  # noqa: N812 - the name that every TIR source uses

from mlc_nb.compiler.kernels.cpu.elementwise import ActivationSink
from mlc_nb.compiler.kernels.cpu.vector import VectorCode, build_kernel, parallel_rows, quotient, remainder

if TYPE_CHECKING:
    from mlc_nb.compiler.kernels.cpu.isa import IsaLevel

__all__ = ["CHUNK_PAGES", "PAGE_SIZE", "AttentionShape", "attend_chunks", "merge_chunks", "rotate_and_append"]

PAGE_SIZE = 16
"""Tokens in a page."""

CHUNK_PAGES = 16
"""Pages in a chunk: partial results cover 256 tokens."""

_CHUNK = PAGE_SIZE * CHUNK_PAGES
_MASKED = -1e30

# Query heads of neighbouring tokens that are worked on at once: more would reuse keys and values better, but code that
# is unrolled over them takes long to compile.
_MOST_ROWS = 12


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of a model's attention; ``kv_dtype`` is ``float16`` or ``float32``."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: str

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query_heads // self.kv_heads

    def pages_shape(self, num_pages: Any) -> tuple[Any, ...]:
        """Shape of the KV pool: ``[pages, layers, key or value, kv_heads, 16 * head_dim]``.

        All layers of a page lie together: memory is touched, and taken from the system, as sequences grow. With the
        layers outside, the first token in a new part of the pool waited for a huge page to be cleared in every layer.
        """
        return (num_pages, self.layers, 2, self.kv_heads, PAGE_SIZE * self.head_dim)


def rotate_and_append(level: IsaLevel, shape: AttentionShape) -> tirx.PrimFunc:
    """Apply rotary embeddings to queries and keys (halves rotated, as in GPT-NeoX), and write keys and values to pages.

    Arguments: qkv float32 ``[t, (q + 2 * kv heads) * d]``, cosines and sines float32 ``[positions, d / 2]``, positions
    int32 ``[t]``, sequence of each token int32 ``[t]``, page tables int32 ``[b, chunks, 16]``, the KV pool (written in
    place), the layer as a scalar, queries out float32 ``[t, q heads, d]``, scaled by ``d ** -0.5``.
    """
    code = VectorCode(level.dividing(shape.head_dim // 2))
    heads, kv_heads, dim, half = shape.query_heads, shape.kv_heads, shape.head_dim, shape.head_dim // 2

    def body() -> None:
        tokens, batch, chunks, num_pages, rope_positions = (T.int32() for _ in range(5))
        qkv = T.match_buffer(T.arg("qkv", T.handle()), (tokens, (heads + 2 * kv_heads) * dim), "float32")
        cosines = T.match_buffer(T.arg("cosines", T.handle()), (rope_positions, half), "float32")
        sines = T.match_buffer(T.arg("sines", T.handle()), (rope_positions, half), "float32")
        positions = T.match_buffer(T.arg("positions", T.handle()), (tokens,), "int32")
        sequences = T.match_buffer(T.arg("sequences", T.handle()), (tokens,), "int32")
        page_tables = T.match_buffer(T.arg("page_tables", T.handle()), (batch, chunks, CHUNK_PAGES), "int32")
        pages = T.match_buffer(T.arg("pages", T.handle()), shape.pages_shape(num_pages), shape.kv_dtype)
        layer = T.arg("layer", T.int32())
        queries = T.match_buffer(T.arg("queries", T.handle()), (tokens, heads, dim), "float32")

        def rotated(token: Any, position: Any, head_start: Any, at: Any) -> tuple[Any, Any]:
            low = code.bind(code.load(qkv, token, head_start + at))
            high = code.bind(code.load(qkv, token, head_start + half + at))
            cosine = code.bind(code.load(cosines, position, at))
            sine = code.bind(code.load(sines, position, at))
            zero = code.splat(0.0)
            first = code.fma(zero - high, sine, low * cosine)
            second = code.fma(low, sine, high * cosine)
            return code.bind(first), code.bind(second)

        def emit(token: Any) -> None:
            position = T.Bind(positions[token])
            index = T.Bind(quotient(position, PAGE_SIZE))
            page = T.Bind(page_tables[sequences[token], quotient(index, CHUNK_PAGES), remainder(index, CHUNK_PAGES)])
            slot = T.Bind(remainder(position, PAGE_SIZE))
            scale = code.splat(dim**-0.5)
            with T.serial(0, heads) as head, T.serial(0, half // code.lanes) as i:
                first, second = rotated(token, position, head * dim, i * code.lanes)
                code.store(queries, first * scale, token, head, i * code.lanes)
                code.store(queries, second * scale, token, head, half + i * code.lanes)
            lanes = code.scratch(2 * code.lanes, shape.kv_dtype)
            with T.serial(0, kv_heads) as head:
                with T.serial(0, half // code.lanes) as i:
                    first, second = rotated(token, position, (heads + head) * dim, i * code.lanes)
                    code.store(lanes, code.float_to_pool(first, shape.kv_dtype), 0)
                    code.store(lanes, code.float_to_pool(second, shape.kv_dtype), code.lanes)
                    for lane in range(code.lanes):
                        for part in range(2):
                            row = part * half + i * code.lanes + lane
                            key = lanes[part * code.lanes + lane]
                            T.buffer_store(pages, key, [page, layer, 0, head, row * PAGE_SIZE + slot])
                with T.serial(0, dim // code.lanes) as i:
                    value = code.load(qkv, token, (heads + kv_heads + head) * dim + i * code.lanes)
                    value = code.float_to_pool(value, shape.kv_dtype)
                    code.store(pages, value, page, layer, 1, head, slot * dim + i * code.lanes)

        parallel_rows(tokens, emit)

    return build_kernel(body)


def attend_chunks(level: IsaLevel, shape: AttentionShape) -> tirx.PrimFunc:
    """Partial attention of each query over each chunk of its context.

    Arguments: queries float32 ``[t, q heads, d]``, positions int32 ``[t]``, sequence of each token int32 ``[t]``, page
    tables int32 ``[b, chunks, 16]``, the KV pool, partials out float32 ``[t, chunks, q heads, d + 2]`` (weighted
    values, then the maximum and the sum of exponentials), the layer as a scalar. Chunks behind a token's own position
    stay unwritten.
    """
    code = VectorCode(level.dividing(shape.head_dim))
    heads, kv_heads, dim, group = shape.query_heads, shape.kv_heads, shape.head_dim, shape.group
    page_vectors = PAGE_SIZE // code.lanes
    # Neighbouring tokens of a prefill share what they read, as many as have their sums in registers.
    tile = 1
    while 2 * tile * group * page_vectors <= level.registers - 4 and 2 * tile * group <= _MOST_ROWS:
        tile *= 2

    def body() -> None:
        tokens, batch, chunks, num_pages = T.int32(), T.int32(), T.int32(), T.int32()
        queries = T.match_buffer(T.arg("queries", T.handle()), (tokens, heads, dim), "float32")
        positions = T.match_buffer(T.arg("positions", T.handle()), (tokens,), "int32")
        sequences = T.match_buffer(T.arg("sequences", T.handle()), (tokens,), "int32")
        page_tables = T.match_buffer(T.arg("page_tables", T.handle()), (batch, chunks, CHUNK_PAGES), "int32")
        pages = T.match_buffer(T.arg("pages", T.handle()), shape.pages_shape(num_pages), shape.kv_dtype)
        partials = T.match_buffer(T.arg("partials", T.handle()), (tokens, chunks, heads, dim + 2), "float32")
        layer = T.arg("layer", T.int32())

        def kv_vector(page: Any, part: int, head: Any, at: Any) -> Any:
            value = code.load(pages, page, layer, part, head, at)
            return code.bind(code.half_to_float(value) if shape.kv_dtype == "float16" else value)

        def emit_chunk(first: Any, count: int, chunk: Any, head: Any) -> None:
            """One chunk for ``count`` neighbouring tokens of one sequence; a row is a token's query head."""
            start = T.Bind(chunk * _CHUNK)
            sequence = T.Bind(sequences[first])
            visible = T.Bind(positions[first + count - 1] - start)
            used = T.Bind(tirx.min(CHUNK_PAGES, quotient(visible, PAGE_SIZE) + 1))
            rows = [(first + token, head * group + member) for token in range(count) for member in range(group)]
            scores = code.scratch(len(rows) * _CHUNK)
            largest = code.scratch(len(rows) * code.lanes)
            for row in range(len(rows)):
                code.store(largest, code.splat(_MASKED), row * code.lanes)
            # Few rows take several pages at once: a sum over the dimensions is one long chain of dependent additions.
            abreast = 1
            while 2 * abreast * len(rows) * page_vectors <= level.registers - 4 and 2 * abreast <= CHUNK_PAGES:
                abreast *= 2
            with T.serial(0, quotient(used + (abreast - 1), abreast)) as several:
                indices = [several * abreast + i for i in range(abreast)]
                emit_scores(rows, sequence, chunk, indices, head, scores, largest)
            emit_weights(first, count, head, chunk, used, scores, largest)
            # Weighted sums of as many dimensions at a time as registers hold beside the operands.
            columns = dim // code.lanes
            while columns % 2 == 0 and columns * len(rows) > level.registers - 4:
                columns //= 2
            with T.serial(0, dim // (columns * code.lanes)) as part:
                emit_sums(rows, chunk, used, scores, head, part * columns * code.lanes, columns, sequence)

        def emit_scores(
            rows: list[tuple[Any, Any]],
            sequence: Any,
            chunk: Any,
            indices: list[Any],
            head: Any,
            scores: Any,
            largest: Any,
        ) -> None:
            """Scores of the pages ``indices`` of the chunk; of those behind a token's own position, masked ones."""
            tables = [T.Bind(page_tables[sequence, chunk, index]) for index in indices]
            vectors = [(page, v * code.lanes) for page in range(len(tables)) for v in range(page_vectors)]
            sums = code.scratch(len(rows) * len(vectors) * code.lanes)
            for i in range(len(rows) * len(vectors)):
                code.store(sums, code.splat(0.0), i * code.lanes)
            with T.serial(0, dim // 4) as quarter:
                totals = [code.load(sums, i * code.lanes) for i in range(len(rows) * len(vectors))]
                for within in range(4):
                    d = quarter * 4 + within
                    keys = [kv_vector(tables[page], 0, head, d * PAGE_SIZE + at) for page, at in vectors]
                    for row, (token, query_head) in enumerate(rows):
                        query = code.bind(code.splat(queries[token, query_head, d]))
                        for v, key in enumerate(keys):
                            i = row * len(vectors) + v
                            totals[i] = code.bind(code.fma(query, key, totals[i]))
                for i, total in enumerate(totals):
                    code.store(sums, total, i * code.lanes)
            for v, (page, at) in enumerate(vectors):
                start = T.Bind(indices[page] * PAGE_SIZE + at)
                lane_index = T.ramp(chunk * _CHUNK + start, 1, code.lanes)
                for row, (token, _) in enumerate(rows):
                    total = code.load(sums, (row * len(vectors) + v) * code.lanes)
                    visible = lane_index <= T.broadcast(positions[token], code.lanes)
                    score = code.bind(T.Select(visible, total, code.splat(_MASKED)))
                    code.store(scores, score, row * _CHUNK + start)
                    best = tirx.max(code.load(largest, row * code.lanes), score)
                    code.store(largest, best, row * code.lanes)

        def emit_weights(first: Any, count: int, head: Any, chunk: Any, used: Any, scores: Any, largest: Any) -> None:
            """Turn the scores of each row into weights, and leave its maximum and the sum of the weights."""
            with T.serial(0, count * group) as row:
                token, query_head = T.Bind(first + quotient(row, group)), T.Bind(head * group + remainder(row, group))
                top = code.bind(code.reduce([code.load(largest, row * code.lanes)], tirx.max))
                total = code.scratch(code.lanes)
                code.store(total, code.splat(0.0), 0)
                with T.serial(0, used * page_vectors) as i:
                    at = row * _CHUNK + i * code.lanes
                    weight = code.bind(code.exp(code.load(scores, at) - code.splat(top)))
                    code.store(scores, weight, at)
                    code.store(total, code.load(total, 0) + weight, 0)
                summed = code.reduce([code.load(total, 0)], lambda a, b: a + b)
                T.buffer_store(partials, top, [token, chunk, query_head, dim])
                T.buffer_store(partials, summed, [token, chunk, query_head, dim + 1])

        def emit_sums(
            rows: list[tuple[Any, Any]],
            chunk: Any,
            used: Any,
            scores: Any,
            head: Any,
            at: Any,
            columns: int,
            sequence: Any,
        ) -> None:
            sums = code.scratch(len(rows) * columns * code.lanes)
            for i in range(len(rows) * columns):
                code.store(sums, code.splat(0.0), i * code.lanes)
            with T.serial(0, used) as index:
                page = T.Bind(page_tables[sequence, chunk, index])
                with T.serial(0, PAGE_SIZE // 4) as quarter:
                    totals = [code.load(sums, i * code.lanes) for i in range(len(rows) * columns)]
                    for within in range(4):
                        slot = quarter * 4 + within
                        values = [kv_vector(page, 1, head, slot * dim + at + c * code.lanes) for c in range(columns)]
                        for row in range(len(rows)):
                            weight = code.bind(code.splat(scores[row * _CHUNK + index * PAGE_SIZE + slot]))
                            for c in range(columns):
                                i = row * columns + c
                                totals[i] = code.bind(code.fma(weight, values[c], totals[i]))
                    for i, total in enumerate(totals):
                        code.store(sums, total, i * code.lanes)
            for row, (token, query_head) in enumerate(rows):
                for c in range(columns):
                    value = code.load(sums, (row * columns + c) * code.lanes)
                    code.store(partials, value, token, chunk, query_head, at + c * code.lanes)

        tiles = T.Bind(quotient(tokens + (tile - 1), tile))
        with T.parallel(0, tiles * chunks * kv_heads) as item:
            place = T.Bind(quotient(item, chunks * kv_heads))
            # First, last, second, last but one ...: equal shares of the causal triangle for equal ranges of items.
            half = T.Bind(quotient(place, 2))
            first = T.Bind(T.Select(remainder(place, 2) == 0, half, tiles - 1 - half) * tile)
            chunk = T.Bind(remainder(quotient(item, kv_heads), chunks))
            head = T.Bind(remainder(item, kv_heads))
            count = T.Bind(tirx.min(tile, tokens - first))
            last = T.Bind(first + count - 1)
            neighbours = tirx.all(
                count == tile,
                sequences[first] == sequences[last],
                positions[last] == positions[first] + (tile - 1),
            )

            def emit_singly() -> None:
                with T.serial(0, count) as within:
                    token = T.Bind(first + within)
                    with T.If(chunk * _CHUNK <= positions[token]), T.Then():
                        emit_chunk(token, 1, chunk, head)

            if tile == 1:
                emit_singly()
                return
            with T.If(neighbours):
                with T.Then(), T.If(chunk * _CHUNK <= positions[last]), T.Then():
                    emit_chunk(first, tile, chunk, head)
                with T.Else():
                    emit_singly()

    return build_kernel(body)


def merge_chunks(level: IsaLevel, shape: AttentionShape, terms: int) -> tirx.PrimFunc:
    """Merge the partial results of a token's chunks, in order.

    Arguments: partials float32 ``[t, chunks, q heads, d + 2]``, positions int32 ``[t]``, output float32
    ``[t, q heads * d]`` or quantized.
    """
    code = VectorCode(level.dividing(shape.head_dim))
    heads, dim = shape.query_heads, shape.head_dim

    def body() -> None:
        tokens, chunks = T.int32(), T.int32()
        partials = T.match_buffer(T.arg("partials", T.handle()), (tokens, chunks, heads, dim + 2), "float32")
        positions = T.match_buffer(T.arg("positions", T.handle()), (tokens,), "int32")
        sink = ActivationSink(code, tokens, heads * dim, terms)

        def emit(token: Any) -> None:
            used = T.Bind(quotient(positions[token], _CHUNK) + 1)
            merged = code.scratch(heads * dim)
            factors = code.scratch(2 * code.lanes)
            with T.serial(0, heads) as head:
                running = code.scratch(2)
                T.buffer_store(running, partials[token, 0, head, dim], [0])
                T.buffer_store(running, partials[token, 0, head, dim + 1], [1])
                with T.serial(0, dim // code.lanes) as i:
                    code.store(merged, code.load(partials, token, 0, head, i * code.lanes), head * dim + i * code.lanes)
                with T.serial(1, used) as chunk:
                    top = T.Bind(tirx.max(running[0], partials[token, chunk, head, dim]))
                    old = code.exp(code.splat(T.Bind(running[0] - top)))
                    new = code.exp(code.splat(T.Bind(partials[token, chunk, head, dim] - top)))
                    code.store(factors, old, 0)
                    code.store(factors, new, code.lanes)
                    kept = T.Bind(running[1] * factors[0])
                    added = T.Bind(partials[token, chunk, head, dim + 1] * factors[code.lanes])
                    T.buffer_store(running, top, [0])
                    T.buffer_store(running, kept + added, [1])
                    with T.serial(0, dim // code.lanes) as i:
                        at = head * dim + i * code.lanes
                        kept_values = code.bind(code.load(merged, at) * code.load(factors, 0))
                        chunk_values = code.load(partials, token, chunk, head, i * code.lanes)
                        code.store(merged, code.fma(chunk_values, code.load(factors, code.lanes), kept_values), at)
                inverse = T.Bind(T.float32(1) / running[1])
                with T.serial(0, dim // code.lanes) as i:
                    at = head * dim + i * code.lanes
                    code.store(merged, code.load(merged, at) * code.splat(inverse), at)
            sink.write(token, lambda column: code.load(merged, column))

        parallel_rows(tokens, emit)

    return build_kernel(body)
