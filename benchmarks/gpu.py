"""Builds, checks and times the engine on one NVIDIA GPU, in one call: ``python -m benchmarks.gpu [section ...]``.

Needs torch and transformers, for weights and as a yardstick. A section that fails is reported and does not stop the
others. The table comes last; the figures go to ``$OUT/gpu.json``, or to ``benchmarks/results`` without ``$OUT``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_checks import check_runs_ahead, check_steps
from benchmarks.gpu_engine import check_cycles, check_golden, check_memory, check_small, time_engine
from benchmarks.gpu_model import RandomModel
from benchmarks.gpu_speed import time_ours, time_theirs
from benchmarks.machine import RESULTS
from mlc_nb.library import open_bundle
from mlc_nb.runtime.devices import find_cuda_device

if TYPE_CHECKING:
    from collections.abc import Callable

BATCHES = (1, 2, 4, 8, 16, 32, 64)
BIG = "llama-3.1-8b"
CHECKED = (
    RandomModel("smollm2-135m", "Q4_1", 6),
    RandomModel("smollm2-135m", "Q8_0", 4),
    RandomModel("qwen2.5-0.5b", "F16", 4),
    RandomModel(BIG, "F16", 4),
    RandomModel(BIG, "Q4_0", 4),
    RandomModel(BIG, "BF16", 2),
)
TIMED = (
    RandomModel(BIG, "F16"),
    RandomModel(BIG, "Q4_0"),
    RandomModel("qwen2.5-0.5b", "F16"),
    RandomModel("smollm2-135m", "Q4_1"),
)


def main() -> int:
    """Run the sections that were named, or all of them."""
    sections: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "checks": checks,
        "race": race,
        "speed": speed,
        "transformers": transformers_speed,
        "engine": engine,
        "golden": golden,
    }
    if sys.argv[1:] == ["small"]:  # alone, under a memory checker
        print(small())
        return 0
    chosen = sys.argv[1:] or list(sections)
    figures: dict[str, Any] = {"device": describe_device()}
    compile_all()
    failed = 0
    for name in chosen:
        started = time.perf_counter()
        try:
            figures[name] = sections[name]()
        except Exception as error:
            failed += 1
            traceback.print_exc()
            figures[name] = [{"failed": f"{type(error).__name__}: {error}"}]
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
        write(figures)
    for name in chosen:
        print(f"\n{name}")
        for row in figures[name]:
            print("  " + "  ".join(f"{key}: {value}" for key, value in row.items()))
    return 1 if failed else 0


def write(figures: dict[str, Any]) -> None:
    """Keep what there is, for a call that is cut off."""
    today = time.strftime("%Y-%m-%d", time.gmtime())
    path = Path(os.environ["OUT"]) / "gpu.json" if "OUT" in os.environ else RESULTS / f"{today}-gpu.json"
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def describe_device() -> dict[str, str]:
    """The GPU and the driver."""
    query = "name,driver_version,memory.total,clocks.sm,clocks.mem"
    answer = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return dict(zip(query.split(","), answer.stdout.strip().split(", "), strict=False))


def compile_all() -> None:
    """Compile every model beforehand, at once."""
    architecture = find_cuda_device("cuda").architecture
    started = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        requests = [model.request(architecture) for model in (*CHECKED, *TIMED)]
        list(pool.map(lambda request: open_bundle(request, progress=False), requests))
    print(f"compiled {len(requests)} models in {time.perf_counter() - started:.0f} s", flush=True)


def each(models: tuple[RandomModel, ...], run: Callable[[RandomModel], dict[str, Any]]) -> list[dict[str, Any]]:
    """Run something for each model; one that fails leaves its error."""
    rows = []
    for model in models:
        try:
            rows.append(run(model))
        except Exception as error:
            traceback.print_exc()
            rows.append({"model": model.label, "failed": f"{type(error).__name__}: {error}"})
        print(rows[-1], flush=True)
    return rows


def checks() -> list[dict[str, Any]]:
    """Steps against transformers."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    return each(CHECKED, lambda model: check_steps(torch, model, (1, 3, 8, 20, 64)))


def race() -> list[dict[str, Any]]:
    """Many steps ahead of the device."""
    import torch

    return each(CHECKED[:1] + CHECKED[3:5], lambda model: check_runs_ahead(model, model.make(torch)))


def speed() -> list[dict[str, Any]]:
    """Ours."""
    import torch

    def run(model: RandomModel) -> dict[str, Any]:
        tensors = model.make(torch)
        try:
            return time_ours(model, tensors, BATCHES)
        finally:
            tensors.clear()
            torch.cuda.empty_cache()

    return each(TIMED, run)


def engine() -> list[dict[str, Any]]:
    """Many requests, memory, and loading and ending."""
    import torch

    def throughput(model: RandomModel) -> dict[str, Any]:
        tensors = model.make(torch)
        try:
            return time_engine(model, tensors)
        finally:
            tensors.clear()
            torch.cuda.empty_cache()

    little = TIMED[3]
    tensors = little.make(torch)
    rows = each((little,), lambda model: check_memory(model, tensors))
    rows += each((little,), lambda model: check_cycles(model, tensors))
    return rows + each((TIMED[0], TIMED[1], TIMED[3]), throughput)


def golden() -> list[dict[str, Any]]:
    """The real model, where its file and its golden answers were brought along (``GGUF``, ``GOLDEN``)."""
    return [check_golden(Path(os.environ["GGUF"]), Path(os.environ["GOLDEN"]))]


def small() -> list[dict[str, Any]]:
    """A few steps of small models."""
    import torch

    return [check_small(model, model.make(torch)) for model in (CHECKED[0], CHECKED[2])]


def transformers_speed() -> list[dict[str, Any]]:
    """Theirs."""
    import torch

    with torch.no_grad():
        return each(TIMED[:1], lambda model: time_theirs(torch, model, (1, 64)))


if __name__ == "__main__":
    sys.exit(main())
