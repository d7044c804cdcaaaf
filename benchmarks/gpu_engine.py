"""The whole engine on the GPU: many requests at once, memory, loading and ending again and again, the real model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu_checks import PageTables, open_random
from mlc_nb import AsyncMLCEngine, EngineConfig, MLCEngine, registry
from mlc_nb.engine.core import EngineCore
from mlc_nb.engine.model import LoadedModel
from mlc_nb.engine.provider import set_core_provider
from mlc_nb.errors import OutOfMemoryError
from mlc_nb.library import open_bundle
from mlc_nb.registry import unload
from mlc_nb.runtime.cuda_runner import CudaModelRunner
from mlc_nb.runtime.devices import find_cuda_device
from mlc_nb.runtime.sampler import SamplingState
from mlc_nb.runtime.step import SequenceSlice

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from benchmarks.gpu_model import RandomModel

__all__ = ["check_cycles", "check_golden", "check_memory", "check_small", "time_engine"]

PAGE = 16


def time_engine(
    model: RandomModel, tensors: Mapping[str, Any], *, requests: int = 64, prompt: int = 512, answer: int = 128
) -> dict[str, Any]:
    """Tokens per second of `AsyncMLCEngine` with many requests at once, against the same steps without an engine.

    ``decode share`` is the rate while all requests decode (from the last first token to the first end), over the rate
    of the bare steps at the same contexts.
    """
    bare = _bare_rate(model, tensors, requests, prompt, answer)
    before = used_memory()
    core = _core(model, tensors, requests, prompt + answer)
    set_core_provider(lambda *_: core)
    try:
        arrivals, seconds = asyncio.run(_ask(model, requests, prompt, answer))
        metrics = core.metrics()
        measured = core.memory().total
        taken = used_memory() - before
    finally:
        core.terminate()
        set_core_provider(lambda *request: registry._registry.acquire(*request))
    first = max(times[0] for times in arrivals)
    last = min(times[-1] for times in arrivals)
    between = sum(sum(first < moment <= last for moment in times) for times in arrivals)
    # Negative where the first answer ends before the last prompt is read.
    rate = between / (last - first)
    return {
        "model": model.label,
        "requests": requests,
        "bare decode token/s": round(bare, 1),
        "engine decode token/s": round(rate, 1),
        "decode share": round(rate / bare, 4),
        "beside the step ms": round(1000 * requests * (1 / rate - 1 / bare), 3) if rate > 0 else None,
        "all, prompts included token/s": round(requests * answer / seconds, 1),
        "seconds": round(seconds, 3),
        "in steps s": round(metrics.decode_time_s + metrics.prefill_time_s, 3),
        "memory table / nvidia-smi": round(measured / taken, 4),
    }


async def _ask(model: RandomModel, requests: int, prompt: int, answer: int) -> tuple[list[list[float]], float]:
    """Moments at which each request's tokens came, and the seconds of all of it."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(300, model.sizes.vocab, prompt).tolist() for _ in range(requests)]
    engine = AsyncMLCEngine("random", mode="server")

    async def run(ids: list[int], tokens: int) -> list[float]:
        stream = await engine.completions.create(prompt=ids, max_tokens=tokens, temperature=0, stream=True)
        return [time.perf_counter() async for _ in stream]

    await asyncio.gather(*(run(ids[:300], 8) for ids in prompts))
    started = time.perf_counter()
    arrivals = await asyncio.gather(*(run(ids, answer) for ids in prompts))
    return list(arrivals), time.perf_counter() - started


def _bare_rate(model: RandomModel, tensors: Mapping[str, Any], batch: int, prompt: int, answer: int) -> float:
    tables = PageTables(batch, prompt + answer)
    states = [SamplingState(temperature=0) for _ in range(batch)]
    with open_random(model, tensors, num_pages=tables.num_pages, num_sequences=batch) as runner:
        tokens = [1] * batch
        for step in range(-8, answer):
            if step == 0:
                started = time.perf_counter()
            position = prompt + max(step, 0)
            slices = [
                SequenceSlice([token], position, tables.of(row, position + 1), states[row])
                for row, token in enumerate(tokens)
            ]
            tokens = [getattr(result, "token_id", 0) for result in runner.step(slices)]
        return batch * answer / (time.perf_counter() - started)


