"""What a step costs besides the model: scheduler, assembling of arguments, text, streams.

python -m benchmarks.scheduler_overhead --batch 32

The real engine runs on the real model's library and files; only the call of the compiled step is replaced, by a pause
that lets the readers run as the native call does. The time between two such pauses is all that Python does for a step,
on the clock and as processor time of the engine thread, which other work on the machine disturbs less. Sampling is
numpy's work over whole vocabularies and is listed by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
from dataclasses import replace
from statistics import median, quantiles
from time import perf_counter, sleep, thread_time
from typing import TYPE_CHECKING, Any

from benchmarks.machine import write_result
from mlc_nb.engine.core import EngineCore
from mlc_nb.engine.generation import GenerationRequest
from mlc_nb.engine.model import load_model
from mlc_nb.protocol.engine_config import EngineConfig
from mlc_nb.runtime.sampler import SamplingState

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from mlc_nb.engine.stream import RequestStream
    from mlc_nb.runtime.step import ModelRunner, SampledToken

__all__ = ["main"]

# After a short pause the processor's caches still hold what the last step used. After one as long as a real step of a
# batch, other programs have taken their share of them.
PAUSES = {"1 ms": 0.001, "20 ms": 0.02}
PROMPT_TOKENS = 16
WARM_UP_STEPS = 20
GOAL_MS = 0.3
# Ordinary text ids; the stand-in's logits are all equal but for one of them.
FIRST_ID = 1_000


class StandIn:
    """Takes the compiled step's place and notes how long it was not being called, and how much of that was sampling."""

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self.overhead: list[float] = []
        self.processor: list[float] = []
        self.sampling: list[float] = []
        self.sampling_of_step = 0.0
        self._ended: tuple[float, float] | None = None

    def __call__(self, *arguments: Any) -> None:
        del arguments
        if self._ended is not None:
            clock, processor = self._ended
            self.overhead.append(perf_counter() - clock - self.sampling_of_step)
            self.processor.append(thread_time() - processor - self.sampling_of_step)
            self.sampling.append(self.sampling_of_step)
        sleep(self._pause)
        self.sampling_of_step = 0.0
        self._ended = perf_counter(), thread_time()


class TimedSampling(SamplingState):
    """Greedy sampling that tells the stand-in how long it took."""

    def __init__(self, stand_in: StandIn, row: int) -> None:
        super().__init__(temperature=0.0)
        self._stand_in = stand_in
        self._token_id = FIRST_ID + row

    def sample(self, logits: npt.NDArray[np.float32]) -> SampledToken:
        started = perf_counter()
        self._token_id += 7
        logits[:] = 0.0
        logits[self._token_id] = 1.0
        token = super().sample(logits)
        self._stand_in.sampling_of_step += perf_counter() - started
        return token


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler_overhead")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--no-write", action="store_true", help="print only, write no file")
    options = parser.parse_args(arguments)

    samples = {}
    cases = {f"{name}, steps of {pause}": (read, PAUSES[pause]) for name, read in READERS.items() for pause in PAUSES}
    for name, (read, pause) in cases.items():
        stand_in = run(options.model, options.batch, options.steps, pause, read)
        for what in ("overhead", "processor", "sampling"):
            seconds = getattr(stand_in, what)[WARM_UP_STEPS:]
            samples[f"{what}_ms, {name}"] = [1e3 * value for value in seconds]
    result = {
        name: {"median": round(median(values), 4), "p90": round(quantiles(values, n=10)[-1], 4), "steps": len(values)}
        for name, values in samples.items()
    }
    for name, figures in result.items():
        print(f"{name:<48} median {figures['median']:.3f}  p90 {figures['p90']:.3f}")
    if not options.no_write:
        print(write_result("scheduler_overhead", {"batch": options.batch, "goal_ms": GOAL_MS, "result": result}))
    return 0


def run(model: str, batch: int, steps: int, pause: float, read: Callable[[list[RequestStream]], None]) -> StandIn:
    """Run ``batch`` requests at once for ``steps`` tokens each."""
    stand_in = StandIn(pause)
    config = EngineConfig(max_num_sequence=batch, max_total_sequence_length=batch * 2 * (steps + PROMPT_TOKENS))
    loaded = load_model(model, config=config, progress=False)

    def open_runner() -> ModelRunner:
        runner: Any = loaded.open_runner()
        runner._forward = stand_in
        return runner  # type: ignore[no-any-return] # the attribute that is replaced is private

    core = EngineCore(replace(loaded, open_runner=open_runner), config)
    try:
        read(
            [
                core.submit(
                    GenerationRequest(
                        str(row),
                        tuple(range(FIRST_ID + 100 * row, FIRST_ID + 100 * row + PROMPT_TOKENS)),
                        TimedSampling(stand_in, row),
                        steps,
                    )
                )
                for row in range(batch)
            ]
        )
    finally:
        core.terminate()
    return stand_in


def read_in_one_loop(streams: list[RequestStream]) -> None:
    """A task for each stream, as users of the async engine have."""

    async def read(stream: RequestStream) -> None:
        async for _ in stream:
            pass

    async def read_all() -> None:
        await asyncio.gather(*map(read, streams))

    asyncio.run(read_all())


def read_in_threads(streams: list[RequestStream]) -> None:
    """A thread for each stream."""

    def read(stream: RequestStream) -> None:
        for _ in stream:
            pass

    threads = [threading.Thread(target=read, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


READERS = {"one event loop": read_in_one_loop, "a thread each": read_in_threads}


if __name__ == "__main__":
    sys.exit(main())
