"""The Llama family as GGUF files hold it (architecture ``llama``: Llama, SmolLM, Mistral, TinyLlama and others).

Tensor names and hyperparameter keys follow the GGUF specification; parameter roles follow section 6 of the MLC formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tvm import tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlc_nb.compiler.kernels.cpu import attention
from mlc_nb.compiler.kernels.cpu.attention import CHUNK_PAGES, PAGE_SIZE, AttentionShape
from mlc_nb.compiler.kernels.cpu.isa import IsaLevel, isa_level
from mlc_nb.errors import ModelFormatError
from mlc_nb.models.layers import (
    ACTIVATION_TERMS,
    Norm,
    PackedLinear,
    StackedLinear,
    embed,
    gated_silu,
    in_forms,
)
from mlc_nb.models.llama_config import LlamaConfig
from mlc_nb.models.tensors import SourceTensor, matrix, vector
from mlc_nb.quantization.packing import ROW_TILE
from mlc_nb.weights.plan import CompileRequest, LibraryMetadata, VectorWeight

__all__ = ["LlamaForCausalLM", "build"]


# Layers share one kernel object each, so that each kernel is built once.
_rotate_and_append = cache(attention.rotate_and_append)
_attend_chunks = cache(attention.attend_chunks)
_merge_chunks = cache(attention.merge_chunks)


class LlamaLayer(nn.Module):
    """One transformer block: attention and gated MLP, each behind an RMSNorm and added to the residual stream."""

    def __init__(
        self, config: LlamaConfig, request: CompileRequest, level: IsaLevel, shape: AttentionShape, index: int
    ) -> None:
        tensors, prefix = request.tensors, f"blk.{index}."
        terms = ACTIVATION_TERMS[request.activation_dtype]
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim

        def source(name: str, rows: int, columns: int, heads: int = 0) -> SourceTensor:
            if rows % ROW_TILE:
                raise ModelFormatError(f"{prefix}{name} has {rows} rows; the kernels need a multiple of {ROW_TILE}")
            return matrix(tensors, f"{prefix}{name}.weight", rows, columns, heads)

        def linear(*sources: SourceTensor) -> StackedLinear:
            return StackedLinear(level, list(sources), terms)

        def norm(name: str) -> Norm:
            return Norm(level, vector(tensors, f"{prefix}{name}.weight", hidden), hidden, config.rms_norm_epsilon)

        self.level, self.shape, self.index, self.inner = level, shape, index, inner
        self.input_layernorm = norm("attn_norm")
        self.qkv_proj = linear(
            source("attn_q", config.query_heads * dim, hidden, config.query_heads),
            source("attn_k", config.kv_heads * dim, hidden, config.kv_heads),
            source("attn_v", config.kv_heads * dim, hidden),
        )
        self.o_proj = linear(source("attn_output", hidden, config.query_heads * dim))
        self.post_attention_layernorm = norm("ffn_norm")
        self.gate_up_proj = linear(source("ffn_gate", inner, hidden), source("ffn_up", inner, hidden))
        self.down_proj = linear(source("ffn_down", hidden, inner))

    def forward(self, stream: Tensor, context: StepContext, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Residual stream float32 ``[t, hidden]`` and the KV pool, to the same."""
        shape, level = self.shape, self.level
        tokens, chunks = stream.shape[0], context.page_tables.shape[1]
        qkv = self.qkv_proj(self.input_layernorm(stream, self.qkv_proj))
        pages, queries = op.tensor_ir_inplace_op(
            _rotate_and_append(level, shape),
            "rotate_and_append",
            [
                qkv,
                context.cosines,
                context.sines,
                context.positions,
                context.sequences,
                context.page_tables,
                pages,
                tirx.const(self.index, "int32"),
            ],
            [6, -1],
            [
                Tensor.placeholder(pages.shape, shape.kv_dtype),
                Tensor.placeholder([tokens, shape.query_heads, shape.head_dim], "float32"),
            ],
        )
        partials = op.tensor_ir_inplace_op(
            _attend_chunks(level, shape),
            "attend_chunks",
            [
                queries,
                context.positions,
                context.sequences,
                context.page_tables,
                pages,
                context.partials,
                tirx.const(self.index, "int32"),
            ],
            [5],
            Tensor.placeholder([tokens, chunks, shape.query_heads, shape.head_dim + 2], "float32"),
        )
        attended = in_forms(
            "merge_chunks",
            lambda terms: _merge_chunks(level, shape, terms),
            [partials, context.positions],
            tokens,
            shape.query_heads * shape.head_dim,
            self.o_proj,
        )
        stream = self.o_proj(attended, stream)
        gate_up = self.gate_up_proj(self.post_attention_layernorm(stream, self.gate_up_proj))
        return self.down_proj(gated_silu(level, gate_up, self.inner, self.down_proj), stream), pages


@dataclass(frozen=True)
class StepContext:
    """What every layer of a step reads beside the residual stream."""

    positions: Tensor
    sequences: Tensor
    page_tables: Tensor
    cosines: Tensor
    sines: Tensor
    partials: Tensor


