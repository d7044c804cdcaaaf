"""Measure speed, start-up and memory on this machine (``make bench``), print a table and keep it as JSON.

Every measurement is a fresh process (``benchmarks.measure``). What is compared alternates, so that a machine that gets
slower or busier meanwhile disturbs all of it alike. Method and results: docs/performance.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.machine import REPOSITORY, RESULTS, describe_machine
from mlc_nb.library import library_root
from mlc_nb.weights.cache import cache_root

if TYPE_CHECKING:
    from benchmarks.machine import Machine

__all__ = ["main"]

BUSY = 0.5  # load average from which the figures are no longer those of a quiet machine

# Key of a measurement -> what the table calls it, its unit.
ROWS = {
    "decode_tokens_per_s": ("decode, 128 tokens after 16", "token/s"),
    "prefill_tokens_per_s": ("prefill, 512 tokens", "token/s"),
    "prefill_ttft_s": ("time to first token, 512 tokens", "s"),
    "cold_start_s": ("cold start to first token, compile included", "s"),
    "warm_start_s": ("warm start to first token", "s"),
    "import_s": ("import mlc_nb", "s"),
    "import_engine_s": ("import mlc_nb and use MLCEngine's name", "s"),
    "peak_rss_mb": ("peak RSS of the kernel process", "MB"),
}


@dataclass
class Case:
    """One column of the table: ISA level, threads and activations, and everything measured of them."""

    isa: str
    threads: int
    activations: str = "auto"
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        name = f"{self.isa}, {self.threads} thread{'s' if self.threads > 1 else ''}"
        return name if self.activations == "auto" else f"{name}, {self.activations}"

    def engine_arguments(self, model: str) -> tuple[str, ...]:
        return ("--model", model, "--threads", str(self.threads), "--activations", self.activations)

    def add(self, key: str, values: list[float]) -> None:
        self.samples.setdefault(key, []).extend(values)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--isa", action="append", help="ISA level, repeatable (default: the host's and avx2)")
    parser.add_argument("--threads", action="append", type=int, help="threads, repeatable (default: all usable cores)")
    parser.add_argument("--activations", action="append", help="activation_dtype, repeatable (default: auto)")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes of each kind a column (default 3)")
    parser.add_argument("--runs", type=int, default=3, help="speed runs in each process (default 3)")
    parser.add_argument("--no-cold", action="store_true", help="leave out the cold start, which compiles")
    parser.add_argument("--no-write", action="store_true", help="print only, write no file")
    options = parser.parse_args(arguments)

    machine = describe_machine()
    levels = options.isa or list(dict.fromkeys([machine["isa"], "avx2"]))
    threads = options.threads or [machine["usable_cores"]]
    cases = [Case(*columns) for columns in itertools.product(levels, threads, options.activations or ["auto"])]
    print(f"{machine['cpu']}, {machine['usable_cores']} usable cores, {machine['isa']}; commit {machine['commit']}")
    if machine["load_average"] > BUSY:
        print(f"note: the load average is {machine['load_average']:.2f}; other work takes part of this machine")

    for case in cases:
        say(case, "once, so that weights and library are in the cache")
        first_token(case, options.model)
        if not options.no_cold:
            say(case, "cold start")
            with tempfile.TemporaryDirectory(prefix="mlc_nb-bench-") as home:
                link_weights(Path(home))
                case.add("cold_start_s", first_token(case, options.model, home))
    for number in range(1, options.rounds + 1):
        for case in cases:
            say(case, f"round {number} of {options.rounds}")
            case.add("warm_start_s", first_token(case, options.model))
            for key, values in measure(case, "import").items():
                case.add(key, values)
            speed = measure(case, "speed", *case.engine_arguments(options.model), "--runs", str(options.runs))
            for key, values in speed.items():
                case.add(key, values)

    print(table(cases))
    if not options.no_write:
        print(f"every sample: {write(machine, options.model, cases)}")
    return 0


def link_weights(home: Path) -> None:
    """Make ``home`` a cache that has everything of the real one but the compiled libraries."""
    for entry in cache_root().iterdir():
        if entry != library_root():
            (home / entry.name).symlink_to(entry)


def say(case: Case, what: str) -> None:
    print(f"  {case.name}: {what}", file=sys.stderr, flush=True)


def measure(case: Case, what: str, *arguments: str, home: str | None = None) -> dict[str, list[float]]:
    """Take one measurement in a fresh process at the case's ISA level."""
    environment = {**os.environ, "MLC_NB_ISA": case.isa}
    if home is not None:
        environment["MLC_NB_HOME"] = home
    command = [sys.executable, "-m", "benchmarks.measure", what, *arguments]
    finished = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise SystemExit(f"{' '.join(command[1:])} ({case.name}) failed:\n{finished.stderr}")
    figures: dict[str, list[float]] = json.loads(finished.stdout.splitlines()[-1])
    return figures


def first_token(case: Case, model: str, home: str | None = None) -> list[float]:
    """Seconds from the start of a process to the first text of its answer."""
    since = repr(time.time())
    return measure(case, "first-token", *case.engine_arguments(model), "--since", since, home=home)["first_token_s"]


def table(cases: list[Case]) -> str:
    """A Markdown table of medians, with the lowest and the highest where there is more than one figure."""
    header = ["", *(case.name for case in cases), "unit"]
    lines = [header]
    for key, (label, unit) in ROWS.items():
        if any(key in case.samples for case in cases):
            lines.append([label, *(summary(case.samples.get(key, [])) for case in cases), unit])
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def summary(values: list[float]) -> str:
    if not values:
        return "-"
    digits = 1 if median(values) >= 10 else 2 if median(values) >= 1 else 3
    middle = f"{median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def write(machine: Machine, model: str, cases: list[Case]) -> Path:
    """Keep every single figure under benchmarks/results, one file a day and kind of host."""
    kind = f"{machine['architecture']}-{machine['isa']}-{machine['usable_cores']}c"
    path = RESULTS / f"{machine['date'][:10]}-{kind}.json"
    content = {
        "machine": machine,
        "model": model,
        "units": {key: unit for key, (_, unit) in ROWS.items()},
        "cases": [asdict(case) for case in cases],
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    sys.exit(main())
