"""Our half of ``benchmarks.versus``: the work of ``llama_worker.py`` through the public API, as a line of JSON.

python -m benchmarks.versus_worker MODEL ACTIVATIONS THREADS KIND...
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal

from benchmarks.measure import FIRST_ID, LAST_ID, generate, open_engine, peak_resident_megabytes

if TYPE_CHECKING:
    from mlc_nb import MLCEngine

PROMPT = 16
NEW_TOKENS = 64
MOST_SEQUENCES = 32


def main() -> None:
    model, activations, threads, *kinds = sys.argv[1:]
    ids = random.Random(7)
    with open_engine(model, int(threads), known(activations), max_num_sequence=MOST_SEQUENCES) as engine:
        generate(engine, ids, 1, 1)
        figures = {"start_s": time.time() - float(os.environ["MLC_NB_BENCH_STARTED"])}
        generate(engine, ids, PROMPT, NEW_TOKENS)
        for kind in kinds:
            figures[kind] = measure(engine, ids, kind)
        figures["peak_rss_mb"] = peak_resident_megabytes()
    print(json.dumps(figures))


def known(activations: str) -> Literal["auto", "float32", "int16", "int8"]:
    for name in ("auto", "float32", "int16", "int8"):
        if name == activations:
            return name
    raise SystemExit(f"unknown activations {activations}")


def measure(engine: MLCEngine, ids: random.Random, kind: str) -> float:
    what, _, number = kind.partition("_")
    if what == "prefill":
        return generate(engine, ids, int(number), 1)["prefill_tokens_per_s"]
    if what == "decode":
        return generate(engine, ids, int(number), NEW_TOKENS)["decode_tokens_per_s"]
    if what == "batch":
        return batch_rate(engine, ids, int(number))
    raise SystemExit(f"unknown kind {kind}")


def batch_rate(engine: MLCEngine, ids: random.Random, requests: int) -> float:
    """Tokens a second of requests that start together, their short prefills and everything else included."""
    prompts = [[ids.randint(FIRST_ID, LAST_ID) for _ in range(PROMPT)] for _ in range(requests)]

    def answer(prompt: list[int]) -> int:
        result = engine.completions.create(
            prompt=prompt,
            max_tokens=NEW_TOKENS,
            temperature=0.0,
            extra_body={"debug_config": {"ignore_eos": True}},
        )
        assert result.usage is not None
        return result.usage.completion_tokens

    with ThreadPoolExecutor(requests) as pool:
        start = time.perf_counter()
        tokens = sum(pool.map(answer, prompts))
        return tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