class LlamaForCausalLM(nn.Module):
    """A whole model whose `forward` runs one step over any mixture of prefill chunks and decodes."""

    def __init__(self, config: LlamaConfig, request: CompileRequest) -> None:
        level = isa_level(request.isa)
        terms = ACTIVATION_TERMS[request.activation_dtype]
        self.config = config
        self.level = level
        self.shape = AttentionShape(
            layers=config.layers,
            query_heads=config.query_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            kv_dtype="float16" if terms and level.hardware_half else "float32",
        )
        tensors = request.tensors
        table = matrix(tensors, "token_embd.weight", config.vocab_size, config.hidden_size)
        tied = "output.weight" not in tensors
        head = table if tied else matrix(tensors, "output.weight", config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [LlamaLayer(config, request, level, self.shape, index) for index in range(config.layers)]
        )
        output_norm = vector(tensors, "output_norm.weight", config.hidden_size)
        self.norm = Norm(level, output_norm, config.hidden_size, config.rms_norm_epsilon)
        self.lm_head = StackedLinear(level, [head], terms)
        if not tied:
            self.embed_tokens = PackedLinear(level, [table], terms)

    @property
    def embedding_table(self) -> PackedLinear:
        """The embedding: a matrix of its own, or the output head's."""
        own: PackedLinear | None = getattr(self, "embed_tokens", None)
        return self.lm_head.linears[0] if own is None else own

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        sequences: Tensor,
        page_tables: Tensor,
        logit_rows: Tensor,
        cosines: Tensor,
        sines: Tensor,
        pages: Tensor,
        partials: Tensor,
        logits: Tensor,
    ) -> Tensor:
        """Run one step.

        Parameters
        ----------
        token_ids, positions, sequences
            int32 ``[t]``: the new tokens, the position of each in its sequence, and its row in ``page_tables``.
        page_tables
            int32 ``[b, chunks, 16]``.
        logit_rows
            int32 ``[r]``: tokens of which logits are wanted.
        cosines, sines
            float32 ``[positions, head_dim / 2]``.
        pages
            The KV pool, written in place.
        partials
            float32 ``[t, chunks, query heads, head_dim + 2]`` to work in.
        logits
            float32 ``[r, vocab]`` to write to.

        Returns
        -------
        Tensor
            ``logits``.
        """
        context = StepContext(positions, sequences, page_tables, cosines, sines, partials)
        stream = embed(self.level, self.embedding_table, token_ids)
        for layer in self.layers:
            stream, pages = layer(stream, context, pages)
        return self.lm_head.linears[0](self.norm(stream, self.lm_head, picked=logit_rows), out=logits)

    def forward_spec(self) -> dict[str, nn.spec.Tensor]:
        """Shapes and dtypes of the arguments of `forward`."""
        half = self.config.head_dim // 2
        return {
            "token_ids": nn.spec.Tensor(["tokens"], "int32"),
            "positions": nn.spec.Tensor(["tokens"], "int32"),
            "sequences": nn.spec.Tensor(["tokens"], "int32"),
            "page_tables": nn.spec.Tensor(["batch", "chunks", CHUNK_PAGES], "int32"),
            "logit_rows": nn.spec.Tensor(["rows"], "int32"),
            "cosines": nn.spec.Tensor(["rope_positions", half], "float32"),
            "sines": nn.spec.Tensor(["rope_positions", half], "float32"),
            "pages": nn.spec.Tensor(list(self.shape.pages_shape("num_pages")), self.shape.kv_dtype),
            "partials": nn.spec.Tensor(
                ["tokens", "chunks", self.shape.query_heads, self.shape.head_dim + 2], "float32"
            ),
            "logits": nn.spec.Tensor(["rows", self.lm_head.linears[0].rows], "float32"),
        }

    def norms(self) -> list[Norm]:
        """Every norm of the model."""
        return [n for layer in self.layers for n in (layer.input_layernorm, layer.post_attention_layernorm)] + [
            self.norm
        ]

    def matrices(self) -> list[PackedLinear]:
        """Every packed matrix of the model, each once."""
        stacks = [
            s for layer in self.layers for s in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
        ]
        found = [product for stack in [*stacks, self.lm_head] for product in stack.linears]
        return found if self.embedding_table in found else [*found, self.embedding_table]


def build(request: CompileRequest) -> tuple[LlamaForCausalLM, LibraryMetadata]:
    """Build the module and say what a runtime must know of it.

    Raises
    ------
    ModelFormatError
        If the file's hyperparameters or tensors do not make a model of this family.
    """
    config = LlamaConfig.from_request(request)
    model = LlamaForCausalLM(config, request)
    position = {id(parameter): index for index, (_, parameter) in enumerate(model.named_parameters())}
    matrices = tuple(linear.plan(position) for linear in model.matrices())
    vectors = tuple(
        VectorWeight(parameter=position[id(norm.weight)], tensor=norm.tensor, size=norm.size) for norm in model.norms()
    )
    metadata = config.describe(
        request,
        padded_vocab_size=model.lm_head.linears[0].rows,
        stored_head_dim=config.head_dim,
        kv_dtype=model.shape.kv_dtype,
        page_size=PAGE_SIZE,
        chunk_pages=CHUNK_PAGES,
        vectors=vectors,
        matrices=matrices,
    )
    return model, metadata
