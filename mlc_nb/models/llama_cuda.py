"""The Llama family on a GPU: the launches of a step, for few tokens and for many.

With few tokens, products are bound by the memory that holds the weights, and kernels of ours do all that follows a
product (rotation, appending, gating, adding to the residual stream) before its sums leave the registers. With more
tokens, cuBLAS multiplies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlc_nb.compiler.kernels.cuda.attention import (
    PAGE_SIZE,
    PREFILL_TILE_ROWS,
    CudaAttentionShape,
    attend_decodes,
    attend_prefills,
    rotate_and_append,
    softmax_scale,
)
from mlc_nb.compiler.kernels.cuda.elementwise import embedding_rows, gated_silu, rms_norm
from mlc_nb.compiler.kernels.cuda.product import MOST_TOKENS, Epilogue, HeadLayout, skinny_product
from mlc_nb.compiler.kernels.cuda.sampling import sample_rows
from mlc_nb.errors import ModelFormatError
from mlc_nb.models.cuda_plan import PlanBuilder, Weight, buffer, number, real, same_type_runs, size
from mlc_nb.models.llama_config import LlamaConfig
from mlc_nb.models.tensors import SourceTensor, matrix, vector
from mlc_nb.weights.launch_plan import MOST_BIASES, Argument, Launch, LaunchPlan, Product, Sequenced, Size
from mlc_nb.weights.plan import VectorWeight

if TYPE_CHECKING:
    from mlc_nb.compiler.kernels.cuda.kernel import CudaKernel
    from mlc_nb.weights.plan import CompileRequest, LibraryMetadata

__all__ = ["build"]

_MANY = 2**31 - 1
# Up to so many tokens kernels of ours multiply: as measured on an H200, beside cuBLAS (benchmarks/gpu_kernels.py).
_FEW = (8, 16)
_FEW_QUANTIZED = (8, 16, 32, MOST_TOKENS)

# Of the most common GPU of an architecture; a grid for another number of multiprocessors is right too, if not best.
_MULTIPROCESSORS = {75: 68, 80: 108, 86: 84, 87: 16, 89: 128, 90: 132, 100: 148, 103: 148, 120: 170}
_OTHER_MULTIPROCESSORS = 100

Steps = list[Launch | Product]


def build(request: CompileRequest) -> tuple[LaunchPlan, list[CudaKernel], LibraryMetadata]:
    """Plan a model.

    Returns
    -------
    tuple
        The launch plan, the kernels that it uses, and what a runtime must know of the model.

    Raises
    ------
    ModelFormatError
        If the file's hyperparameters or tensors do not make a model of this family, or the kernels cannot take them.
    """
    config = LlamaConfig.from_request(request)
    if config.head_dim % 16:
        raise ModelFormatError(f"heads of {config.head_dim} dimensions; the kernels for GPUs need a multiple of 16")
    model = _Model(config, request)
    builder = model.builder
    few = _FEW_QUANTIZED if any(m.block_type not in ("F16", "BF16") for m in builder.matrices) else _FEW
    bodies = [Sequenced(most=most, steps=tuple(model.body(most))) for most in few]
    bodies.append(Sequenced(most=_MANY, steps=tuple(model.body_of_many())))
    few = _FEW_QUANTIZED if model.lm_head.matrix.quantized else _FEW
    heads = [Sequenced(most=most, steps=tuple(model.head(most))) for most in few]
    if not model.lm_head.matrix.quantized:
        heads.append(Sequenced(most=_MANY, steps=tuple(model.head_of_many())))
    plan = LaunchPlan(
        parameters=tuple(builder.parameters),
        packing=tuple(builder.packing),
        bodies=tuple(bodies),
        heads=tuple(heads),
        sampling=model.sampling(),
        kernels=builder.described_kernels(),
        buffers=builder.buffers(),
        tile_rows=PREFILL_TILE_ROWS,
        decode_blocks=model.shape.kv_heads * model.shape.head_tiles,
        page_elements=2 * config.kv_heads * PAGE_SIZE * model.shape.stored_dim,
    )
    metadata = config.describe(
        request,
        padded_vocab_size=config.vocab_size,
        stored_head_dim=model.shape.stored_dim,
        kv_dtype=request.activation_dtype,
        page_size=PAGE_SIZE,
        chunk_pages=1,
        vectors=tuple(model.vectors),
        matrices=tuple(builder.matrices),
    )
    return plan, list(builder.kernels.values()), metadata


class _Layer:
    """Weights of a transformer block."""

    def __init__(self, model: _Model, request: CompileRequest, index: int) -> None:
        config, builder = model.config, model.builder
        tensors, prefix = request.tensors, f"blk.{index}."
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim

        def source(name: str, rows: int, columns: int, heads: int = 0) -> SourceTensor:
            return matrix(tensors, f"{prefix}{name}.weight", rows, columns, heads)

        self.input_norm = model.norm(request, f"{prefix}attn_norm.weight")
        self.post_attention_norm = model.norm(request, f"{prefix}ffn_norm.weight")
        qkv = [
            source("attn_q", config.query_heads * dim, hidden, config.query_heads),
            source("attn_k", config.kv_heads * dim, hidden, config.kv_heads),
            source("attn_v", config.kv_heads * dim, hidden),
        ]
        self.qkv: list[tuple[int, Weight]] = []
        first_row = 0
        for run in same_type_runs(qkv):
            self.qkv.append((first_row, builder.weight(run, pair=dim // 2)))
            first_row += sum(one.rows for one in run)
        self.attention_output = builder.weight([source("attn_output", hidden, config.query_heads * dim)])
        gate_up = [source("ffn_gate", inner, hidden), source("ffn_up", inner, hidden)]
        self.gate_up = builder.weight(gate_up, pair=inner)
        self.down = builder.weight([source("ffn_down", hidden, inner)])


class _Model:
    """Weights, buffers and launches of a model."""

    def __init__(self, config: LlamaConfig, request: CompileRequest) -> None:
        self.config = config
        self.dtype = dtype = request.activation_dtype
        self.builder = builder = PlanBuilder(dtype)
        self.vectors: list[VectorWeight] = []
        self.shape = CudaAttentionShape(config.query_heads, config.kv_heads, config.head_dim, dtype)
        self.multiprocessors = _MULTIPROCESSORS.get(int(request.isa.removeprefix("sm_")), _OTHER_MULTIPROCESSORS)
        tensors = request.tensors
        if config.intermediate_size % 8 or config.hidden_size % 8:
            raise ModelFormatError("the kernels for GPUs need hidden and intermediate sizes that are multiples of 8")
        table = matrix(tensors, "token_embd.weight", config.vocab_size, config.hidden_size)
        self.embedding = builder.weight([table])
        self.lm_head = self.embedding
        if "output.weight" in tensors:
            head = matrix(tensors, "output.weight", config.vocab_size, config.hidden_size)
            self.lm_head = builder.weight([head])
        self.layers = [_Layer(self, request, index) for index in range(config.layers)]
        self.output_norm = self.norm(request, "output_norm.weight")
        tokens, rows = Size("most_tokens"), Size("most_rows")
        heads = config.query_heads * config.head_dim
        self.stream = builder.buffer("stream", tokens * config.hidden_size, "float32")
        self.normed = builder.buffer("normed", (tokens + rows) * config.hidden_size, dtype)
        self.qkv = builder.buffer("qkv", tokens * (heads + 2 * config.kv_heads * config.head_dim), dtype)
        self.queries = builder.buffer("queries", tokens * heads, dtype)
        self.attended = builder.buffer("attended", tokens * heads, dtype)
        self.gate_up = builder.buffer("gate_up", tokens * (2 * config.intermediate_size), dtype)
        self.gated = builder.buffer("gated", tokens * config.intermediate_size, dtype)
        self.logits = builder.buffer("logits", rows * config.vocab_size, "float32")
        parts = Size("decode_parts") * self.shape.partials_elements(1, 1)
        self.partials = builder.buffer("partials", parts, "float32")
        arrivals = Size("most_sequences") * self.shape.arrivals_elements(1)
        self.arrivals = builder.buffer("arrivals", arrivals, "uint32")

    def norm(self, request: CompileRequest, name: str) -> Argument:
        """The weight of a norm."""
        elements = self.config.hidden_size
        parameter = self.builder.vector(elements)
        self.vectors.append(
            VectorWeight(parameter=parameter, tensor=vector(request.tensors, name, elements), size=elements)
        )
        return Argument(kind="parameter", value=parameter)

    def body(self, most: int) -> Steps:
        """Launches for at most ``most`` (up to 64) tokens."""
        steps = self._embed()
        for index, layer in enumerate(self.layers):
            steps.append(self._norm(layer.input_norm))
            for first_row, weight in layer.qkv:
                heads = HeadLayout(
                    self.config.query_heads,
                    self.config.kv_heads,
                    self.config.head_dim,
                    first_row // self.config.head_dim,
                )
                steps.append(
                    self._product(
                        weight, Epilogue.ROTATE_APPEND, most, self.normed, self.queries, heads=heads, layer=index
                    )
                )
            steps += self._attend(index)
            steps.append(
                self._product(layer.attention_output, Epilogue.ADD_TO_STREAM, most, self.attended, self.stream)
            )
            steps.append(self._norm(layer.post_attention_norm))
            steps.append(self._product(layer.gate_up, Epilogue.GATED_SILU, most, self.normed, self.gated))
            steps.append(self._product(layer.down, Epilogue.ADD_TO_STREAM, most, self.gated, self.stream))
        return steps

    def body_of_many(self) -> Steps:
        """Launches for any number of tokens."""
        config, builder = self.config, self.builder
        width = (config.query_heads + 2 * config.kv_heads) * config.head_dim
        steps = self._embed()
        for index, layer in enumerate(self.layers):
            steps.append(self._norm(layer.input_norm))
            for first_row, weight in layer.qkv:
                output = buffer("qkv", 2 * first_row)
                steps += builder.product(weight, self.normed, output, "tokens", self.dtype, stride=width)
            steps.append(
                builder.launch(rotate_and_append(self.shape), qkv=self.qkv, queries=self.queries, layer=number(index))
            )
            steps += self._attend(index)
            steps += builder.product(layer.attention_output, self.attended, self.stream, "tokens", "float32", add=True)
            steps.append(self._norm(layer.post_attention_norm))
            steps += builder.product(layer.gate_up, self.normed, self.gate_up, "tokens", self.dtype)
            silu = gated_silu(config.intermediate_size, self.dtype)
            steps.append(builder.launch(silu, gate_up=self.gate_up, out=self.gated))
            steps += builder.product(layer.down, self.gated, self.stream, "tokens", "float32", add=True)
        return steps

    def head(self, most: int) -> Steps:
        """Launches for the logits of at most ``most`` (up to 64) rows."""
        return [
            self._picked_norm(),
            self._product(self.lm_head, Epilogue.STORE_FLOAT32, most, self.normed, self.logits, tokens="rows"),
        ]

    def head_of_many(self) -> Steps:
        """Launches for the logits of any number of rows."""
        return [self._picked_norm(), *self.builder.product(self.lm_head, self.normed, self.logits, "rows", "float32")]

    def sampling(self) -> Launch:
        """From logits to tokens."""
        names = ("options", "choices", "uniforms", "masks", "bias_ids", "bias_values", "counts", "logprobs")
        return self.builder.launch(
            sample_rows(self.config.vocab_size),
            logits=self.logits,
            adjusted=buffer("adjusted_logits"),
            token_ids=buffer("sampled_ids"),
            top_ids=buffer("top_ids"),
            top_logprobs=buffer("top_logprobs"),
            bias_width=number(MOST_BIASES),
            **{name: buffer(name) for name in names},
        )

    def _embed(self) -> Steps:
        launch = self.builder.launch(
            embedding_rows(self.embedding.matrix),
            **self.embedding.arguments,
            token_ids=buffer("token_ids"),
            stream=self.stream,
        )
        return [launch]

    def _norm(self, weight: Argument) -> Launch:
        kernel = rms_norm(self.config.hidden_size, self.dtype, picked=False)
        return self.builder.launch(
            kernel,
            "tokens",
            stream=self.stream,
            weight=weight,
            out=self.normed,
            epsilon=real(self.config.rms_norm_epsilon),
        )

    def _picked_norm(self) -> Launch:
        kernel = rms_norm(self.config.hidden_size, self.dtype, picked=True)
        return self.builder.launch(
            kernel,
            stream=self.stream,
            picked=buffer("logit_rows"),
            weight=self.output_norm,
            out=self.normed,
            epsilon=real(self.config.rms_norm_epsilon),
        )

    def _attend(self, layer: int) -> Steps:
        shared = {
            "queries": self.queries,
            "out": self.attended,
            "scale": real(softmax_scale(self.config.head_dim)),
            "layer": number(layer),
        }
        decodes = self.builder.launch(
            attend_decodes(self.shape), partials=self.partials, arrivals=self.arrivals, **shared
        )
        return [decodes, self.builder.launch(attend_prefills(self.shape), tiles=buffer("tiles"), **shared)]

    def _product(
        self,
        weight: Weight,
        epilogue: Epilogue,
        most: int,
        activations: Argument,
        out: Argument,
        *,
        heads: HeadLayout | None = None,
        layer: int = 0,
        tokens: str = "tokens",
    ) -> Launch:
        kernel = skinny_product(
            weight.matrix,
            epilogue,
            most,
            heads=heads,
            multiprocessors=self.multiprocessors,
        )
        return self.builder.launch(
            kernel,
            **weight.arguments,
            activations=activations,
            out=out,
            layer=number(layer),
            tokens=size(tokens),
        )
