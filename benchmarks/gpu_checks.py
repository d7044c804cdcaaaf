"""Is a whole step on the GPU right: logits and tokens against transformers, with and without CUDA graphs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from mlc_nb.library import open_bundle
from mlc_nb.runtime.cuda_runner import CudaModelRunner
from mlc_nb.runtime.devices import find_cuda_device
from mlc_nb.runtime.sampler import SamplingState
from mlc_nb.runtime.step import SampledToken, SequenceSlice

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from benchmarks.gpu_model import RandomModel

__all__ = ["PageTables", "check_runs_ahead", "check_steps", "open_random"]

PAGE = 16
DECODES = 6


class PageTables:
    """Pages of sequences of one length, in a random order: a wrong index shows."""

    def __init__(self, batch: int, length: int, seed: int = 0) -> None:
        each = -(-length // PAGE)
        self.num_pages = batch * each
        order: list[int] = np.random.default_rng(seed).permutation(self.num_pages).tolist()
        self._tables = [order[i * each : (i + 1) * each] for i in range(batch)]

    def of(self, sequence: int, length: int) -> list[int]:
        return self._tables[sequence][: -(-length // PAGE)]


@contextmanager
def open_random(
    model: RandomModel,
    tensors: Mapping[str, Any],
    *,
    num_pages: int,
    num_sequences: int,
    positions: int = 4096,
    use_graphs: bool = True,
) -> Iterator[CudaModelRunner]:
    device = find_cuda_device("cuda")
    bundle = open_bundle(model.request(device.architecture), progress=False)
    runner = CudaModelRunner(
        bundle,
        tensors,
        device,
        num_pages=num_pages,
        positions=positions,
        num_sequences=num_sequences,
        progress=lambda _: None,
        use_graphs=use_graphs,
    )
    try:
        yield runner
    finally:
        runner.close()


def check_steps(torch: Any, model: RandomModel, batches: Sequence[int]) -> dict[str, Any]:
    """Compare prefill logits and the log probabilities of decodes with transformers in float32 and in 16 bits.

    Errors are the largest difference of a log probability; ``theirs`` is what transformers in 16 bits differs from
    itself in float32.
    """
    exact = model.reference(torch, torch.float32)
    tensors = model.make(torch, exact)
    generator = np.random.default_rng(1)
    most, length = max(batches), 200
    ids = generator.integers(0, model.sizes.vocab, (most, length)).astype(np.int64)
    prompts = generator.integers(1, length - DECODES, most)
    prompts[0], prompts[-1] = length - DECODES - 1, 1
    dtype = getattr(torch, model.activation_dtype)
    wanted = _reference_logprobs(torch, exact, ids, prompts)
    theirs = _reference_logprobs(torch, exact.to(dtype), ids, prompts)
    del exact
    torch.cuda.empty_cache()
    found: dict[str, Any] = {
        "model": model.label,
        "theirs": _largest(theirs - wanted),
        "top1_theirs": _agree(theirs, wanted),
    }
    tables = PageTables(most, length)
    for graphs in (True, False):
        with open_random(model, tensors, num_pages=tables.num_pages, num_sequences=most, use_graphs=graphs) as runner:
            for batch in batches:
                ours = _our_logprobs(runner, ids[:batch], prompts[:batch], tables)
                name = f"{'graphs' if graphs else 'launches'} {batch}"
                found[name] = _largest(ours[0] - wanted[:batch, 0])
                found[f"{name} top1"] = _decode_errors(ours[1], wanted[:batch])
    return found


def check_runs_ahead(
    model: RandomModel, tensors: Mapping[str, Any], batch: int = 16, steps: int = 48
) -> dict[str, Any]:
    """Queue many steps without waiting for any: logits must be those of steps that were waited for, bit by bit.

    Each step has other page tables than the one before, so that tables which are overwritten too early, or read too
    late, give other keys and values, or an illegal access.
    """
    ids = np.random.default_rng(2).integers(0, model.sizes.vocab, (batch, steps)).astype(np.int64)
    logits = []
    for waits in (True, False):
        generator = np.random.default_rng(3)
        tables = PageTables(batch, steps)
        with open_random(model, tensors, num_pages=tables.num_pages, num_sequences=batch) as runner:
            for step in range(steps):
                order = generator.permutation(batch)
                slices = [
                    SequenceSlice([int(ids[i, step])], step, tables.of(int(i), step + 1), None)
                    for i in (order if step < steps - 1 else range(batch))
                ]
                for pieces in runner._calls(slices, [1] * batch):
                    runner._queue(pieces, [None] * batch)
                if waits:
                    runner._context.synchronize()
            runner._context.synchronize()
            logits.append(runner._copy_logits(0, batch))
    return {"model": model.label, "steps ahead": steps - 1, "equal": bool((logits[0] == logits[1]).all())}


def _reference_logprobs(torch: Any, reference: Any, ids: npt.NDArray[Any], prompts: npt.NDArray[Any]) -> Any:
    """float32 [sequences, 1 + DECODES, vocab] on the host: after the prompt and each of the next tokens."""
    found = []
    with torch.no_grad():
        for row, prompt in zip(ids, prompts, strict=True):
            taken = torch.from_numpy(row[None, : prompt + DECODES]).cuda()
            logits = reference(taken).logits[0, prompt - 1 :].float()
            found.append(torch.log_softmax(logits, -1).cpu().numpy())
    return np.stack(found)


def _our_logprobs(
    runner: CudaModelRunner, ids: npt.NDArray[Any], prompts: npt.NDArray[Any], tables: PageTables
) -> tuple[npt.NDArray[np.float32], list[list[SampledToken]]]:
    """Prefill log probabilities [sequences, vocab], and the picks of each decode."""
    states = [SamplingState(temperature=0, logprobs=True, top_logprobs=5) for _ in prompts]
    prefill = [
        SequenceSlice(row[:prompt].tolist(), 0, tables.of(i, int(prompt)), None)
        for i, (row, prompt) in enumerate(zip(ids, prompts, strict=True))
    ]
    logits = runner.logits(prefill)
    largest = logits.max(-1, keepdims=True)
    logprobs = logits - largest - np.log(np.exp(logits - largest).sum(-1, keepdims=True))
    picks = []
    for step in range(DECODES):
        slices = [
            SequenceSlice([int(row[p + step])], int(p) + step, tables.of(i, int(p) + step + 1), states[i])
            for i, (row, p) in enumerate(zip(ids, prompts, strict=True))
        ]
        picked = runner.step(slices)
        picks.append([_token(one) for one in picked])
    return logprobs, picks


def _token(result: Any) -> SampledToken:
    if not isinstance(result, SampledToken):
        raise AssertionError(f"no token: {result!r}")
    return result


def _decode_errors(picks: list[list[SampledToken]], wanted: npt.NDArray[np.float32]) -> list[float]:
    """Share of picks that the reference agrees with, and the largest error of a log probability of the top five."""
    agree, total, worst = 0, 0, 0.0
    for step, tokens in enumerate(picks):
        for row, token in enumerate(tokens):
            reference = wanted[row, 1 + step]
            agree += token.token_id == int(reference.argmax())
            total += 1
            worst = max([worst, *(abs(logprob - float(reference[i])) for i, logprob in token.top_logprobs)])
    return [round(agree / total, 4), round(worst, 5)]


def _agree(found: npt.NDArray[np.float32], wanted: npt.NDArray[np.float32]) -> float:
    return round(float((found.argmax(-1) == wanted.argmax(-1)).mean()), 4)


def _largest(difference: npt.NDArray[np.float32]) -> float:
    return round(float(np.abs(difference).max()), 5)
