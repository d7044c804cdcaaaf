"""How long running streams wait when a long prompt arrives, and how soon a next turn answers.

python -m benchmarks.latency --streams 8 --prompt 2000
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from itertools import pairwise
from random import Random
from statistics import median, quantiles
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks.machine import write_result
from mlc_nb import EngineConfig, MLCEngine
from mlc_nb.engine.generation import GenerationRequest
from mlc_nb.runtime.sampler import SamplingState

if TYPE_CHECKING:
    from mlc_nb.engine.core import EngineCore
    from mlc_nb.engine.stream import RequestStream

__all__ = ["main"]

FIRST_ID, LAST_ID = 1_000, 30_000
TOKENS_BEFORE = 80
HISTORY_TOKENS, TURN_TOKENS = 1_500, 30
GOAL = 4.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latency")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-write", action="store_true", help="print only, write no file")
    options = parser.parse_args(arguments)

    config = EngineConfig(max_num_sequence=options.streams + 1, max_total_sequence_length=16_384)
    with MLCEngine(options.model, engine_config=config) as engine:
        source = Random(1)
        next(iter(ask(engine.core, source, 600, 1)))  # learns how fast a prefill is
        arrivals = [
            asyncio.run(arrival(engine.core, source, options.streams, options.prompt)) for _ in range(options.rounds)
        ]
        turns = [next_turn(engine.core, source) for _ in range(options.rounds)]
    report = {"goal_ratio": GOAL, "long_prompt_arrives": arrivals, "next_turn": turns}
    for part in (*arrivals, *turns):
        print(part)
    if not options.no_write:
        print(write_result("latency", report))
    return 0


async def arrival(core: EngineCore, source: Random, streams: int, prompt: int) -> dict[str, Any]:
    """Times between tokens of running streams, before a long prompt comes and until it has its first token."""
    running = [ask(core, source, 16, 4_000 // streams * 2) for _ in range(streams)]
    stamps: list[list[float]] = [[] for _ in running]

    async def read(stream: RequestStream, times: list[float]) -> None:
        async for delta in stream:
            times += [perf_counter()] * bool(delta.token_ids)

    readers = [asyncio.ensure_future(read(stream, times)) for stream, times in zip(running, stamps, strict=True)]
    while min(map(len, stamps)) < TOKENS_BEFORE:
        await asyncio.sleep(0.01)
    submitted = perf_counter()
    await anext(ask(core, source, prompt, 1))
    first_token = perf_counter()
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    before: list[float] = []
    during: list[float] = []
    for times in stamps:
        for earlier, later in pairwise(times[8:]):
            if later < submitted:
                before.append(later - earlier)
            elif later < first_token:
                during.append(later - earlier)
    p99_before, p99 = (quantiles(times, n=100)[-1] for times in (before, during))
    return {
        "median_before_ms": round(1e3 * median(before), 2),
        "p99_before_ms": round(1e3 * p99_before, 2),
        "median_during_ms": round(1e3 * median(during), 2),
        "p99_during_ms": round(1e3 * p99, 2),
        "ratio_p99_to_median_before": round(p99 / median(before), 2),
        "ttft_of_the_prompt_s": round(first_token - submitted, 2),
    }


def next_turn(core: EngineCore, source: Random) -> dict[str, Any]:
    """Times to first token of a long history, of its next turn, and of a request as long as what is new."""
    history = random_ids(source, HISTORY_TOKENS)
    first = first_token_seconds(core, history)
    again = first_token_seconds(core, history + random_ids(source, TURN_TOKENS))
    alone = first_token_seconds(core, random_ids(source, TURN_TOKENS + HISTORY_TOKENS % 16))
    return {
        f"ttft_of_{HISTORY_TOKENS}_tokens_ms": round(1e3 * first, 1),
        f"ttft_of_the_next_{TURN_TOKENS}_ms": round(1e3 * again, 1),
        "ttft_of_as_many_new_tokens_without_a_history_ms": round(1e3 * alone, 1),
    }


def first_token_seconds(core: EngineCore, prompt: list[int]) -> float:
    started = perf_counter()
    request = GenerationRequest("turn", tuple(prompt), SamplingState(temperature=0.0), 1)
    for _ in core.submit(request):
        pass
    return perf_counter() - started


def ask(core: EngineCore, source: Random, prompt: int, new_tokens: int) -> RequestStream:
    ids = tuple(random_ids(source, prompt))
    return core.submit(GenerationRequest(f"r{source.random()}", ids, SamplingState(temperature=0.0), new_tokens))


def random_ids(source: Random, count: int) -> list[int]:
    return [source.randint(FIRST_ID, LAST_ID) for _ in range(count)]


if __name__ == "__main__":
    sys.exit(main())
