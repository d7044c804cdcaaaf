"""How fast steps on the GPU are, and what transformers takes for the same."""

from __future__ import annotations

import functools
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu_checks import PageTables, open_random
from mlc_nb.runtime.sampler import SamplingState
from mlc_nb.runtime.step import SequenceSlice

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.gpu_model import RandomModel
    from mlc_nb.runtime.cuda_runner import CudaModelRunner

__all__ = ["time_ours", "time_theirs"]

CONTEXT = 512
STEPS = 24
PROMPTS = (512, 1000, 2048)


def time_ours(
    model: RandomModel, tensors: Mapping[str, Any], batches: Sequence[int], prompts: Sequence[int] = PROMPTS
) -> dict[str, Any]:
    """Tokens per second of decodes at a context of 512 tokens, seconds of prefills, and the memory table's total."""
    found: dict[str, Any] = {"model": model.label}
    most = max(batches)
    tables = PageTables(most, CONTEXT + STEPS + 8)
    pages = max(tables.num_pages, -(-max(prompts) // 16))
    started = time.perf_counter()
    with open_random(model, tensors, num_pages=pages, num_sequences=most) as runner:
        found["load s"] = round(time.perf_counter() - started, 2)
        for batch in batches:
            found[f"decode {batch}"] = _decode_rate(runner, tables, batch)
        for batch in (batches[0], most):
            found[f"decode {batch} sampled"] = _decode_rate(runner, tables, batch, temperature=0.7, top_p=0.95)
        runner.use_graphs = False
        for batch in (batches[0], most):
            found[f"decode {batch} without graphs"] = _decode_rate(runner, tables, batch)
        runner.use_graphs = True
        for tokens in prompts:
            found[f"prefill {tokens} ms"] = _prefill_milliseconds(runner, tokens)
        found["memory table GB"] = round(runner.memory().total / 1e9, 3)
    return found


def _decode_rate(
    runner: CudaModelRunner, tables: PageTables, batch: int, *, temperature: float = 0.0, top_p: float = 1.0
) -> float:
    """Tokens per second of decodes, results waited for after each step; the context is whatever was there."""
    states = [SamplingState(temperature=temperature, top_p=top_p) for _ in range(batch)]
    seconds = []
    for step in range(STEPS):
        position = CONTEXT + step
        slices = [
            SequenceSlice([step + row], position, tables.of(row, position + 1), states[row]) for row in range(batch)
        ]
        started = time.perf_counter()
        runner.step(slices)
        seconds.append(time.perf_counter() - started)
    return round(batch / statistics.median(seconds[4:]), 1)


def _prefill_milliseconds(runner: CudaModelRunner, tokens: int) -> float:
    """Milliseconds from a prompt's ids to its first sampled token."""
    ids = np.random.default_rng(0).integers(0, runner.metadata.vocab_size, tokens).tolist()
    pages = list(range(-(-tokens // 16)))
    state = SamplingState(temperature=0)
    seconds = []
    for _ in range(8):
        started = time.perf_counter()
        runner.step([SequenceSlice(ids, 0, pages, state)])
        seconds.append(time.perf_counter() - started)
    return round(1000 * statistics.median(seconds[2:]), 2)


def time_theirs(torch: Any, model: RandomModel, batches: Sequence[int]) -> dict[str, Any]:
    """The same of transformers: eager, and with a static cache and CUDA graphs."""
    reference = model.reference(torch, getattr(torch, model.activation_dtype))
    found: dict[str, Any] = {"model": f"transformers {model.label}"}
    for batch in batches:
        found[f"decode {batch} eager"] = round(batch / _seconds(torch, _eager_step(torch, reference, batch)), 1)
        try:
            found[f"decode {batch} graph"] = round(batch / _seconds(torch, _graph_step(torch, reference, batch)), 1)
        except Exception as error:  # another version may capture no longer
            found[f"decode {batch} graph"] = f"{type(error).__name__}: {str(error)[:80]}"
    for tokens in PROMPTS:
        ids = torch.randint(0, model.sizes.vocab, (1, tokens), device="cuda")
        prefill = functools.partial(reference, ids, use_cache=True, logits_to_keep=1)
        found[f"prefill {tokens} ms"] = round(1000 * _seconds(torch, prefill), 2)
    del reference
    torch.cuda.empty_cache()
    return found


def _eager_step(torch: Any, reference: Any, batch: int) -> Callable[[], None]:
    from transformers import DynamicCache

    ids = torch.randint(0, 1000, (batch, CONTEXT), device="cuda")
    cache = DynamicCache()
    reference(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token = ids[:, :1]

    def step() -> None:
        reference(token, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1)

    return step


def _graph_step(torch: Any, reference: Any, batch: int) -> Callable[[], None]:
    from transformers import StaticCache

    cache = StaticCache(config=reference.config, max_cache_len=CONTEXT + 64)
    ids = torch.randint(0, 1000, (batch, CONTEXT), device="cuda")
    reference(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token = ids[:, :1].contiguous()
    position = torch.tensor([CONTEXT], device="cuda")
    mask = torch.zeros((batch, 1, 1, CONTEXT + 64), device="cuda", dtype=reference.dtype)
    mask[..., CONTEXT + 1 :] = torch.finfo(reference.dtype).min

    def forward() -> Any:
        return (
            reference(
                token,
                position_ids=position.expand(batch, 1),
                cache_position=position,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
            )
            .logits[:, -1]
            .argmax(-1)
        )

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    replay: Callable[[], None] = graph.replay
    return replay


def _seconds(torch: Any, call: Callable[[], Any]) -> float:
    """Median seconds of a call whose result is waited for."""
    seconds = []
    with torch.no_grad():
        for _ in range(12):
            torch.cuda.synchronize()
            started = time.perf_counter()
            call()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[3:])
