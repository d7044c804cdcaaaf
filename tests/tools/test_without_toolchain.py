"""The script under which CI runs everything hides what it should and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "without_toolchain"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *command], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("program", ["gcc", "cc", "c++", "clang", "ld", "tar"])
def test_toolchain_is_hidden(program: str) -> None:
    assert run("sh", "-c", f"command -v {program}").returncode != 0


@pytest.mark.parametrize("program", ["sh", "ls", "make", "python3"])
def test_the_rest_is_there(program: str) -> None:
    assert run("sh", "-c", f"command -v {program}").stdout.strip().endswith(program)


def test_exit_code_is_the_commands_own_also_when_nested() -> None:
    assert run(str(SCRIPT), "sh", "-c", "exit 7").returncode == 7
