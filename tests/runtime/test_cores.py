"""How many threads a process computes with: cores, not hyper-threads, and no more than it may use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from mlc_nb.runtime import cores
from mlc_nb.runtime.cores import usable_cores

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of eight logical processors on four cores: 0 and 4, 1 and 5, 2 and 6, 3 and 7; no quota."""
    for cpu in range(8):
        folder = tmp_path / f"cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(cores, "_CPUS", tmp_path / "cpu")
    monkeypatch.setattr(cores, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("affinity", "count"), [(range(8), 4), ({0, 4}, 1), ({0, 1}, 2), ({1, 2, 3, 5}, 3), ({0, 99}, 2)]
)
@pytest.mark.usefixtures("machine")
def test_threads_of_a_core_count_once(monkeypatch: pytest.MonkeyPatch, affinity: set[int], count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(affinity), raising=False)
    assert usable_cores() == count


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"cpu.max": "max 100000\n"}, 4),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "1600000 100000\n"}, 4),
        ({"cpu.max": "nonsense\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "0\n"}, 4),
    ],
)
def test_the_quota_of_a_container_is_heeded(machine: Path, files: dict[str, str], count: int) -> None:
    for name, text in files.items():
        (machine / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (machine / "cgroup" / name).write_text(text)
    assert usable_cores() == count


def test_this_machine_has_a_core() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
