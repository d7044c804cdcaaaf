"""What looks like an end to a notebook and is none: %reset, %reload_ext, %autoreload and forks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import mlc_nb
from tests.notebook.conftest import Kernel, value_of

if TYPE_CHECKING:
    from collections.abc import Iterator

LOAD = """
%load_ext mlc_nb
import mlc_nb, gc
engine = mlc_nb.MLCEngine()
messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
def ask():
    reply = mlc_nb.MLCEngine().chat.completions.create(messages=messages, max_tokens=12, temperature=0)
    return reply.choices[0].message.content
ask()
"""
RELOADED = ["registry", "lifecycle", "presence", "child", "admission", "accounts"]


def run(kernel: Kernel, code: str) -> None:
    reply = kernel.run(code)
    assert reply.reply["status"] == "ok", reply.errors


@pytest.fixture
def loaded(kernel: Kernel) -> Kernel:
    run(kernel, LOAD)
    return kernel


def test_reset_leaves_the_engine_to_the_next_cell_and_nothing_keeps_it_after_unload(loaded: Kernel) -> None:
    core = value_of(loaded, "id(engine.core)")
    run(loaded, "engine.core.metrics()\n%reset -f")
    run(loaded, LOAD)
    assert value_of(loaded, "[id(engine.core), len(mlc_nb.engines())]") == [core, 1]
    # A traceback, Out and _ refer to handles, and to nothing of the model.
    loaded.run("engine")
    loaded.run("engine.core.metrics(), engine.core._loop._runner.nothing")
    before = value_of(loaded, "mlc_nb.registry.memory_table().process_bytes")
    weights = value_of(loaded, "mlc_nb.engines()[0].weight_bytes")
    run(loaded, "mlc_nb.unload(); gc.collect()")
    assert value_of(loaded, "mlc_nb.engines()") == []
    assert before - value_of(loaded, "mlc_nb.registry.memory_table().process_bytes") > weights * 0.95


def test_running_the_cell_again_never_holds_two_copies(loaded: Kernel) -> None:
    table = "mlc_nb.registry.memory_table().process_bytes"
    before = value_of(loaded, table)
    weights = value_of(loaded, "mlc_nb.engines()[0].weight_bytes")
    run(loaded, "import resource\npeak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss")
    for _ in range(3):
        run(loaded, LOAD)
    assert value_of(loaded, table) < before + weights * 0.2
    grown = value_of(loaded, "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak") * 1024
    assert grown < weights * 0.2


def test_reload_ext_keeps_engines_and_wraps_the_kernel_once(loaded: Kernel) -> None:
    core = value_of(loaded, "id(engine.core)")
    for _ in range(3):
        run(loaded, "%reload_ext mlc_nb")
    assert value_of(loaded, "[id(mlc_nb.MLCEngine().core), len(mlc_nb.engines())]") == [core, 1]
    run(loaded, "%unload_ext mlc_nb")
    assert value_of(loaded, "'do_shutdown' in vars(get_ipython().kernel)") is False
    assert "Paris" in value_of(loaded, "ask()")


@pytest.mark.parametrize("way", ["exit", "pool"])
def test_a_forked_child_takes_nothing_along(loaded: Kernel, way: str) -> None:
    if way == "pool":
        code = """
import multiprocessing
with multiprocessing.get_context("fork").Pool(2) as pool:
    results = pool.map(abs, [-1, -2])
assert results == [1, 2]
"""
    else:
        code = """
import os
child = os.fork()
if not child:
    try:
        assert mlc_nb.engines() == []
        engine.terminate()
        del engine
        gc.collect()
    finally:
        os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
"""
    run(loaded, "import warnings; warnings.simplefilter('ignore', DeprecationWarning)\n" + code)
    run(loaded, "engine = mlc_nb.MLCEngine()")
    assert "Paris" in value_of(loaded, "ask()")
    assert value_of(loaded, "len(mlc_nb.engines())") == 1


@pytest.fixture
def copied_package(tmp_path: Path, warm_model: Path) -> Iterator[tuple[Kernel, Path]]:
    """A kernel that imports a copy of the package, whose files may change."""
    del warm_model
    package = tmp_path / "packages" / "mlc_nb"
    shutil.copytree(Path(mlc_nb.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    kernel = Kernel(tmp_path, packages=package.parent)
    yield kernel, package
    kernel.close()


def test_autoreload_of_changed_modules_loses_no_engine(copied_package: tuple[Kernel, Path]) -> None:
    kernel, package = copied_package
    run(kernel, "%load_ext autoreload\n%autoreload 2\n" + LOAD)
    core = value_of(kernel, "id(engine.core)")
    for name in RELOADED:
        with (package / f"{name}.py").open("a") as file:
            file.write(f"\nRELOADED_{name.upper()} = True\n")
    run(kernel, "import mlc_nb.registry, mlc_nb.lifecycle, mlc_nb.presence, mlc_nb.child, mlc_nb.admission")
    for name in RELOADED:
        assert value_of(kernel, f"mlc_nb.{name}.RELOADED_{name.upper()}") is True
    assert value_of(kernel, "[id(mlc_nb.MLCEngine().core), len(mlc_nb.engines())]") == [core, 1]
    assert "Paris" in value_of(kernel, "ask()")
    popen = kernel.manager.provisioner.process
    kernel.process.terminate()
    assert popen.wait(5) == -15
    assert kernel.complaints == ""
