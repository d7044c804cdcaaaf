"""Tokens a second of one request, and of many at once.

python -m benchmarks.throughput --concurrent 16
"""

from __future__ import annotations

import argparse
import sys
from random import Random
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from benchmarks.machine import write_result
from mlc_nb import EngineConfig, MLCEngine
from mlc_nb.engine.generation import GenerationRequest
from mlc_nb.runtime.sampler import SamplingState

if TYPE_CHECKING:
    from mlc_nb.engine.core import EngineCore

__all__ = ["main"]

PROMPT_TOKENS = 16
FIRST_ID, LAST_ID = 1_000, 30_000
GOAL = 1.8


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--concurrent", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--no-write", action="store_true", help="print only, write no file")
    options = parser.parse_args(arguments)

    samples: dict[int, list[float]] = {1: [], options.concurrent: []}
    config = EngineConfig(
        max_num_sequence=options.concurrent,
        max_total_sequence_length=options.concurrent * (PROMPT_TOKENS + options.tokens + 16),
        prefix_cache_mode="disable",
    )
    with MLCEngine(options.model, engine_config=config) as engine:
        rate(engine.core, 1, 8, options.temperature)
        for _ in range(options.rounds):
            for count, rates in samples.items():
                rates.append(rate(engine.core, count, options.tokens, options.temperature))
    one, many = (median(rates) for rates in samples.values())
    report = {
        "unit": "token/s, prompts of 16 tokens included in the time",
        "temperature": options.temperature,
        "samples": {str(count): [round(value, 1) for value in rates] for count, rates in samples.items()},
        "ratio": round(many / one, 2),
        "goal": GOAL,
    }
    print(report)
    if not options.no_write:
        print(write_result("throughput", report))
    return 0


def rate(core: EngineCore, count: int, new_tokens: int, temperature: float) -> float:
    """Generated tokens a second of ``count`` requests that come together."""
    source = Random(7)
    started = perf_counter()
    streams = [
        core.submit(
            GenerationRequest(
                str(index),
                tuple(source.randint(FIRST_ID, LAST_ID) for _ in range(PROMPT_TOKENS)),
                SamplingState(temperature=temperature, seed=index),
                new_tokens,
            )
        )
        for index in range(count)
    ]
    generated = sum(len(delta.token_ids) for stream in streams for delta in stream)
    if generated != count * new_tokens:
        raise RuntimeError(f"wanted {count * new_tokens} tokens, got {generated}")
    return generated / (perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
