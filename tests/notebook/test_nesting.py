"""``mlc_nb.allow_nested()``: for kernels of ipykernel 6, refused elsewhere."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from packaging.version import Version

import mlc_nb
from tests.notebook.conftest import Kernel

if TYPE_CHECKING:
    from pathlib import Path

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


def test_a_kernel_of_ipykernel_6_runs_nested_loops(tmp_path: Path, older_ipykernel: Path) -> None:
    kernel = Kernel(tmp_path, older_ipykernel)
    try:
        assert kernel.run("import ipykernel; print(ipykernel.__version__[0])").stream("stdout") == "6\n"
        assert kernel.run(NESTED).errors[0]["ename"] == "RuntimeError"
        assert not kernel.run("import mlc_nb; mlc_nb.allow_nested()").errors
        assert kernel.run(NESTED).stream("stdout") == "ran\n"
    finally:
        kernel.close()
