"""State files of processes: who is believed, and who is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil
import pytest

from mlc_nb import presence
from mlc_nb.presence import EngineOfProcess, engines_of_all_processes, publish, state_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROLOGUE = """
import os, sys, time
from mlc_nb.presence import EngineOfProcess, publish
publish([EngineOfProcess(os.getpid(), "/n.ipynb", "other", "Q4_1", "cpu", "ready", 5)])
"""


def row(model: str = "smollm2", state: str = "ready") -> EngineOfProcess:
    return EngineOfProcess(os.getpid(), None, model, "Q4_1", "cpu", state, 1234)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    publish([])
    monkeypatch.setenv("MLC_NB_HOME", str(tmp_path))
    yield state_folder()
    publish([])


def other_process(body: str) -> subprocess.Popen[str]:
    """A process that has told of an engine, waits for a line and then runs ``body``."""
    script = PROLOGUE + "print('told', flush=True); sys.stdin.readline()\n" + textwrap.dedent(body)
    process = subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, stderr=-1, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "told\n"
    return process


def models() -> list[str]:
    return [found.model for found in engines_of_all_processes()]


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def test_what_was_told_last_is_found_and_taken_back(folder: Path) -> None:
    assert engines_of_all_processes() == []
    publish([row("a"), row("b", "loading")])
    publish([row("b"), row("c")])
    found = engines_of_all_processes()
    assert [replace(told, process_bytes=None) for told in found] == [row("b"), row("c")]
    own = psutil.Process().memory_full_info().uss
    assert all(own / 2 < (told.process_bytes or 0) < own * 2 for told in found)
    assert len(files(folder)) == 1
    publish([])
    publish([])
    assert engines_of_all_processes() == []
    assert files(folder) == []


def test_another_process_is_seen_until_it_ends() -> None:
    publish([row()])
    with other_process("") as process:
        (other,) = [found for found in engines_of_all_processes() if found.pid == process.pid]
        assert (other.model, other.notebook, other.memory_bytes) == ("other", "/n.ipynb", 5)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert models() == ["smollm2"]
    assert len(files(state_folder())) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX")
def test_a_process_that_becomes_another_program_has_no_engines(folder: Path) -> None:
    body = """
    os.execv(sys.executable, [sys.executable, "-c", "print('told again', flush=True); input()"])
    """
    with other_process(body) as process:
        assert models() == ["other"]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "told again\n"
        assert models() == []
        assert files(folder) == []
        process.kill()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX")
def test_a_forked_child_neither_owns_nor_removes_nor_holds_the_file() -> None:
    body = """
    import warnings; warnings.simplefilter("ignore")
    if not os.fork():
        publish([])
        print(os.getpid(), flush=True)
        time.sleep(60)
        os._exit(0)
    sys.stdin.readline()
    os._exit(0)
    """
    with other_process(body) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        child = int(process.stdout.readline())
        assert models() == ["other"]
        process.kill()
        process.wait(10)
        assert models() == []
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"process": {}, "engines": []}',
        '{"process": {"where": 1, "pid": "x"}, "engines": []}',
        '{"process": null, "engines": null}',
        '{"process": {"where": {}, "pid": 1}, "engines": [{"pid": 1}]}',
        "\x00" * 100,
    ],
)
def test_garbage_is_removed(folder: Path, text: str) -> None:
    publish([row()])
    (folder / "1-x.json").write_text(text)
    assert models() == ["smollm2"]
    assert len(files(folder)) == 1


@pytest.mark.parametrize("change", ["started", "pid", "unlocked"])
def test_a_pid_that_is_another_process_now_is_not_believed(folder: Path, change: str) -> None:
    publish([row()])
    (path,) = folder.iterdir()
    content = json.loads(path.read_text())
    publish([])
    if change == "started":
        content["process"]["started"] -= 1
    elif change == "pid":
        content["process"]["pid"] = 1
    path.write_text(json.dumps(content))
    assert models() == []
    assert files(folder) == []


def test_files_of_another_machine_are_left_alone(folder: Path) -> None:
    publish([row()])
    (path,) = folder.iterdir()
    content = json.loads(path.read_text())
    content["process"]["where"]["host"] = "elsewhere"
    (folder / "1-y.json").write_text(json.dumps(content))
    assert models() == ["smollm2"]
    assert len(files(folder)) == 2


def test_what_a_killed_writer_left_goes_in_time(folder: Path) -> None:
    publish([row()])
    new, old = folder / "new.partial", folder / "old.partial"
    new.touch()
    old.touch()
    os.utime(old, (1, 1))
    assert models() == ["smollm2"]
    assert new.exists()
    assert not old.exists()


def test_a_folder_that_cannot_be_written_keeps_nobody_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLC_NB_HOME", str(tmp_path / "file"))
    publish([row()])
    assert engines_of_all_processes() == []


def test_a_jump_of_the_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    publish([row()])
    now = presence.time.time()
    for jump in (-1e7, 1e7):
        monkeypatch.setattr(presence.time, "time", lambda jump=jump: now + jump)
        assert models() == ["smollm2"]
