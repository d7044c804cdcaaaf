"""Models of real shapes with random weights made on the GPU, for our runner and for transformers alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_reference import random_matrix
from benchmarks.gpu_steps import MODELS
from mlc_nb.weights.plan import CompileRequest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["DeviceTensor", "RandomModel"]

EPSILON = 1e-5
ROPE_BASE = 500_000.0
CONTEXT = 8192


@dataclass(frozen=True)
class DeviceTensor:
    """A tensor as a file would hold it, on the GPU."""

    block_type: str
    source: Any
    shape: tuple[int, ...]

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        array: npt.NDArray[np.uint8] = self.source.cpu().numpy()
        return array.reshape(self.shape[0] if len(self.shape) == 2 else 1, -1)


class RandomModel:
    """A Llama-like model with random weights.

    Parameters
    ----------
    name
        Of one of `MODELS`.
    block_type
        Of all matrices.
    layers
        Instead of the model's own number.
    """

    def __init__(self, name: str, block_type: str, layers: int | None = None) -> None:
        sizes = MODELS[name]
        self.sizes = sizes if layers is None else replace(sizes, layers=layers)
        self.block_type = block_type
        self.activation_dtype = "bfloat16" if block_type == "BF16" else "float16"
        self.tied = name != "llama-3.1-8b"

    @property
    def label(self) -> str:
        return f"{self.sizes.name}/{self.sizes.layers} {self.block_type}"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the file's tensors, by GGUF's names."""
        s = self.sizes
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (s.vocab, s.hidden),
            "output_norm.weight": (s.hidden,),
        }
        if not self.tied:
            shapes["output.weight"] = (s.vocab, s.hidden)
        for i in range(s.layers):
            shapes |= {
                f"blk.{i}.attn_norm.weight": (s.hidden,),
                f"blk.{i}.ffn_norm.weight": (s.hidden,),
                f"blk.{i}.attn_q.weight": (s.query_heads * s.head_dim, s.hidden),
                f"blk.{i}.attn_k.weight": (s.kv_heads * s.head_dim, s.hidden),
                f"blk.{i}.attn_v.weight": (s.kv_heads * s.head_dim, s.hidden),
                f"blk.{i}.attn_output.weight": (s.hidden, s.query_heads * s.head_dim),
                f"blk.{i}.ffn_gate.weight": (s.inner, s.hidden),
                f"blk.{i}.ffn_up.weight": (s.inner, s.hidden),
                f"blk.{i}.ffn_down.weight": (s.hidden, s.inner),
            }
        return shapes

    def request(self, architecture: str) -> CompileRequest:
        s = self.sizes
        return CompileRequest(
            architecture="llama",
            hyperparameters={
                "block_count": s.layers,
                "context_length": CONTEXT,
                "embedding_length": s.hidden,
                "feed_forward_length": s.inner,
                "attention.head_count": s.query_heads,
                "attention.head_count_kv": s.kv_heads,
                "attention.key_length": s.head_dim,
                "rope.dimension_count": s.head_dim,
                "rope.freq_base": ROPE_BASE,
                "attention.layer_norm_rms_epsilon": EPSILON,
            },
            tensors={
                name: (self.block_type if len(shape) == 2 else "F32", shape) for name, shape in self.shapes().items()
            },
            isa=architecture,
            activation_dtype=self.activation_dtype,
        )

    def make(self, torch: Any, reference: Any = None) -> dict[str, DeviceTensor]:
        """Make the weights, and write the same values to a transformers model where one is given."""
        targets = dict(reference.named_parameters()) if reference is not None else {}
        tensors: dict[str, DeviceTensor] = {}
        for name, shape in self.shapes().items():
            if len(shape) == 1:
                values = 1 + 0.1 * torch.randn(shape, device="cuda")
                tensors[name] = DeviceTensor("F32", values.view(torch.uint8), shape)
            else:
                made = random_matrix(torch, self.block_type, *shape)
                values = made.values
                tensors[name] = DeviceTensor(self.block_type, made.source, shape)
            if targets:
                target = targets[self._reference_name(name)]
                with torch.no_grad():
                    target.copy_(self._halves(name, values).to(target.dtype))
            del values
        return tensors

    def reference(self, torch: Any, dtype: Any) -> Any:
        """A transformers model of the same shapes, its weights not yet written."""
        from transformers import LlamaConfig, LlamaForCausalLM

        s = self.sizes
        config = LlamaConfig(
            vocab_size=s.vocab,
            hidden_size=s.hidden,
            intermediate_size=s.inner,
            num_hidden_layers=s.layers,
            num_attention_heads=s.query_heads,
            num_key_value_heads=s.kv_heads,
            head_dim=s.head_dim,
            max_position_embeddings=CONTEXT,
            rms_norm_eps=EPSILON,
            rope_theta=ROPE_BASE,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
            tie_word_embeddings=self.tied,
            attn_implementation="sdpa",
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("cuda"):
                model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
        return model.eval()

    def _halves(self, name: str, values: Any) -> Any:
        """GGUF has the rows that rotate together side by side; transformers has them half a head apart."""
        kind = name.rsplit(".", 2)[-2]
        if kind not in ("attn_q", "attn_k"):
            return values
        heads = self.sizes.query_heads if kind == "attn_q" else self.sizes.kv_heads
        half = self.sizes.head_dim // 2
        return values.view(heads, half, 2, -1).transpose(1, 2).reshape(values.shape)

    @staticmethod
    def _reference_name(name: str) -> str:
        outer = {
            "token_embd.weight": "model.embed_tokens.weight",
            "output_norm.weight": "model.norm.weight",
            "output.weight": "lm_head.weight",
        }
        if name in outer:
            return outer[name]
        _, layer, kind, _ = name.split(".")
        inner = {
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        }
        return f"model.layers.{layer}.{inner[kind]}.weight"
