"""Random Llama models of some hundred kilobytes as real GGUF files, and their logits in float64."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "token_embd", "output")


@dataclass(frozen=True)
class TinyLlama:
    """What a tiny model looks like; ``types`` gives the block type of a matrix by name, ``default_type`` the rest."""

    default_type: str = "F32"
    types: Mapping[str, str] = field(default_factory=dict)
    norm_type: str = "F32"
    tied: bool = True
    layers: int = 2
    hidden: int = 64
    inner: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 50
    context: int = 512
    base: float = 10000.0
    rope_factors: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the file in numpy's order."""
        attention, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"token_embd": (self.vocab, self.hidden), "output_norm": (self.hidden,)}
        if not self.tied:
            shapes["output"] = (self.vocab, self.hidden)
        for layer in range(self.layers):
            shapes |= {
                f"blk.{layer}.{name}": shape
                for name, shape in {
                    "attn_norm": (self.hidden,),
                    "attn_q": (attention, self.hidden),
                    "attn_k": (keys, self.hidden),
                    "attn_v": (keys, self.hidden),
                    "attn_output": (self.hidden, attention),
                    "ffn_norm": (self.hidden,),
                    "ffn_gate": (self.inner, self.hidden),
                    "ffn_up": (self.inner, self.hidden),
                    "ffn_down": (self.hidden, self.inner),
                }.items()
            }
        if self.rope_factors:
            shapes["rope_freqs"] = (self.head_dim // 2,)
        return {f"{name}.weight": shape for name, shape in shapes.items()}

    def block_type(self, tensor: str) -> str:
        """Type of a tensor's blocks."""
        name = tensor.removesuffix(".weight").rpartition(".")[2]
        if name == "rope_freqs":
            return "F32"
        return self.types.get(name, self.default_type) if name in MATRICES else self.norm_type

    def write(self, path: Path, *, change: Callable[[dict[str, Any], dict[str, Any]], None] | None = None) -> Path:
        """Write the file; ``change`` may alter its metadata and its tensors (name -> (block type, values)) before."""
        rng = np.random.default_rng(sum(map(ord, self.default_type)))
        metadata: dict[str, Any] = {
            "llama.block_count": self.layers,
            "llama.context_length": self.context,
            "llama.embedding_length": self.hidden,
            "llama.feed_forward_length": self.inner,
            "llama.attention.head_count": self.heads,
            "llama.attention.head_count_kv": self.kv_heads,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.freq_base": self.base,
        }
        if self.head_dim * self.heads != self.hidden:
            metadata |= {"llama.attention.key_length": self.head_dim, "llama.attention.value_length": self.head_dim}
        metadata |= self.extra
        tensors: dict[str, Any] = {}
        for name, shape in self.shapes().items():
            if name == "rope_freqs.weight":
                values = np.linspace(1, 8, shape[0])
            elif len(shape) == 1:
                values = 1 + 0.2 * rng.standard_normal(shape)
            else:
                values = rng.standard_normal(shape) * (1.0 if "token_embd" in name else 1.5 * shape[1] ** -0.5)
            tensors[name] = (self.block_type(name), values.astype(np.float32))
        if change is not None:
            change(metadata, tensors)
        write_gguf(path, metadata, tensors, self.vocab)
        return path


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any], vocab: int) -> None:
    """Write a GGUF file of architecture llama with a tokenizer of hardly more than characters."""
    writer = gguf.GGUFWriter(path, str(metadata.get("general.architecture", "llama")))
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float64(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif key != "general.architecture":
            writer.add_string(key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    characters = [chr(code) for code in range(ord("!"), ord("!") + vocab - 2)]
    writer.add_token_list([*characters, characters[0] + characters[1], "<|im_end|>"])
    writer.add_token_types([1] * (vocab - 1) + [3])
    writer.add_token_merges([f"{characters[0]} {characters[1]}"])
    writer.add_eos_token_id(vocab - 1)
    for name, (block_type, values) in tensors.items():
        kind = gguf.GGMLQuantizationType[block_type]
        if block_type == "F32":
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def reference_logits(path: Path, token_ids: Sequence[int]) -> npt.NDArray[np.float64]:
    """Logits after every token of a sequence, computed in float64 from the file as the gguf package reads it.

    Rotary embeddings turn neighbouring pairs of rows, which is the order in which the file keeps them.
    """
    reader = gguf.GGUFReader(path)
    weights = {
        tensor.name: np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float64)
        for tensor in reader.tensors
    }
    values: dict[str, Any] = defaultdict(lambda: None)
    values |= {name: f.contents() for name, f in reader.fields.items()}
    heads, kv_heads = values["llama.attention.head_count"], values["llama.attention.head_count_kv"]
    epsilon = values["llama.attention.layer_norm_rms_epsilon"]
    scale = values["llama.rope.scaling.factor"] or values["llama.rope.scale_linear"] or 1.0
    if values["llama.rope.scaling.type"] == "none":
        scale = 1.0
    count = len(token_ids)

    def norm(x: npt.NDArray[np.float64], name: str) -> npt.NDArray[np.float64]:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weights[name]

    dim = weights["blk.0.attn_q.weight"].shape[0] // heads
    frequencies = values["llama.rope.freq_base"] ** (-np.arange(0, dim, 2) / dim) / scale
    frequencies = frequencies / weights.get("rope_freqs.weight", np.ones(dim // 2))
    turn = np.exp(1j * np.arange(count)[:, None] * frequencies)

    def rotated(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * turn[:, None]
        return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)

    x = weights["token_embd.weight"][list(token_ids)]
    visible = np.tril(np.ones((count, count), bool))
    for layer in range(values["llama.block_count"]):
        part = {
            name.removeprefix(f"blk.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"blk.{layer}.")
        }
        normed = norm(x, f"blk.{layer}.attn_norm.weight")
        query = rotated((normed @ part["attn_q.weight"].T).reshape(count, heads, dim))
        key = rotated((normed @ part["attn_k.weight"].T).reshape(count, kv_heads, dim))
        value = (normed @ part["attn_v.weight"].T).reshape(count, kv_heads, dim)
        key, value = (np.repeat(array, heads // kv_heads, axis=1) for array in (key, value))
        scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(dim)
        scores = np.exp(np.where(visible, scores, -np.inf) - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", scores, value).reshape(count, heads * dim)
        x = x + attended @ part["attn_output.weight"].T
        normed = norm(x, f"blk.{layer}.ffn_norm.weight")
        gate = normed @ part["ffn_gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ part["ffn_up.weight"].T)) @ part["ffn_down.weight"].T
    head = weights.get("output.weight", weights["token_embd.weight"])
    logits: npt.NDArray[np.float64] = norm(x, "output_norm.weight") @ head.T
    return logits
