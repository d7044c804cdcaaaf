"""Whole tiny models, from the GGUF file to logits, against an independent float64 computation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mlc_nb.engine.model import compile_request
from mlc_nb.library import open_bundle
from mlc_nb.protocol.engine_config import EngineConfig
from mlc_nb.runtime.isa import runnable_isas
from mlc_nb.runtime.model_runner import CpuModelRunner
from mlc_nb.runtime.parameters import load_parameters, rope_tables
from mlc_nb.runtime.step import SequenceSlice
from mlc_nb.weights.gguf_file import GGUFFile
from tests.models.tiny_llama import TinyLlama, reference_logits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mlc_nb.library import LibraryBundle

MODELS = {
    "F32 and BF16, many heads, linear scaling": TinyLlama(
        "F32",
        {"ffn_gate": "BF16", "ffn_up": "BF16", "token_embd": "BF16"},
        norm_type="BF16",
        vocab=64,
        kv_heads=4,
        extra={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    ),
    "F16, one KV head, factors": TinyLlama("F16", norm_type="F16", kv_heads=1, tied=False, rope_factors=True),
    "Q4_0, head size of its own, older scaling key": TinyLlama(
        "Q4_0", tied=False, head_dim=24, extra={"llama.rope.scale_linear": 2.0}
    ),
    "Q4_1 and Q8_0, groups of three, scaling switched off": TinyLlama(
        "Q4_1",
        {"token_embd": "Q8_0", "ffn_down": "Q8_0"},
        heads=3,
        kv_heads=1,
        head_dim=32,
        hidden=96,
        extra={"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0},
    ),
    "every type": TinyLlama(
        "Q4_1",
        {
            "attn_q": "Q4_0",
            "attn_k": "Q8_0",
            "attn_v": "F16",
            "ffn_gate": "BF16",
            "ffn_down": "F32",
            "token_embd": "Q4_1",
            "output": "Q8_0",
        },
        tied=False,
        rope_factors=True,
        base=500000.0,
    ),
}
ACTIVATIONS = {"float32": 1e-4, "int16": 1e-3, "int8": 0.1}
"""Activation types, and by how much of the largest logit a logit may be off."""

# Every model with float32 activations; the mixed one, whose activations take every form at once, with all. The level is
# one that compiles fast: kernels have their own tests at every level, and the default model runs at this machine's.
FAST_LEVEL = "avx2" if "avx2" in runnable_isas() else runnable_isas()[0]
CASES = [(name, "float32") for name in MODELS] + [("every type", "int16"), ("every type", "int8")]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, LibraryBundle]]:
    """Every case's file and library, compiled two at a time."""
    folder = tmp_path_factory.mktemp("tiny")

    def make(case: tuple[str, str]) -> tuple[Path, LibraryBundle]:
        name, activations = case
        path = MODELS[name].write(folder / f"{name} {activations}.gguf")
        with GGUFFile.open(path) as file:
            request = compile_request(file, EngineConfig(activation_dtype=activations), FAST_LEVEL)
        return path, open_bundle(request, progress=False)

    with pytest.MonkeyPatch.context() as environment, ThreadPoolExecutor(2) as pool:
        environment.setenv("MLC_NB_HOME", str(folder / "cache"))
        return dict(zip(CASES, pool.map(make, CASES), strict=True))


@contextmanager
def runner_of(path: Path, bundle: LibraryBundle) -> Iterator[CpuModelRunner]:
    with GGUFFile.open(path) as file:
        parameters = load_parameters(bundle.metadata, file.tensors, lambda _: None)
        rope = rope_tables(bundle.metadata, file.tensors, bundle.metadata.context_window_size)
    runner = CpuModelRunner(bundle, parameters, rope, num_pages=40, num_threads=1)
    try:
        yield runner
    finally:
        runner.close()


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_logits(compiled: dict[tuple[str, str], tuple[Path, LibraryBundle]], case: tuple[str, str]) -> None:
    path, bundle = compiled[case]
    vocab = MODELS[case[0]].vocab
    token_ids = np.random.default_rng(0).integers(0, vocab, 300).tolist()
    token_ids[:4] = [0, vocab - 1, 15, 16]
    wanted = reference_logits(path, token_ids)
    pages = list(np.random.default_rng(1).permutation(40)[:19])
    with runner_of(path, bundle) as runner:
        prefill = runner.logits_all([SequenceSlice(token_ids[:290], 0, pages, None)])
        decoded = [
            runner.logits([SequenceSlice([token], 290 + i, pages, None)]) for i, token in enumerate(token_ids[290:])
        ]
    logits = np.concatenate([prefill, *decoded])
    assert logits.shape == wanted.shape == (300, vocab)
    assert np.abs(logits - wanted).max() <= ACTIVATIONS[case[1]] * np.abs(wanted).max()