def _core(model: RandomModel, tensors: Mapping[str, Any], sequences: int, length: int) -> EngineCore:
    device = find_cuda_device("cuda")
    bundle = open_bundle(model.request(device.architecture), progress=False)
    config = EngineConfig(
        mode="server",
        max_num_sequence=sequences,
        max_total_sequence_length=sequences * (length + 2 * PAGE),
        prefix_cache_mode="disable",
    )

    def open_runner() -> CudaModelRunner:
        return CudaModelRunner(
            bundle,
            tensors,
            device,
            num_pages=sequences * (-(-length // PAGE) + 1),
            positions=length + PAGE,
            num_sequences=sequences,
            progress=lambda _: None,
        )

    loaded = LoadedModel(
        model_id="random",
        tokenizer=_tokenizer(model.sizes.vocab),
        chat_template=None,
        stop_token_ids=frozenset(),
        bos_token_id=None,
        add_bos=False,
        context_window_size=length + PAGE,
        vocab_size=model.sizes.vocab,
        open_runner=open_runner,
    )
    return EngineCore(loaded, config)


def _tokenizer(vocab_size: int) -> Any:
    """A byte-level vocabulary of the right size, each token a word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = [*pre_tokenizers.ByteLevel.alphabet(), *(f"Ġword{i}" for i in range(vocab_size))][:vocab_size]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def check_cycles(model: RandomModel, tensors: Mapping[str, Any], cycles: int = 20) -> dict[str, Any]:
    """Load and end an engine again and again; the GPU's memory must end where it began."""
    used = []
    for _ in range(cycles):
        core = _core(model, tensors, 4, 512)
        core.terminate()
        used.append(used_memory())
    return {
        "model": model.label,
        "cycles": cycles,
        "used after first MiB": used[0] >> 20,
        "used after last MiB": used[-1] >> 20,
        "equal": used[0] == used[-1],
    }


def check_memory(model: RandomModel, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Two engines at once, and one that cannot fit: refused before anything is allocated."""
    first, second = (_core(model, tensors, 4, 512) for _ in range(2))
    before = used_memory()
    try:
        _core(model, tensors, 256, 8_000_000)
        refused = "no"
    except OutOfMemoryError as error:
        refused = str(error)
    after = used_memory()
    states = [first.state, second.state]
    first.terminate()
    second.terminate()
    return {"model": model.label, "two engines": states, "refused": refused, "left behind MiB": (after - before) >> 20}


def check_small(model: RandomModel, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """A few steps of every kind, for a memory checker: prefill short and long, decodes with and without graphs."""
    with open_random(model, tensors, num_pages=64, num_sequences=4, positions=1024) as runner:
        state = SamplingState(temperature=0.9, top_p=0.9, seed=1, logprobs=True, top_logprobs=3)
        penalized = SamplingState(temperature=0.8, top_k=40, frequency_penalty=0.5, logit_bias={5: 1.0}, seed=2)
        pages = [list(range(20)), list(range(20, 40))]
        ids = np.random.default_rng(0).integers(0, model.sizes.vocab, 300).tolist()
        picked = runner.step([SequenceSlice(ids, 0, pages[0], state), SequenceSlice(ids[:20], 0, pages[1], penalized)])
        for graphs in (True, False):
            runner.use_graphs = graphs
            for step in range(3):
                picked += runner.step(
                    [
                        SequenceSlice([7], 300 + step, pages[0], state),
                        SequenceSlice([8], 20 + step, pages[1], penalized),
                    ]
                )
    return {"model": model.label, "picked": [getattr(one, "token_id", repr(one)) for one in picked]}


def check_golden(path: Path, golden: Path) -> dict[str, Any]:
    """The real model's greedy answers and teacher-forced choices against those of transformers in float32."""
    from mlc_nb.engine.model import load_model

    wanted = json.loads(golden.read_text(encoding="utf-8"))["prompts"]
    equal = 0
    started = time.perf_counter()
    with MLCEngine(str(path), device="cuda") as engine:
        loaded = time.perf_counter() - started
        for prompt in wanted:
            generated = [i for i in prompt["generated_ids"] if i != 2]
            answer = engine.completions.create(prompt=prompt["prompt_ids"], max_tokens=len(generated), temperature=0)
            equal += answer.choices[0].text == engine.core.model.tokenizer.decode(generated)
        memory = engine.core.memory()
    unload(all=True)
    agree = total = 0
    config = EngineConfig(model=str(path))
    runner = load_model(path, device="cuda", config=config, progress=False).open_runner()
    assert isinstance(runner, CudaModelRunner)
    try:
        for prompt in wanted:
            ids = prompt["prompt_ids"] + prompt["generated_ids"]
            logits = runner.logits_all([SequenceSlice(ids, 0, list(range(-(-len(ids) // PAGE))), None)])
            start = len(prompt["prompt_ids"])
            agree += int((logits[start - 1 : -1].argmax(-1) == np.array(prompt["generated_ids"])).sum())
            total += len(prompt["generated_ids"])
    finally:
        runner.close()
    return {
        "model": path.name,
        "load s": round(loaded, 2),
        "greedy answers equal": f"{equal} of {len(wanted)}",
        "teacher-forced top-1": f"{agree} of {total}",
        "memory MB": round(memory.total / 1e6),
    }


def used_memory() -> int:
    """Bytes of the GPU that nvidia-smi shows as used, by all processes: this is the only one."""
    answer = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(answer.stdout.split()[0]) << 20
