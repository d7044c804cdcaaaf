"""Our engine against llama.cpp on the same file, threads and machine (``make bench``), as ratios of one run.

llama-cpp-python is built from source for this processor in a venv outside the checkout, once. Rounds alternate between
the engines; a figure is the median of its rounds, a ratio the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.machine import REPOSITORY, describe_machine, write_result
from mlc_nb.weights.source import resolve_model

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

LLAMA = "llama-cpp-python==0.3.36"
KINDS = (
    "decode_16",
    "decode_1800",
    "prefill_32",
    "prefill_500",
    "prefill_1800",
    "batch_4",
    "batch_8",
    "batch_16",
    "batch_32",
)
LOWER_IS_BETTER = ("start_s", "peak_rss_mb")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versus", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, action="append", help="repeatable (default: all usable cores, and 1)")
    parser.add_argument("--activations", action="append", help="activation_dtype, repeatable (default: auto)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-q4-0", action="store_true", help="leave out llama.cpp on the weights requantized to Q4_0")
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args(arguments)

    machine = describe_machine()
    weights = resolve_model(options.model).path
    python = peer_python()
    columns = {f"mlc_nb {kind}": ours(options.model, kind) for kind in options.activations or ["auto"]}
    columns["llama.cpp"] = [str(python), str(REPOSITORY / "benchmarks" / "llama_worker.py"), str(weights)]
    if not options.no_q4_0:
        columns["llama.cpp Q4_0"] = [*columns["llama.cpp"][:2], str(requantized(python, weights))]
    results = {}
    for threads in options.threads or dict.fromkeys([machine["usable_cores"], 1]):
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in columns}
        for number in range(options.rounds):
            for name, command in columns.items():
                print(f"  {threads} threads, round {number + 1}: {name}", file=sys.stderr, flush=True)
                rounds[name].append(run([*command, str(threads), *KINDS]))
        results[str(threads)] = rounds
        print(table(threads, rounds))
    if not options.no_write:
        name = f"versus-{machine['isa']}-{machine['usable_cores']}cores"
        path = write_result(name, {"peer": LLAMA, "threads": results}, module="versus")
        print(f"every sample: {path.relative_to(REPOSITORY)}")
    return 0


def ours(model: str, activations: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.versus_worker", model, activations]


def peer_python() -> Path:
    """The interpreter of the peers' venv, which is made and filled the first time (17 CPU-minutes)."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlc_nb-peers"
    home = Path(os.environ.get("MLC_NB_PEERS") or default)
    python = home / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-c", "import llama_cpp"], check=False).returncode != 0:
        print(f"building {LLAMA} in {home}: about 17 CPU-minutes, once", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        environment = {**os.environ, "CMAKE_ARGS": "-DGGML_NATIVE=ON"}
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-binary", "llama-cpp-python", LLAMA]
        subprocess.run(install, check=True, env=environment)
    return python


def requantized(python: Path, weights: Path) -> Path:
    target = python.parent.parent / f"{weights.stem}.requantized-Q4_0.gguf"
    if not target.exists():
        worker = REPOSITORY / "benchmarks" / "llama_worker.py"
        command = [str(path) for path in (python, worker, weights, 0, "requantize", target)]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return target


def run(command: list[str]) -> dict[str, float]:
    environment = {**os.environ, "MLC_NB_BENCH_STARTED": repr(time.time())}
    finished = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{finished.stderr[-3000:]}")
    figures = json.loads(finished.stdout.splitlines()[-1])
    return {key: float(figures[key]) for key in (*KINDS, *LOWER_IS_BETTER)}


def table(threads: int, rounds: dict[str, list[dict[str, float]]]) -> str:
    """Medians of every column, and the first column's ratio to each of the others (above 1: ours is better)."""
    first, *others = rounds
    peers = [name for name in others if name.startswith("llama")]
    lines = [f"{threads} thread(s): medians; ratio of {first} to each peer, above 1 is better [lowest, highest]"]
    lines.append(" | ".join(["what", *rounds, *(f"to {name}" for name in peers)]))
    for key in (*KINDS, *LOWER_IS_BETTER):
        cells = [key, *(f"{median(sample[key] for sample in samples):.1f}" for samples in rounds.values())]
        for name in peers:
            ratios = [mine[key] / theirs[key] for mine, theirs in zip(rounds[first], rounds[name], strict=True)]
            if key in LOWER_IS_BETTER:
                ratios = [1 / ratio for ratio in ratios]
            cells.append(f"{median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]")
        lines.append(" | ".join(cells))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
