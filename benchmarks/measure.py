"""One measurement in one fresh process, printed as a line of JSON. Started by ``benchmarks.bench``.

python -m benchmarks.measure import
python -m benchmarks.measure first-token --model smollm2 --threads 2 --since 1760000000.0
python -m benchmarks.measure speed --model smollm2 --threads 2 --runs 3
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mlc_nb import MLCEngine

__all__ = ["main"]

DECODE_PROMPT_TOKENS = 16
DECODE_TOKENS = 128
PREFILL_TOKENS = 512
WARM_UP_TOKENS = 8
# Ordinary text ids of every vocabulary that we run; the low ones are special tokens.
FIRST_ID, LAST_ID = 1_000, 30_000


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measure")
    parser.add_argument("what", choices=("import", "first-token", "speed"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--activations", default="auto")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--since", type=float, default=time.time(), help="time.time() at what counts as the start")
    options = parser.parse_args(arguments)

    if options.what == "import":
        result = measure_import()
    else:
        with open_engine(options.model, options.threads, options.activations) as engine:
            if options.what == "first-token":
                result = measure_first_token(engine, options.since)
            else:
                result = measure_speed(engine, options.runs)
    print(json.dumps(result))
    return 0


def measure_import() -> dict[str, list[float]]:
    before = time.perf_counter()
    import mlc_nb

    package = time.perf_counter()
    assert mlc_nb.MLCEngine is not None  # public names are loaded when they are first used
    engine = time.perf_counter()
    return {"import_s": [package - before], "import_engine_s": [engine - before]}


def measure_first_token(engine: MLCEngine, since: float) -> dict[str, list[float]]:
    """From the start of this process, interpreter and imports included, to the first text of a streamed answer."""
    ready = time.time()
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    for chunk in engine.chat.completions.create(messages=messages, stream=True, max_tokens=8, temperature=0.0):
        if chunk.choices and chunk.choices[0].delta.content:
            return {"first_token_s": [time.time() - since], "engine_ready_s": [ready - since]}
    raise RuntimeError("the stream ended without any text")


def measure_speed(engine: MLCEngine, runs: int) -> dict[str, list[float]]:
    """Decode and prefill rates of several runs, alternating, and the most memory that this process ever held."""
    ids = random.Random(7)
    decode: list[float] = []
    prefill: list[float] = []
    first_token: list[float] = []
    generate(engine, ids, DECODE_PROMPT_TOKENS, WARM_UP_TOKENS)
    for _ in range(runs):
        decode.append(generate(engine, ids, DECODE_PROMPT_TOKENS, DECODE_TOKENS)["decode_tokens_per_s"])
        usage = generate(engine, ids, PREFILL_TOKENS, 1)
        prefill.append(usage["prefill_tokens_per_s"])
        first_token.append(usage["ttft_s"])
    return {
        "decode_tokens_per_s": decode,
        "prefill_tokens_per_s": prefill,
        "prefill_ttft_s": first_token,
        "peak_rss_mb": [peak_resident_megabytes()],
    }


def open_engine(
    model: str,
    threads: int | None,
    activations: Literal["auto", "float32", "int16", "int8"],
    max_num_sequence: int | None = None,
) -> MLCEngine:
    from mlc_nb import EngineConfig, MLCEngine

    config = EngineConfig(num_threads=threads, activation_dtype=activations, max_num_sequence=max_num_sequence)
    return MLCEngine(model, device="cpu", engine_config=config)


def generate(engine: MLCEngine, ids: random.Random, prompt_tokens: int, new_tokens: int) -> dict[str, float]:
    """One greedy request with a prompt never seen before (no cached prefix helps); the engine's own figures of it."""
    answer = engine.completions.create(
        prompt=[ids.randint(FIRST_ID, LAST_ID) for _ in range(prompt_tokens)],
        max_tokens=new_tokens,
        temperature=0.0,
        extra_body={"debug_config": {"ignore_eos": True}},
    )
    usage = answer.usage
    if usage is None or usage.extra is None:
        raise RuntimeError("the answer carries no usage")
    found = (usage.prompt_tokens, usage.completion_tokens)
    if found != (prompt_tokens, new_tokens):
        raise RuntimeError(f"wanted {prompt_tokens} prompt and {new_tokens} new tokens, the engine reports {found}")
    return usage.extra


def peak_resident_megabytes() -> float:
    """VmHWM of this process, in MB of 1,000,000 bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("/proc/self/status has no VmHWM line")


if __name__ == "__main__":
    sys.exit(main())
