"""The endurance runs at a twentieth of their counts, in a process of its own each: they look at its memory."""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import Any

import pytest


def run(what: str, count: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.endurance_cycles", what, "--count", str(count), "--no-write"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout, done.stderr
    report: dict[str, Any] = ast.literal_eval(done.stdout.splitlines()[-1])
    assert done.returncode == 0, report
    return report


@pytest.mark.usefixtures("warm_model")
def test_loads() -> None:
    report = run("loads", 10)
    curve = report["resident_megabytes"]
    # What is new to a process is over by then; weights are 97 MB, and stay nowhere.
    assert curve[-1] < curve[1] + 20


@pytest.mark.usefixtures("warm_model")
def test_switches() -> None:
    assert run("switches", 3)["evictions"] == 5


@pytest.mark.usefixtures("warm_model")
def test_interrupts() -> None:
    report = run("interrupts", 50)
    stopped = sum(count for fate, count in report["fates"].items() if fate.endswith("stopped"))
    assert stopped > 30
