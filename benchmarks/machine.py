"""What the figures of a benchmark were measured on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict

from mlc_nb.runtime.cores import usable_cores
from mlc_nb.runtime.isa import runnable_isas

__all__ = ["REPOSITORY", "RESULTS", "Machine", "describe_machine", "write_result"]

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"


class Machine(TypedDict):
    date: str
    commit: str
    cpu: str
    architecture: str
    isa: str
    usable_cores: int
    memory_gb: float
    load_average: float
    python: str
    mlc_nb: str
    apache_tvm: str


def describe_machine() -> Machine:
    """The machine, its load in the last minute, and the versions of what runs."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": git_commit(),
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "isa": runnable_isas()[0],
        "usable_cores": usable_cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "mlc_nb": version("mlc-nb"),
        "apache_tvm": version("apache-tvm"),
    }


def write_result(name: str, content: dict[str, Any], *, module: str | None = None) -> Path:
    """Keep the figures of one benchmark with the command and the machine, one file a day; return where."""
    machine = describe_machine()
    path = RESULTS / f"{machine['date'][:10]}-{name}.json"
    command = " ".join(["python", "-m", f"benchmarks.{module or name}", *sys.argv[1:]])
    RESULTS.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"command": command, "machine": machine, **content}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def git_commit() -> str:
    """The commit that is checked out, with ``-dirty`` when tracked files differ from it; "unknown" outside of git."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()
