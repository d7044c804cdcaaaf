"""Children die with their parent, and only then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from mlc_nb import child

if TYPE_CHECKING:
    from pathlib import Path

SLEEPER = "import time\nprint('ready', flush=True)\ntime.sleep(60)\n"


@pytest.fixture
def sleeper_env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def test_a_module_runs_with_its_arguments_and_exit_code(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text("import sys\nprint(sys.argv[1:], __name__)\nsys.exit(3)\n")
    process = child.popen(
        "echo",
        ["-x", "a b"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    output, _ = process.communicate(timeout=20)
    assert (output.strip(), process.returncode) == ("['-x', 'a b'] __main__", 3)


def test_the_working_directory_shadows_nothing(tmp_path: Path) -> None:
    (tmp_path / "runpy.py").write_text("raise RuntimeError('shadowed')\n")
    process = child.popen("pip", ["--version"], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output.startswith("pip ")


def test_it_survives_the_thread_that_asked_and_ignores_interrupts(sleeper_env: dict[str, str]) -> None:
    started: list[subprocess.Popen[str]] = []
    thread = threading.Thread(
        target=lambda: started.append(child.popen("sleeper", stdout=subprocess.PIPE, text=True, env=sleeper_env))
    )
    thread.start()
    thread.join()
    (process,) = started
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        process.kill()


def test_it_dies_with_a_parent_that_is_killed(sleeper_env: dict[str, str]) -> None:
    script = textwrap.dedent(
        """
        import subprocess, time
        from mlc_nb import child
        process = child.popen("sleeper", stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        print(process.pid, flush=True)
        time.sleep(60)
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=sleeper_env) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.02)
