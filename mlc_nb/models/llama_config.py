"""Sizes and hyperparameters of the Llama family, read and checked. Imports no compiler.

Hyperparameter keys follow the GGUF specification.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlc_nb.errors import ModelFormatError
from mlc_nb.models.tensors import vector
from mlc_nb.weights.plan import LibraryMetadata, RopeTable

if TYPE_CHECKING:
    from mlc_nb.weights.plan import CompileRequest, PackedWeight, VectorWeight

__all__ = ["ROPE_FACTORS", "LlamaConfig"]

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with the factors by which a file divides its rotary frequencies."""

_LEAST_CONTEXT = 16  # a KV page


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a model, from the ``llama.*`` keys and the tensors of a GGUF file."""

    layers: int
    hidden_size: int
    intermediate_size: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_window_size: int
    rms_norm_epsilon: float
    rope: RopeTable

    @classmethod
    def from_request(cls, request: CompileRequest) -> LlamaConfig:
        """Read and check the hyperparameters.

        Raises
        ------
        ModelFormatError
            If a key is missing, has an impossible value, or asks for a variant that is not supported (mixture of
            experts, partial rotary embeddings, YaRN); the message names the key.
        """
        keys = _Keys(request.hyperparameters)
        if keys.count("expert_count", 0, least=0):
            raise ModelFormatError("the model is a mixture of experts (llama.expert_count), which is not supported yet")
        heads = keys.count("attention.head_count")
        hidden = keys.count("embedding_length")
        kv_heads = keys.count("attention.head_count_kv", heads)
        head_dim = keys.count("attention.key_length", max(1, hidden // heads))
        if heads % kv_heads or head_dim % 8:
            raise ModelFormatError(
                f"impossible attention sizes: {heads} heads, {kv_heads} KV heads, head size {head_dim}; KV heads must "
                "divide the heads, and the head size must be a multiple of 8"
            )
        rotated = keys.count("rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise ModelFormatError(f"rotary embeddings over {rotated} of {head_dim} dimensions are not supported yet")
        # A factor without a type is linear; older files call the factor rope.scale_linear.
        scaling = keys.text("rope.scaling.type", "linear")
        if scaling not in ("none", "linear"):
            raise ModelFormatError(f"rotary scaling of type {scaling!r} (llama.rope.scaling.type) is not supported yet")
        factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
        scale = factor if scaling == "linear" else 1.0
        factors = vector(request.tensors, ROPE_FACTORS, head_dim // 2) if ROPE_FACTORS in request.tensors else None
        if "token_embd.weight" not in request.tensors:
            raise ModelFormatError("the file has no tensor 'token_embd.weight', the embedding; the file is incomplete")
        return cls(
            layers=keys.count("block_count"),
            hidden_size=hidden,
            intermediate_size=keys.count("feed_forward_length"),
            query_heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=request.tensors["token_embd.weight"][1][0],
            context_window_size=keys.count("context_length", least=_LEAST_CONTEXT),
            rms_norm_epsilon=keys.number("attention.layer_norm_rms_epsilon"),
            rope=RopeTable(dim=head_dim, base=keys.number("rope.freq_base", 10000.0), scale=scale, factors=factors),
        )

    def describe(
        self,
        request: CompileRequest,
        *,
        padded_vocab_size: int,
        stored_head_dim: int,
        kv_dtype: str,
        page_size: int,
        chunk_pages: int,
        vectors: tuple[VectorWeight, ...],
        matrices: tuple[PackedWeight, ...],
    ) -> LibraryMetadata:
        """Say what a runtime must know of a model that was made for ``request``.

        Raises
        ------
        ModelFormatError
            If the file has tensors that neither ``vectors`` nor ``matrices`` use.
        """
        used = {source.tensor for entry in matrices for source in entry.sources} | {entry.tensor for entry in vectors}
        unused = sorted(set(request.tensors) - used - {ROPE_FACTORS})
        if unused:
            shown = ", ".join(unused[:5])
            raise ModelFormatError(
                f"the file has tensors that this version does not know for the Llama family ({shown}); "
                "running without them would give wrong answers"
            )
        return LibraryMetadata(
            format_version=1,
            architecture=request.architecture,
            isa=request.isa,
            activation_dtype=request.activation_dtype,
            vocab_size=self.vocab_size,
            padded_vocab_size=padded_vocab_size,
            context_window_size=self.context_window_size,
            hidden_size=self.hidden_size,
            layers=self.layers,
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
            head_dim=stored_head_dim,
            kv_dtype=kv_dtype,
            page_size=page_size,
            chunk_pages=chunk_pages,
            rope=self.rope,
            vectors=vectors,
            matrices=matrices,
        )


class _Keys:
    """Typed look-up of hyperparameters with errors that name the key."""

    def __init__(self, values: dict[str, int | float | str | bool]) -> None:
        self.values = values

    def _get(self, key: str, default: int | float | str | None) -> int | float | str | bool:
        value = self.values.get(key, default)
        if value is None:
            raise ModelFormatError(f"the file's metadata lacks llama.{key}; the file is incomplete")
        return value

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            raise ModelFormatError(f"llama.{key} is {value!r}; it must be a whole number from {least} to 2147483647")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool | str) or not 0 < value < 1e30:
            raise ModelFormatError(f"llama.{key} is {value!r}; it must be a positive number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ModelFormatError(f"llama.{key} is {value!r}; it must be a string")
        return value
