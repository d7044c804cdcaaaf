"""``mlc_nb.allow_nested()``: for kernels of ipykernel 6, refused elsewhere."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

import mlc_nb
from tests.notebook.conftest import Kernel

NESTED = "import asyncio\nasync def main(): return 'ran'\nprint(asyncio.run(main()))"


def test_outside_of_a_kernel_there_is_nothing_to_nest_in() -> None:
    code = "import mlc_nb\ntry: mlc_nb.allow_nested()\nexcept mlc_nb.MLCError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert "this process has none" in done.stdout
    assert mlc_nb.allow_nested.__module__ == "mlc_nb.notebook.nesting"


@pytest.mark.skipif(
    Version(importlib.metadata.version("ipykernel")) < Version("7"), reason="the installed kernel is an older one"
)
def test_a_kernel_of_ipykernel_7_keeps_its_loop(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    try:
        refused = kernel.run("import mlc_nb; mlc_nb.allow_nested()").errors
        assert refused[0]["ename"] == "MLCError"
        assert "await main()" in refused[0]["evalue"]
        assert kernel.run("import asyncio; await asyncio.sleep(0); print('well')").stream("stdout") == "well\n"
    finally:
        kernel.close()


def test_a_kernel_of_ipykernel_6_runs_nested_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = tmp_path / "older"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(older), "ipykernel>=6.29,<7"]
    installed = subprocess.run(pip, capture_output=True, text=True, timeout=120, check=False)
    if installed.returncode:
        pytest.skip(f"no package index here: {installed.stderr[-200:]}")
    folder = Path(mlc_nb.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(older), str(folder)]))
    kernel = Kernel(tmp_path)
    try:
        assert kernel.run("import ipykernel; print(ipykernel.__version__[0])").stream("stdout") == "6\n"
        assert kernel.run(NESTED).errors[0]["ename"] == "RuntimeError"
        assert not kernel.run("import mlc_nb; mlc_nb.allow_nested()").errors
        assert kernel.run(NESTED).stream("stdout") == "ran\n"
    finally:
        kernel.close()
