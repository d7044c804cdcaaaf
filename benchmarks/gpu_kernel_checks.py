"""Checks of the GPU kernels against ``gpu_reference``: fresh random inputs, poisoned outputs, odd sizes."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu_reference import attention, page_indices, random_matrix, relative_error, rope_tables, rotate
from mlc_nb.compiler.kernels.cuda.attention import (
    PREFILL_TILE_ROWS,
    CudaAttentionShape,
    attend_decodes,
    attend_prefills,
    rotate_and_append,
    softmax_scale,
)
from mlc_nb.compiler.kernels.cuda.elementwise import embedding_rows, gated_silu, rms_norm
from mlc_nb.compiler.kernels.cuda.matrix import CudaMatrix, dequantize_matrix, pack_matrix, pack_rows
from mlc_nb.compiler.kernels.cuda.product import Epilogue, HeadLayout, skinny_product
from mlc_nb.compiler.kernels.cuda.sampling import MOST_TOP_LOGPROBS, USES_MASK, USES_PENALTIES, sample_rows
from mlc_nb.runtime.sampler import SamplingState

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu_device import Device
    from mlc_nb.compiler.kernels.cuda.kernel import CudaKernel

__all__ = ["Check", "all_checks", "packed_matrix"]

# A result of 16-bit floats is off by rounding alone; one of float32 by the rounding of what went in.
_FLOAT16_ERROR, _BFLOAT16_ERROR, _FLOAT32_ERROR = 6e-4, 5e-3, 2e-5
# Scaled weights are float16 once more.
_SCALED_ERROR = 6e-4


@dataclass
class Check:
    """A named check: the kernels that it needs, and what runs it and gives its error and the largest allowed."""

    name: str
    kernels: list[CudaKernel]
    run: Callable[[Device], tuple[float, float]]


def all_checks() -> list[Check]:
    """Every check."""
    checks: list[Check] = []
    for block_type in ("Q4_0", "Q4_1", "Q8_0", "q4f16_1"):
        checks += [_packing(CudaMatrix(block_type, 160, 96)), _packing(CudaMatrix(block_type, 384, 576, 32), heads=64)]
    for block_type in ("F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "q4f16_1"):
        checks.append(_embedding(CudaMatrix(block_type, 1008, 576)))
        for rows, columns, tokens in ((896, 4864, 1), (576, 1536, 3), (1003, 200, 8), (4096, 14336, 7), (576, 576, 13)):
            if block_type not in ("F16", "BF16"):
                rows, columns = rows // 16 * 16, columns // 32 * 32
            checks.append(_product(CudaMatrix(block_type, rows, columns), Epilogue.ADD_TO_STREAM, tokens))
        for tokens in (1, 9, 30, 64):
            checks.append(_product(CudaMatrix(block_type, 2 * 1536, 576, 1536), Epilogue.GATED_SILU, tokens))
            checks.append(_product(CudaMatrix(block_type, 896, 1152), Epilogue.STORE, tokens, bias=True))
        checks.append(_product(CudaMatrix(block_type, 49152, 576), Epilogue.STORE_FLOAT32, 5))
    for dtype in ("float16", "bfloat16"):
        for heads in ((32, 8, 128), (9, 3, 64), (14, 2, 64), (4, 4, 80), (16, 1, 128), (8, 4, 256)):
            shape = CudaAttentionShape(*heads, dtype)
            checks += [_decodes(shape, 1), _decodes(shape, 7), _prefills(shape)]
            checks += [_fused_append(shape, tokens) for tokens in (1, 20)]
        checks += [_norm(4096, dtype, 3), _norm(576, dtype, 5), _norm(896, dtype, 200), _silu(1536, dtype)]
    checks += [_pack_rows(source) for source in ("F32", "F16", "BF16")]
    return checks + [_sampling(size) for size in (1003, 49152, 128256)]


def packed_matrix(device: Device, matrix: CudaMatrix, heads: int = 0) -> tuple[dict[str, Any], Any]:
    """Random rows in the kernels' arrays, and their values.

    With a head size ``heads``, rotary pairs lie side by side in the file.
    """
    torch = device.torch
    made = random_matrix(torch, matrix.block_type, matrix.rows, matrix.columns)
    values = made.values
    if heads:
        half = heads // 2
        order = torch.arange(matrix.rows, device="cuda").view(-1, half, 2).transpose(1, 2).reshape(-1)
        values = values[order]
    if not matrix.quantized:
        return {"values": made.source}, values
    arrays = {
        name: torch.randint(0, 256, (size,), device="cuda", dtype=torch.uint8)
        for name, size in matrix.array_bytes.items()
    }
    scalars = {"rows": matrix.rows, "first_row": 0, "interleaved_head_size": heads}
    source = {"source": made.source, "source_scales": made.source_scales}
    device.run(pack_matrix(matrix), {**source, **arrays, **scalars}, rows=matrix.rows)
    return arrays, values


def _poisoned(torch: Any, shape: tuple[int, ...], dtype: str) -> Any:
    return torch.full(shape, math.nan, device="cuda", dtype=getattr(torch, dtype))


def _packing(matrix: CudaMatrix, heads: int = 0) -> Check:
    def run(device: Device) -> tuple[float, float]:
        arrays, values = packed_matrix(device, matrix, heads)
        out = _poisoned(device.torch, (matrix.rows, matrix.columns), "float16")
        device.run(dequantize_matrix(matrix), {**arrays, "out": out})
        return float((out != values.half()).double().mean()), 0.0

    return Check(f"pack, dequantize {matrix.suffix}", [pack_matrix(matrix), dequantize_matrix(matrix)], run)


def _pack_rows(source_type: str) -> Check:
    matrix = CudaMatrix("F16", 384, 200)
    kernel = pack_rows(matrix, source_type)

    def run(device: Device) -> tuple[float, float]:
        torch = device.torch
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[source_type]
        source = torch.randn(128, 200, device="cuda").to(dtype)
        values = _poisoned(torch, (384, 200), "float16")
        scalars = {"rows": 128, "first_row": 256, "interleaved_head_size": 64}
        device.run(kernel, {"source": source, "values": values, **scalars}, rows=128)
        order = torch.arange(128, device="cuda").view(-1, 32, 2).transpose(1, 2).reshape(-1)
        untouched = values[:256].isnan().all()
        return float((values[256:] != source[order].half()).double().mean() + (not untouched)), 0.0

    return Check(kernel.entry, [kernel], run)


def _embedding(table: CudaMatrix) -> Check:
    kernel = embedding_rows(table)

    def run(device: Device) -> tuple[float, float]:
        torch = device.torch
        arrays, values = packed_matrix(device, table)
        ids = torch.tensor([0, table.rows - 1, 17, 8, 500], device="cuda", dtype=torch.int32)
        out = _poisoned(torch, (5, table.columns), "float32")
        device.run(kernel, {"token_ids": ids, **arrays, "stream": out}, tokens=5)
        return relative_error(out, values[ids.long()]), 1e-6

    return Check(kernel.entry, [kernel, *([pack_matrix(table)] if table.quantized else [])], run)


def _product(matrix: CudaMatrix, epilogue: Epilogue, tokens: int, bias: bool = False) -> Check:
    kernel = skinny_product(matrix, epilogue, tokens, bias=bias)

    def run(device: Device) -> tuple[float, float]:
        torch = device.torch
        arrays, values = packed_matrix(device, matrix)
        dtype = getattr(torch, matrix.activation_dtype)
        x = torch.randn(tokens, matrix.columns, device="cuda").to(dtype)
        reference = x.double() @ values.double().T
        added = torch.randn(matrix.rows, device="cuda").to(dtype) if bias else None
        if added is not None:
            reference += added.double()
        limit = _BFLOAT16_ERROR if matrix.bfloat16 else _FLOAT16_ERROR
        if epilogue is Epilogue.ADD_TO_STREAM:
            out = torch.randn(tokens, matrix.rows, device="cuda")
            start = out.clone()
        elif epilogue is Epilogue.STORE_FLOAT32:
            out, start = _poisoned(torch, (tokens, matrix.rows), "float32"), None
        else:
            columns = matrix.rows // 2 if epilogue is Epilogue.GATED_SILU else matrix.rows
            out, start = _poisoned(torch, (tokens, columns), matrix.activation_dtype), None
        device.run(
            kernel,
            {
                **arrays,
                "bias": added,
                "activations": x,
                "out": out,
                "tokens": tokens,
                "page_table_width": 0,
                "num_pages": 0,
                "layer": 0,
            },
        )
        if epilogue is Epilogue.GATED_SILU:
            gate, up = reference.chunk(2, dim=1)
            reference = torch.nn.functional.silu(gate) * up
        if start is not None:
            # The product itself, without what the stream held.
            return relative_error(out.double() - start, reference), _FLOAT32_ERROR + _scaled(matrix, tokens)
        if epilogue is Epilogue.STORE_FLOAT32:
            return relative_error(out, reference), _FLOAT32_ERROR + _scaled(matrix, tokens)
        return relative_error(out, reference), limit + _scaled(matrix, tokens)

    name = f"{kernel.entry} with {tokens}"
    return Check(name, [kernel, *([pack_matrix(matrix)] if matrix.quantized else [])], run)


def _scaled(matrix: CudaMatrix, tokens: int) -> float:
    return _SCALED_ERROR if matrix.quantized and tokens > 16 else 0.0


@dataclass
class _Pool:
    """KV pages of 2 layers, filled with NaN but for what is written, and page tables in random order."""

    pages: Any
    tables: Any
    num_pages: int
    width: int
    layer: int = 1

    @property
    def scalars(self) -> dict[str, int]:
        return {"page_table_width": self.width, "num_pages": self.num_pages, "layer": self.layer}


def _pool(torch: Any, shape: CudaAttentionShape, contexts: list[int]) -> _Pool:
    width = max(contexts) // 16 + 2
    num_pages = len(contexts) * width + 3
    pages = _poisoned(torch, shape.pages_shape(2, num_pages), shape.dtype)
    keys, values = page_indices(torch, shape)
    # The filling of heads up to a multiple of 32 is zero from the start.
    pages[:, :, 0, :, keys[:, shape.head_dim :].reshape(-1)] = 0
    pages[:, :, 1, :, values[:, shape.head_dim :].reshape(-1)] = 0
    order = torch.randperm(num_pages, device="cuda")[: len(contexts) * width].int()
    return _Pool(pages, order.view(len(contexts), width).contiguous(), num_pages, width)


def _write(torch: Any, pool: _Pool, shape: CudaAttentionShape, sequence: int, keys: Any, values: Any) -> None:
    """Put keys and values ``[context, kv heads, head_dim]`` of a sequence into its pages."""
    for which, (index, data) in enumerate(zip(page_indices(torch, shape), (keys, values), strict=True)):
        for start in range(0, len(data), 16):
            part = data[start : start + 16]
            page = pool.pages[pool.layer, int(pool.tables[sequence, start // 16]), which]
            page[:, index[: len(part), : shape.head_dim].reshape(-1)] = part.transpose(0, 1).reshape(shape.kv_heads, -1)


def _read(torch: Any, pool: _Pool, shape: CudaAttentionShape, sequence: int, position: int) -> Any:
    """Key and value of one token, ``[2, kv heads, head_dim]``."""
    page = pool.pages[pool.layer, int(pool.tables[sequence, position // 16])]
    return torch.stack(
        [
            page[which][:, index[position % 16, : shape.head_dim]]
            for which, index in enumerate(page_indices(torch, shape))
        ]
    )


def _worst(*errors: float) -> float:
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _error_of(shape: CudaAttentionShape) -> float:
    return 8e-3 if shape.dtype == "bfloat16" else 1.5e-3


def _decodes(shape: CudaAttentionShape, splits: int) -> Check:
    kernel = attend_decodes(shape)

    def run(device: Device) -> tuple[float, float]:
        torch = device.torch
        dtype = getattr(torch, shape.dtype)
        contexts = [1, 5, 16, 17, 100, 513, 1000, 2049]
        pool = _pool(torch, shape, contexts)
        rows = len(contexts) + 1  # the last one is padding
        queries = torch.randn(rows, shape.query_heads, shape.head_dim, device="cuda").to(dtype)
        reference = []
        for sequence, context in enumerate(contexts):
            keys, values = (
                torch.randn(context, shape.kv_heads, shape.head_dim, device="cuda").to(dtype) for _ in range(2)
            )
            _write(torch, pool, shape, sequence, keys, values)
            reference.append(attention(torch, queries[sequence : sequence + 1], keys, values, context - 1))
        out = _poisoned(torch, tuple(queries.shape), shape.dtype)
        partials = _poisoned(torch, (shape.partials_elements(rows, splits),), "float32")
        arrivals = torch.zeros(shape.arrivals_elements(rows), device="cuda", dtype=torch.int32)
        arguments = {
            "queries": queries,
            "positions": torch.tensor([*(context - 1 for context in contexts), -1], device="cuda", dtype=torch.int32),
            "sequences": torch.arange(rows, device="cuda", dtype=torch.int32),
            "page_tables": pool.tables,
            "pages": pool.pages,
            "partials": partials,
            "arrivals": arrivals,
            "out": out,
            "scale": softmax_scale(shape.head_dim),
            **pool.scalars,
        }
        for _ in range(2):  # the counters are back at zero after each step
            out.fill_(math.nan)
            device.run(kernel, arguments, splits=splits, batch=rows)
        assert bool(out[-1].isnan().all()), "the padding row was written"
        return relative_error(out[:-1], torch.cat(reference)), _error_of(shape)

    return Check(f"{kernel.entry}, {splits} splits", [kernel], run)


def _prefills(shape: CudaAttentionShape) -> Check:
    append, attend = rotate_and_append(shape), attend_prefills(shape)

    def run(device: Device) -> tuple[float, float]:
        torch = device.torch
        dtype = getattr(torch, shape.dtype)
        # (tokens before, new tokens) of each sequence.
        parts = [(0, 1), (0, 300), (37, 128), (500, 17), (0, 130), (64, 64)]
        pool = _pool(torch, shape, [before + new for before, new in parts])
        tokens = sum(new for _, new in parts)
        heads = shape.query_heads + 2 * shape.kv_heads
        qkv = torch.randn(tokens + 1, heads, shape.head_dim, device="cuda").to(dtype)
        cosines, sines = rope_tables(torch, 1024, shape.head_dim)
        positions: list[Any] = []
        sequences: list[Any] = []
        tiles: list[Any] = []
        histories: list[Any] = []
        for sequence, (before, new) in enumerate(parts):
            history = [torch.randn(before, shape.kv_heads, shape.head_dim, device="cuda").to(dtype) for _ in range(2)]
            _write(torch, pool, shape, sequence, *history)
            histories.append(history)
            tiles += [
                [len(positions) + start, min(PREFILL_TILE_ROWS, new - start), sequence, before + start]
                for start in range(0, new, PREFILL_TILE_ROWS)
            ]
            positions += range(before, before + new)
            sequences += [sequence] * new
        tiles.append([0, 0, 0, 0])
        position_tensor = torch.tensor([*positions, -1], device="cuda", dtype=torch.int32)
        queries = _poisoned(torch, (tokens + 1, shape.query_heads, shape.head_dim), shape.dtype)
        step = {
            "positions": position_tensor,
            "sequences": torch.tensor([*sequences, 0], device="cuda", dtype=torch.int32),
            "page_tables": pool.tables,
            "pages": pool.pages,
            **pool.scalars,
        }
        device.run(
            append,
            {"qkv": qkv, "cosines": cosines, "sines": sines, "queries": queries, "tokens": tokens + 1, **step},
            tokens=tokens + 1,
        )
        assert bool(queries[-1].isnan().all()), "the padding row was written"
        rotated = rotate(torch, qkv[:-1].double(), position_tensor[:-1], cosines, sines)
        error = relative_error(queries[:-1], rotated[:, : shape.query_heads])
        out = _poisoned(torch, (tokens, shape.query_heads, shape.head_dim), shape.dtype)
        device.run(
            attend,
            {
                "queries": queries,
                "tiles": torch.tensor(tiles, device="cuda", dtype=torch.int32),
                "out": out,
                "scale": softmax_scale(shape.head_dim),
                **{name: step[name] for name in ("page_tables", "pages", *pool.scalars)},
            },
            tiles=len(tiles),
        )
        start = 0
        for (before, new), (old_keys, old_values) in zip(parts, histories, strict=True):
            span = slice(start, start + new)
            new_keys = rotated[span, shape.query_heads : shape.query_heads + shape.kv_heads].to(dtype)
            new_values = qkv[span, shape.query_heads + shape.kv_heads :]
            keys, values = torch.cat([old_keys, new_keys]), torch.cat([old_values, new_values])
            wanted = attention(torch, queries[span], keys, values, before)
            error = _worst(error, relative_error(out[span], wanted))
            start += new
        return error, _error_of(shape)

    return Check(f"{append.entry}, {attend.entry}", [append, attend], run)


def _fused_append(shape: CudaAttentionShape, tokens: int) -> Check:
    rows = (shape.query_heads + 2 * shape.kv_heads) * shape.head_dim
    matrix = CudaMatrix("BF16" if shape.dtype == "bfloat16" else "F16", rows, 256, shape.head_dim // 2)
    heads = HeadLayout(shape.query_heads, shape.kv_heads, shape.head_dim)
    kernel = skinny_product(matrix, Epilogue.ROTATE_APPEND, tokens, heads=heads)

    def run(device: Device) -> tuple[float, float]:
        torch = device.torch
        arrays, values = packed_matrix(device, matrix)
        x = torch.randn(tokens, 256, device="cuda").to(getattr(torch, shape.dtype))
        pool = _pool(torch, shape, [200] * tokens)
        positions = torch.randint(0, 200, (tokens,), device="cuda", dtype=torch.int32)
        cosines, sines = rope_tables(torch, 256, shape.head_dim)
        queries = _poisoned(torch, (tokens, shape.query_heads, shape.head_dim), shape.dtype)
        arguments = {
            **arrays,
            "activations": x,
            "out": queries,
            "positions": positions,
            "sequences": torch.arange(tokens, device="cuda", dtype=torch.int32),
            "page_tables": pool.tables,
            "cosines": cosines,
            "sines": sines,
            "pages": pool.pages,
            "tokens": tokens,
            **pool.scalars,
        }
        device.run(kernel, arguments)
        qkv = (x.double() @ values.double().T).view(tokens, -1, shape.head_dim)
        rotated = rotate(torch, qkv, positions, cosines, sines)
        q, kv = shape.query_heads, shape.kv_heads
        error = relative_error(queries, rotated[:, :q])
        stored = torch.stack([_read(torch, pool, shape, t, int(positions[t])) for t in range(tokens)])
        wanted = torch.stack([rotated[:, q : q + kv], qkv[:, q + kv :]], dim=1)
        return _worst(error, relative_error(stored, wanted)), _error_of(shape)

    return Check(kernel.entry, [kernel], run)


def _norm(size: int, dtype: str, rows: int) -> Check:
    kernel = rms_norm(size, dtype, picked=True)

    def run(device: Device) -> tuple[float, float]:
        torch = device.torch
        stream = torch.randn(rows + 2, size, device="cuda") * 10
        weight = torch.randn(size, device="cuda")
        picked = torch.randperm(rows + 2, device="cuda")[:rows].int()
        out = _poisoned(torch, (rows, size), dtype)
        device.run(
            kernel, {"stream": stream, "picked": picked, "weight": weight, "out": out, "epsilon": 1e-5}, rows=rows
        )
        x = stream[picked.long()].double()
        reference = x * (x.square().mean(dim=1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        return relative_error(out, reference), _BFLOAT16_ERROR if dtype == "bfloat16" else _FLOAT16_ERROR

    return Check(f"{kernel.entry}, {rows} rows", [kernel], run)


def _silu(size: int, dtype: str) -> Check:
    kernel = gated_silu(size, dtype)

    def run(device: Device) -> tuple[float, float]:
        torch = device.torch
        gate_up = torch.randn(77, 2 * size, device="cuda").to(getattr(torch, dtype))
        out = _poisoned(torch, (77, size), dtype)
        device.run(kernel, {"gate_up": gate_up, "out": out, "tokens": 77}, tokens=77)
        gate, up = gate_up.double().chunk(2, dim=1)
        reference = torch.nn.functional.silu(gate) * up
        return relative_error(out, reference), _BFLOAT16_ERROR if dtype == "bfloat16" else _FLOAT16_ERROR

    return Check(kernel.entry, [kernel], run)


class _Given:
    """A random number generator that gives one number."""

    def __init__(self, uniform: float) -> None:
        self.uniform = uniform

    def random(self) -> float:
        return self.uniform


class _Allows:
    """A constraint that allows some tokens."""

    def __init__(self, allowed: Any) -> None:
        self._allowed = allowed
        self.is_finished = False

    def allowed(self) -> Any:
        return self._allowed

    def accept(self, token_id: int) -> None:
        assert self._allowed[token_id]


def _sampling(vocab_size: int) -> Check:
    kernel = sample_rows(vocab_size)

    def run(device: Device) -> tuple[float, float]:
        rows = 96
        wrong, details = 0.0, 0.0
        for spread in (0.5, 3.0, 12.0):
            differing, apart = _compare_samplers(device, kernel, vocab_size, rows, spread)
            wrong, details = wrong + differing / (3 * rows), max(details, apart)
        # Neighbouring weights may round differently, and then another token holds the boundary.
        return max(wrong, details * 100), 0.02

    return Check(kernel.entry, [kernel], run)


def _compare_samplers(
    device: Device, kernel: CudaKernel, vocab_size: int, rows: int, spread: float
) -> tuple[int, float]:
    """Rows that sample otherwise than `SamplingState`, and how far log probabilities are apart."""
    torch = device.torch
    choice = random.Random()
    logits = torch.randn(rows, vocab_size, device="cuda") * spread
    options = np.zeros((rows, 8), np.float32)
    choices = np.zeros((rows, 8), np.int32)
    uniforms = np.random.default_rng().random(rows)
    masks = np.zeros((rows, -(-vocab_size // 32)), np.uint32)
    bias_ids, bias_values = np.zeros((rows, 8), np.int32), np.zeros((rows, 8), np.float32)
    counts = np.zeros((rows, vocab_size), np.int32)
    states = []
    for row in range(rows):
        settings: dict[str, Any] = {
            "temperature": choice.choice([0.0, 0.3, 0.7, 1.0, 1.5]),
            "top_p": choice.choice([1.0, 0.95, 0.5, 0.999]),
            "top_k": choice.choice([0, 1, 40, 500, vocab_size]),
            "min_p": choice.choice([0.0, 0.0, 0.05]),
        }
        flags = 0
        if choice.random() < 0.5:
            flags |= USES_PENALTIES
            settings |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
        if choice.random() < 0.4:
            picked = choice.sample(range(vocab_size), 8)
            bias_ids[row], bias_values[row] = picked, np.random.default_rng().normal(0, 4, 8)
            settings["logit_bias"] = {i: float(v) for i, v in zip(picked, bias_values[row], strict=True)}
            choices[row, 3] = 8
        if choice.random() < 0.3:
            flags |= USES_MASK
            allowed = np.random.default_rng().random(vocab_size) < 0.3
            bits = np.packbits(allowed, bitorder="little")
            masks[row].view(np.uint8)[: bits.size] = bits
            settings["constraint"] = _Allows(allowed)
        state = SamplingState(**settings, seed=0, logprobs=True, top_logprobs=5)
        state._random = _Given(uniforms[row])  # type: ignore[assignment]
        if flags & USES_PENALTIES:
            for token in logits[row].topk(6).indices.tolist():
                counts[row, token] = choice.randint(1, 3)
                state.counts[token] = int(counts[row, token])
        options[row, :6] = [
            settings["temperature"],
            settings["top_p"],
            settings["min_p"],
            settings.get("presence_penalty", 0),
            settings.get("frequency_penalty", 0),
            settings.get("repetition_penalty", 1),
        ]
        choices[row, [0, 1, 2, 4]] = [settings["top_k"], flags, row, 5]
        states.append(state)
    arrays = {
        "options": options,
        "choices": choices,
        "uniforms": uniforms,
        "masks": masks.view(np.int32),
        "bias_ids": bias_ids,
        "bias_values": bias_values,
        "counts": counts,
    }
    arguments = {name: torch.from_numpy(array).cuda() for name, array in arrays.items()}
    arguments |= {"logits": logits, "adjusted": torch.full_like(logits, math.nan)}
    arguments["token_ids"] = torch.full((rows,), -7, device="cuda", dtype=torch.int32)
    arguments["logprobs"] = _poisoned(torch, (rows,), "float32")
    arguments["top_ids"] = torch.full((rows, MOST_TOP_LOGPROBS), -7, device="cuda", dtype=torch.int32)
    arguments["top_logprobs"] = _poisoned(torch, (rows, MOST_TOP_LOGPROBS), "float32")
    device.run(kernel, {**arguments, "bias_width": 8}, rows=rows)
    ids, logprobs = arguments["token_ids"].tolist(), arguments["logprobs"].tolist()
    top_ids, top_logprobs = arguments["top_ids"][:, :5].tolist(), arguments["top_logprobs"][:, :5].tolist()
    host_logits = logits.cpu().numpy()
    differing, apart = 0, 0.0
    for row, state in enumerate(states):
        wanted = state.sample(host_logits[row])
        if wanted.token_id != ids[row]:
            differing += 1
            print(f"  sampled {ids[row]} instead of {wanted.token_id}: {options[row]} {choices[row]} {uniforms[row]}")
            continue
        assert wanted.logprob is not None
        apart = max(apart, abs(wanted.logprob - logprobs[row]))
        assert [i for i, _ in wanted.top_logprobs] == top_ids[row], (wanted.top_logprobs, top_ids[row])
        apart = max(apart, *(abs(a - b) for (_, a), b in zip(wanted.top_logprobs, top_logprobs[row], strict=True)))
        if choices[row, 1] & USES_PENALTIES:
            picked_twice = int(arguments["counts"][row, ids[row]]) - int(counts[row, ids[row]])
            assert picked_twice == 1, "the pick was not counted"
    return differing, apart
