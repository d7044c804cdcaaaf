"""How many threads a process may sensibly compute with."""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

__all__ = ["usable_cores"]

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Physical cores that this process may run on, by affinity and by its control group's CPU quota; at least 1."""
    count = _physical(_affinity())
    quota = _cgroup_quota()
    return max(1, count if quota is None else min(count, math.ceil(quota)))


def _affinity() -> set[int] | None:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return None


def _physical(cpus: set[int] | None) -> int:
    """Cores behind logical processors: those that share a core count once."""
    if cpus is None:
        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    cores = set()
    for cpu in cpus:
        siblings = _CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        try:
            cores.add(siblings.read_text(encoding="ascii").strip())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def _cgroup_quota() -> float | None:
    """CPU time that the control group grants, in processors, or None where there is no limit."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            quota = (_CGROUP / "cpu" / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (_CGROUP / "cpu" / "cpu.cfs_period_us").read_text(encoding="ascii")
        except OSError:
            return None
    try:
        granted, per = float(quota), float(period)
    except ValueError:
        return None
    return granted / per if granted > 0 and per > 0 else None
