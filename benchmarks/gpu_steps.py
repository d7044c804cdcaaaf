"""Whole decode and prefill steps of a Llama-like model with random weights, made of the GPU kernels and timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_device import time_calls
from mlc_nb.compiler.kernels.cuda.attention import (
    PREFILL_TILE_ROWS,
    CudaAttentionShape,
    attend_decodes,
    attend_prefills,
    rotate_and_append,
    softmax_scale,
)
from mlc_nb.compiler.kernels.cuda.elementwise import embedding_rows, gated_silu, rms_norm
from mlc_nb.compiler.kernels.cuda.matrix import CudaMatrix, dequantize_matrix
from mlc_nb.compiler.kernels.cuda.product import Epilogue, HeadLayout, skinny_product
from mlc_nb.compiler.kernels.cuda.sampling import MOST_TOP_LOGPROBS, sample_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu_device import Device
    from mlc_nb.compiler.kernels.cuda.kernel import CudaKernel

__all__ = ["MODELS", "ModelSizes", "StepBench"]


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a Llama-like model."""

    name: str
    layers: int
    hidden: int
    inner: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def attention(self) -> CudaAttentionShape:
        return CudaAttentionShape(self.query_heads, self.kv_heads, self.head_dim, "float16")

    @property
    def heads(self) -> HeadLayout:
        return HeadLayout(self.query_heads, self.kv_heads, self.head_dim)

    def matrices(self, block_type: str) -> dict[str, CudaMatrix]:
        """The matrices of a layer, by name, and the head."""
        qkv_rows = (self.query_heads + 2 * self.kv_heads) * self.head_dim
        return {
            "qkv": CudaMatrix(block_type, qkv_rows, self.hidden, self.head_dim // 2),
            "o": CudaMatrix(block_type, self.hidden, self.query_heads * self.head_dim),
            "gate_up": CudaMatrix(block_type, 2 * self.inner, self.hidden, self.inner),
            "down": CudaMatrix(block_type, self.hidden, self.inner),
            "head": CudaMatrix(block_type, self.vocab, self.hidden),
        }

    def weight_bytes(self, block_type: str) -> int:
        """Bytes of weights that a decode step reads."""
        sizes = {name: sum(m.array_bytes.values()) for name, m in self.matrices(block_type).items()}
        return self.layers * (sum(sizes.values()) - sizes["head"]) + sizes["head"]

    def kv_bytes(self, batch: int, context: int) -> int:
        """Bytes of keys and values that a decode step reads."""
        return batch * context * self.layers * 2 * self.kv_heads * self.head_dim * 2


MODELS = {
    "llama-3.1-8b": ModelSizes("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256),
    "qwen2.5-0.5b": ModelSizes("qwen2.5-0.5b", 24, 896, 4864, 14, 2, 64, 151936),
    "smollm2-135m": ModelSizes("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152),
}

_EPILOGUES = {
    "qkv": Epilogue.ROTATE_APPEND,
    "o": Epilogue.ADD_TO_STREAM,
    "gate_up": Epilogue.GATED_SILU,
    "down": Epilogue.ADD_TO_STREAM,
    "head": Epilogue.STORE_FLOAT32,
}


def random_arrays(torch: Any, matrix: CudaMatrix) -> dict[str, Any]:
    """Random weights in the kernels' arrays."""
    if not matrix.quantized:
        return {"values": torch.randn(matrix.rows, matrix.columns, device="cuda", dtype=torch.float16) * 0.02}
    arrays = {}
    for name, size in matrix.array_bytes.items():
        if name == "values":
            arrays[name] = torch.randint(0, 256, (size,), device="cuda", dtype=torch.uint8)
        else:
            arrays[name] = (torch.rand(size // 2, device="cuda") * 0.004 + 0.002).half()
    return arrays


class StepBench:
    """Decode steps of a batch, each sequence ``context`` long, and one prefill of ``prefill`` tokens (0: none)."""

    def __init__(self, sizes: ModelSizes, block_type: str, batch: int, context: int, prefill: int = 0) -> None:
        self.sizes, self.block_type, self.batch, self.context, self.prefill = sizes, block_type, batch, context, prefill
        self.matrices = sizes.matrices(block_type)
        self.products = {
            name: skinny_product(
                matrix,
                _EPILOGUES[name],
                min(batch, 64),
                heads=sizes.heads if name == "qkv" else None,
            )
            for name, matrix in self.matrices.items()
        }
        self.norm = rms_norm(sizes.hidden, "float16", picked=False)
        self.embed = embedding_rows(self.matrices["head"])
        self.attend = attend_decodes(sizes.attention)
        self.sample = sample_rows(sizes.vocab)

    @property
    def kernels(self) -> list[CudaKernel]:
        found = [*self.products.values(), self.norm, self.embed, self.attend, self.sample]
        if self.prefill:
            shape = self.sizes.attention
            found += [rotate_and_append(shape), attend_prefills(shape), gated_silu(self.sizes.inner, "float16")]
            found += [dequantize_matrix(matrix) for matrix in self.matrices.values() if matrix.quantized]
        return found

    def allocate(self, device: Device) -> None:
        """Make weights, pages and buffers."""
        torch, sizes = device.torch, self.sizes
        self.device = device
        self.weights = [
            {name: random_arrays(torch, self.matrices[name]) for name in ("qkv", "o", "gate_up", "down")}
            for _ in range(sizes.layers)
        ]
        self.head = random_arrays(torch, self.matrices["head"])
        self.norm_weight = torch.ones(sizes.hidden, device="cuda")
        longest = max(self.context, self.prefill)
        width = -(-longest // 16) + 1
        self.num_pages = self.batch * width
        shape = sizes.attention
        self.pages = torch.randn(shape.pages_shape(sizes.layers, self.num_pages), device="cuda", dtype=torch.float16)
        order = torch.randperm(self.num_pages, device="cuda").int()
        self.tables = order.view(self.batch, width).contiguous()
        angle = torch.rand(longest + 1, sizes.head_dim // 2, device="cuda") * 6
        self.cosines, self.sines = angle.cos(), angle.sin()

    def release(self) -> None:
        """Let go of what `allocate` made."""
        del self.weights, self.head, self.norm_weight, self.pages, self.tables, self.cosines, self.sines

    def _common(self) -> dict[str, Any]:
        width = self.tables.shape[1]
        return {"page_tables": self.tables, "page_table_width": width, "num_pages": self.num_pages}

    def time_decode(self, splits: int) -> float:
        """Median seconds of a decode step, sampling included."""
        return time_calls(self.device.torch, self.decode_calls(splits))

    def decode_calls(self, splits: int) -> list[Callable[[], None]]:
        torch, sizes, batch, bind = self.device.torch, self.sizes, self.batch, self.device.bind
        half = {"device": "cuda", "dtype": torch.float16}
        shape = sizes.attention
        ids = torch.randint(0, sizes.vocab, (batch,), device="cuda", dtype=torch.int32)
        stream = torch.zeros(batch, sizes.hidden, device="cuda")
        normed = torch.zeros(batch, sizes.hidden, **half)
        queries = torch.zeros(batch, sizes.query_heads * sizes.head_dim, **half)
        attended = torch.zeros_like(queries)
        inner = torch.zeros(batch, sizes.inner, **half)
        logits = torch.zeros(batch, sizes.vocab, device="cuda")
        positions = torch.full((batch,), self.context - 1, device="cuda", dtype=torch.int32)
        sequences = torch.arange(batch, device="cuda", dtype=torch.int32)
        partials = torch.zeros(shape.partials_elements(batch, splits), device="cuda")
        arrivals = torch.zeros(shape.arrivals_elements(batch), device="cuda", dtype=torch.int32)
        where = {"positions": positions, "sequences": sequences, "pages": self.pages, **self._common()}
        tables = {"cosines": self.cosines, "sines": self.sines}

        def product(name: str, arrays: dict[str, Any], x: Any, out: Any, layer: int) -> Callable[[], None]:
            return bind(
                self.products[name],
                {**arrays, **where, **tables, "activations": x, "out": out, "tokens": batch, "layer": layer},
            )

        def norm() -> Callable[[], None]:
            return bind(
                self.norm, {"stream": stream, "weight": self.norm_weight, "out": normed, "epsilon": 1e-5}, rows=batch
            )

        calls = [bind(self.embed, {"token_ids": ids, **self.head, "stream": stream}, tokens=batch)]
        for layer, weights in enumerate(self.weights):
            attention = {
                **where,
                "queries": queries,
                "partials": partials,
                "arrivals": arrivals,
                "out": attended,
                "scale": softmax_scale(sizes.head_dim),
                "layer": layer,
            }
            calls += [
                norm(),
                product("qkv", weights["qkv"], normed, queries, layer),
                bind(self.attend, attention, splits=splits, batch=batch),
                product("o", weights["o"], attended, stream, layer),
                norm(),
                product("gate_up", weights["gate_up"], normed, inner, layer),
                product("down", weights["down"], inner, stream, layer),
            ]
        calls += [norm(), product("head", self.head, normed, logits, 0)]
        arguments = sampling_arguments(torch, logits, temperature=0.0, top_p=1.0)
        arguments["token_ids"] = ids
        calls.append(bind(self.sample, arguments, rows=batch))
        return calls

    def time_prefill(self) -> float:
        """Median seconds of a prefill step of one sequence; products by torch (cuBLAS)."""
        return time_calls(self.device.torch, self.prefill_calls(), replays=5, warm_ups=1)

    def prefill_calls(self) -> list[Callable[[], Any]]:
        torch, sizes, tokens, bind = self.device.torch, self.sizes, self.prefill, self.device.bind
        half = {"device": "cuda", "dtype": torch.float16}
        shape = sizes.attention
        ids = torch.randint(0, sizes.vocab, (tokens,), device="cuda", dtype=torch.int32)
        stream = torch.zeros(tokens, sizes.hidden, device="cuda")
        normed = torch.zeros(tokens, sizes.hidden, **half)
        qkv = torch.zeros(tokens, self.matrices["qkv"].rows, **half)
        queries = torch.zeros(tokens, sizes.query_heads * sizes.head_dim, **half)
        attended = torch.zeros_like(queries)
        gate_up = torch.zeros(tokens, 2 * sizes.inner, **half)
        inner = torch.zeros(tokens, sizes.inner, **half)
        added = torch.zeros(tokens, sizes.hidden, **half)
        positions = torch.arange(tokens, device="cuda", dtype=torch.int32)
        sequences = torch.zeros(tokens, device="cuda", dtype=torch.int32)
        starts = range(0, tokens, PREFILL_TILE_ROWS)
        tiles = [[start, min(PREFILL_TILE_ROWS, tokens - start), 0, start] for start in starts][::-1]
        tile_tensor = torch.tensor(tiles, device="cuda", dtype=torch.int32)
        scratch = torch.zeros(max(m.rows * m.columns for m in self.matrices.values()), **half)
        where = {"pages": self.pages, **self._common()}

        def norm() -> Callable[[], None]:
            return bind(
                self.norm, {"stream": stream, "weight": self.norm_weight, "out": normed, "epsilon": 1e-5}, rows=tokens
            )

        def product(name: str, arrays: dict[str, Any], x: Any, out: Any) -> list[Callable[[], Any]]:
            matrix = self.matrices[name]
            if not matrix.quantized:
                weight = arrays["values"]
                return [lambda: torch.mm(x, weight.T, out=out)]
            plain = scratch[: matrix.rows * matrix.columns].view(matrix.rows, matrix.columns)
            unpack = bind(dequantize_matrix(matrix), {**arrays, "out": plain})
            return [unpack, lambda: torch.mm(x, plain.T, out=out)]

        calls: list[Callable[[], Any]] = [
            bind(self.embed, {"token_ids": ids, **self.head, "stream": stream}, tokens=tokens)
        ]
        for layer, weights in enumerate(self.weights):
            append = {
                **where,
                "qkv": qkv,
                "positions": positions,
                "sequences": sequences,
                "cosines": self.cosines,
                "sines": self.sines,
                "queries": queries,
                "tokens": tokens,
                "layer": layer,
            }
            attention = {
                **where,
                "queries": queries,
                "tiles": tile_tensor,
                "out": attended,
                "scale": softmax_scale(sizes.head_dim),
                "layer": layer,
            }
            silu = {"gate_up": gate_up, "out": inner, "tokens": tokens}
            calls += [
                norm(),
                *product("qkv", weights["qkv"], normed, qkv),
                bind(rotate_and_append(shape), append, tokens=tokens),
                bind(attend_prefills(shape), attention, tiles=len(tiles)),
                *product("o", weights["o"], attended, added),
                lambda: stream.add_(added),
                norm(),
                *product("gate_up", weights["gate_up"], normed, gate_up),
                bind(gated_silu(sizes.inner, "float16"), silu, tokens=tokens),
                *product("down", weights["down"], inner, added),
                lambda: stream.add_(added),
            ]
        return calls


def sampling_arguments(torch: Any, logits: Any, temperature: float, top_p: float) -> dict[str, Any]:
    """Arguments of `sample_rows` for rows of equal settings."""
    rows, vocab_size = logits.shape
    choices = torch.zeros(rows, 8, device="cuda", dtype=torch.int32)
    choices[:, 2] = torch.arange(rows, device="cuda")
    options = torch.tensor([temperature, top_p, 0, 0, 0, 1, 0, 0], device="cuda").repeat(rows, 1)
    whole = {"device": "cuda", "dtype": torch.int32}
    return {
        "logits": logits,
        "adjusted": torch.zeros_like(logits),
        "options": options,
        "choices": choices,
        "uniforms": torch.rand(rows, device="cuda", dtype=torch.float64),
        "masks": torch.zeros(rows, -(-vocab_size // 32), **whole),
        "bias_ids": torch.zeros(rows, 1, **whole),
        "bias_values": torch.zeros(rows, 1, device="cuda"),
        "counts": torch.zeros(rows, vocab_size, **whole),
        "token_ids": torch.zeros(rows, **whole),
        "logprobs": torch.zeros(rows, device="cuda"),
        "top_ids": torch.zeros(rows, MOST_TOP_LOGPROBS, **whole),
        "top_logprobs": torch.zeros(rows, MOST_TOP_LOGPROBS, device="cuda"),
        "bias_width": 1,
    }
