"""The host's memory: what is free within control groups, what a process takes, and what a model will take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest

from mlc_nb.runtime import cpu_memory
from mlc_nb.runtime.cpu_memory import free_memory

if TYPE_CHECKING:
    from pathlib import Path


def write_group(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


GIB = 2**30


@pytest.mark.parametrize(
    ("files", "granted"),
    [
        ({}, None),
        ({"memory.max": "max\n", "memory.current": "5\n", "memory.stat": "inactive_file 1\n"}, None),
        ({"memory.max": f"{GIB}\n", "memory.current": f"{GIB // 4}\n", "memory.stat": "anon 7\n"}, GIB * 3 // 4),
        # Files that were read do not count: the system drops them.
        (
            {
                "memory.max": f"{GIB}\n",
                "memory.current": f"{GIB}\n",
                "memory.stat": f"file 9\ninactive_file {GIB // 2}\n",
            },
            GIB // 2,
        ),
        ({"memory.max": "100\n", "memory.current": "300\n", "memory.stat": "inactive_file 50\n"}, 0),
        ({"memory.max": "nonsense\n", "memory.current": "300\n", "memory.stat": "\n"}, None),
        (
            {
                "memory/memory.limit_in_bytes": f"{GIB}\n",
                "memory/memory.usage_in_bytes": f"{GIB // 2}\n",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 1024\n",
            },
            GIB // 2 + 1024,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/memory.usage_in_bytes": "1\n",
                "memory/memory.stat": "",
            },
            None,
        ),
    ],
)
def test_free_memory_heeds_the_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], granted: int | None
) -> None:
    host = psutil.virtual_memory()._replace(available=2 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    monkeypatch.setattr(cpu_memory, "_CGROUP", tmp_path)
    write_group(tmp_path, files)
    assert free_memory() == (2 * GIB if granted is None else granted)


def test_free_memory_of_this_machine() -> None:
    assert 0 < free_memory() <= psutil.virtual_memory().total
