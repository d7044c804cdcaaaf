"""The threads that share a kernel's loops: every item once, whatever the sizes; asleep when idle; gone when closed."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tvm
import tvm_ffi_orcjit
from tvm import tirx
from tvm.tirx.script import builder as T  # noqa: N812 - the name that every TIR source uses

from mlc_nb.compiler.kernels.cpu.crew import write_crew
from mlc_nb.compiler.kernels.cpu.isa import ISA_LEVELS, isa_level
from mlc_nb.compiler.kernels.cpu.vector import build_kernel
from mlc_nb.compiler.pipeline import pass_context, target_of
from mlc_nb.runtime.crew import WorkerCrew
from tests.compiler.compiled import LEVELS, tensor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REFUSED = -7


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A kernel ``count(items)`` that adds its index to every item, and refuses one with the value -7; and the crew."""

    def body() -> None:
        size = tirx.Var("size", "int32")
        items = T.match_buffer(T.arg("items", T.handle()), (size,), "int32")
        with T.parallel(0, size) as i:
            with T.Assert(items[i] != REFUSED, "refused"):
                pass
            T.buffer_store(items, items[i] + i, [i])

    directory = tmp_path_factory.mktemp("crew")
    level = isa_level(LEVELS[0])
    with pass_context():
        function = build_kernel(body).with_attr("global_symbol", "count")
        built = tvm.compile(tvm.IRModule({"count": function}), target=target_of(level)).mod
    built.write_to_file(str(directory / "model.o"), "o")
    write_crew(level, directory / "crew.o")
    return [str(directory / "model.o"), str(directory / "crew.o")]


@pytest.fixture
def kernels(objects: list[str]) -> Any:
    return tvm_ffi_orcjit.default_session().load_module(objects, cxx="no-compiler-is-needed")


@pytest.fixture(params=[1, 2, 3, 8])
def crew(kernels: Any, request: pytest.FixtureRequest) -> Iterator[WorkerCrew]:
    crew = WorkerCrew(kernels, request.param)
    yield crew
    crew.close()


@pytest.mark.usefixtures("crew")
def test_every_item_is_done_once(kernels: Any) -> None:
    for size in (1, 2, 15, 16, 17, 31, 128, 1000):
        items = tensor(np.zeros(size, np.int32))
        for _ in range(200):
            kernels["count"](items)
        assert np.array_equal(items.numpy(), 200 * np.arange(size))


@pytest.mark.usefixtures("crew")
def test_a_task_that_fails_is_an_error_and_the_next_loop_runs(kernels: Any) -> None:
    bad = np.zeros(100, np.int32)
    bad[70] = REFUSED
    with pytest.raises(Exception, match=r"refused|reported failure"):
        kernels["count"](tensor(bad))
    good = tensor(np.zeros(100, np.int32))
    kernels["count"](good)
    assert np.array_equal(good.numpy(), np.arange(100))


def test_two_crews_at_once(objects: list[str]) -> None:
    session = tvm_ffi_orcjit.default_session()
    libraries = [session.load_module(objects, cxx="no-compiler-is-needed") for _ in range(2)]
    crews = [WorkerCrew(library, 3) for library in libraries]
    results = [tensor(np.zeros(500, np.int32)) for _ in libraries]

    def count(library: Any, items: Any) -> None:
        for _ in range(500):
            library["count"](items)

    threads = [threading.Thread(target=count, args=arguments) for arguments in zip(libraries, results, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for crew in crews:
        crew.close()
    assert all(np.array_equal(items.numpy(), 500 * np.arange(500)) for items in results)


def test_idle_threads_sleep(kernels: Any) -> None:
    crew = WorkerCrew(kernels, 4)
    items = tensor(np.zeros(500, np.int32))
    kernels["count"](items)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05
    kernels["count"](items)  # and wake up
    assert np.array_equal(items.numpy(), 2 * np.arange(500))
    crew.close()


def test_close_ends_the_threads(kernels: Any) -> None:
    before = threading.active_count()
    crew = WorkerCrew(kernels, 4)
    assert threading.active_count() == before + 3
    crew.close()
    assert threading.active_count() == before
    crew.close()


@pytest.mark.parametrize("name", ISA_LEVELS)
def test_there_is_a_crew_for_every_level(name: str, tmp_path: Path) -> None:
    write_crew(isa_level(name), tmp_path / "crew.o")
    assert (tmp_path / "crew.o").read_bytes().startswith(b"\x7fELF")
