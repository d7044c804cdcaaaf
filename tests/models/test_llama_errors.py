"""Files that make no Llama model get one error that names what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mlc_nb.engine.model import compile_request, load_model
from mlc_nb.errors import ModelFormatError
from mlc_nb.models.llama import build
from mlc_nb.models.registry import ARCHITECTURES, architecture_module
from mlc_nb.protocol.engine_config import EngineConfig
from mlc_nb.weights.gguf_file import GGUFFile
from mlc_nb.weights.plan import CompileRequest
from tests.models.tiny_llama import TinyLlama

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def request_of(path: Path) -> CompileRequest:
    with GGUFFile.open(path) as file:
        return compile_request(file, EngineConfig())


def without(key: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        (metadata if key in metadata else tensors).pop(key)

    return change


def metadata(**values: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """Set keys; ``__`` stands for a dot."""

    def change(metadata: dict[str, Any], _: dict[str, Any]) -> None:
        metadata.update({f"llama.{key.replace('__', '.')}": value for key, value in values.items()})

    return change


def tensor(
    name: str, shape: tuple[int, ...], block_type: str = "F32"
) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(_: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors[name] = (block_type, np.zeros(shape, np.float32))

    return change


REFUSALS: list[tuple[Callable[[dict[str, Any], dict[str, Any]], None], str]] = [
    (metadata(expert_count=8), r"mixture of experts \(llama.expert_count\)"),
    (metadata(expert_count=-1.5), r"llama.expert_count is -1.5; it must be a whole number from 0"),
    (metadata(attention__head_count=0), r"llama.attention.head_count is 0; .* from 1"),
    (metadata(attention__head_count="four"), r"llama.attention.head_count is 'four'"),
    (metadata(attention__head_count=True), r"llama.attention.head_count is True"),
    (metadata(attention__head_count_kv=3), r"impossible attention sizes: 4 heads, 3 KV heads, head size 16"),
    (
        metadata(attention__head_count=8, embedding_length=32, attention__head_count_kv=8),
        r"head size 4; .* multiple of 8",
    ),
    (metadata(rope__dimension_count=8), r"rotary embeddings over 8 of 16 dimensions"),
    (metadata(rope__scaling__type="yarn"), r"rotary scaling of type 'yarn' \(llama.rope.scaling.type\)"),
    (metadata(rope__scaling__type=7), r"llama.rope.scaling.type is 7; it must be a string"),
    (metadata(rope__scaling__factor=0.0), r"llama.rope.scaling.factor is 0.0; it must be a positive number"),
    (metadata(rope__freq_base=float("nan")), r"llama.rope.freq_base is nan"),
    (metadata(rope__freq_base=float("inf")), r"llama.rope.freq_base is inf"),
    (metadata(attention__layer_norm_rms_epsilon=-1e-5), r"rms_epsilon is -1e-05; it must be a positive number"),
    (metadata(block_count=0), r"llama.block_count is 0"),
    (metadata(context_length=0), r"llama.context_length is 0"),
    (metadata(context_length=1), r"llama.context_length is 1; it must be a whole number from 16"),
    (metadata(feed_forward_length=0), r"llama.feed_forward_length is 0"),
    (metadata(embedding_length=0), r"llama.embedding_length is 0"),
    (metadata(block_count=3), r"no tensor 'blk.2.attn_norm.weight'"),
    (metadata(block_count=1), r"tensors that this version does not know .*\(blk.1.attn_k.weight, "),
    (metadata(feed_forward_length=128), r"'blk.0.ffn_gate.weight' has shape \[96, 64\], .* call for \[128, 64\]"),
    (metadata(feed_forward_length=100), r"blk.0.ffn_gate has 100 rows; .* multiple of 16"),
    (without("llama.block_count"), r"lacks llama.block_count"),
    (without("llama.attention.layer_norm_rms_epsilon"), r"lacks llama.attention.layer_norm_rms_epsilon"),
    (without("token_embd.weight"), r"no tensor 'token_embd.weight'"),
    (without("output_norm.weight"), r"no tensor 'output_norm.weight'"),
    (without("blk.1.ffn_down.weight"), r"no tensor 'blk.1.ffn_down.weight'"),
    (tensor("blk.0.attn_q.bias", (64,)), r"does not know for the Llama family \(blk.0.attn_q.bias\)"),
    (tensor("token_embd.weight", (50, 32)), r"'token_embd.weight' has shape \[50, 32\], .* call for \[50, 64\]"),
    (tensor("token_embd.weight", (64,)), r"'token_embd.weight' has shape \[64\]"),
    (tensor("output.weight", (48, 64)), r"'output.weight' has shape \[48, 64\], .* call for \[50, 64\]"),
    (tensor("output_norm.weight", (32,)), r"'output_norm.weight' is F32 of shape \[32\]; .* needs 64 unquantized"),
    (tensor("blk.0.attn_norm.weight", (64,), "Q8_0"), r"'blk.0.attn_norm.weight' is Q8_0"),
    (tensor("rope_freqs.weight", (16,)), r"'rope_freqs.weight' is F32 of shape \[16\]; .* needs 8 unquantized"),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_refusals(tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None], message: str) -> None:
    path = TinyLlama().write(tmp_path / "model.gguf", change=change)
    with pytest.raises(ModelFormatError, match=message):
        build(request_of(path))


def test_numbers_that_make_no_sense_reach_the_compiler_as_they_are(tmp_path: Path) -> None:
    path = TinyLlama().write(
        tmp_path / "model.gguf", change=metadata(rope__freq_base=float("nan"), other=float("-inf"))
    )
    request = request_of(path)
    travelled = CompileRequest.model_validate_json(request.model_dump_json())
    assert repr(travelled) == repr(request)


def test_the_compiler_s_refusal_is_the_caller_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sentence from `load_model`, through the child process; nothing stays in the cache."""
    monkeypatch.setenv("MLC_NB_HOME", str(tmp_path / "cache"))
    path = TinyLlama().write(tmp_path / "model.gguf", change=metadata(rope__freq_base=float("nan")))
    with pytest.raises(ModelFormatError, match=r"^llama.rope.freq_base is nan; it must be a positive number$"):
        load_model(path, config=EngineConfig(), progress=False)
    assert not list((tmp_path / "cache").rglob("model.*"))


def test_architectures(tmp_path: Path) -> None:
    assert architecture_module("llama") == ARCHITECTURES["llama"]
    path = TinyLlama().write(
        tmp_path / "model.gguf", change=lambda data, _: data.update({"general.architecture": "mamba"})
    )
    with pytest.raises(ModelFormatError, match=r"architecture is 'mamba'; this version can run: .*llama"):
        load_model(path, config=EngineConfig(), progress=False)


def test_plan_names_every_parameter_once(tmp_path: Path) -> None:
    model = TinyLlama("Q4_1", {"attn_q": "Q8_0", "ffn_up": "F16"}, tied=False)
    module, plan = build(request_of(model.write(tmp_path / "model.gguf")))
    places = [v.parameter for v in plan.vectors] + [place for m in plan.matrices for place in m.parameters.values()]
    assert sorted(places) == list(range(len(list(module.named_parameters()))))
    sources = [source.tensor for m in plan.matrices for source in m.sources] + [v.tensor for v in plan.vectors]
    assert sorted(sources) == sorted(model.shapes())
    assert plan.padded_vocab_size == 64
    assert plan.vocab_size == 50
