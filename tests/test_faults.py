"""Faults injected into the real engine: a clear error or a repair, never a hang or a wrong answer."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import threading
import time
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import mlc_nb
from mlc_nb.errors import MLCError
from mlc_nb.library import library_root
from mlc_nb.runtime import arena, model_runner, parameters, sampler, step_inputs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
ANSWER = "The capital of France is Paris."
SECONDS = 20.0

ROOM = [arena, model_runner, parameters, sampler, step_inputs]
ALLOCATING = {
    "array", "arange", "argsort", "ascontiguousarray", "asarray", "concatenate", "cos", "cumsum", "empty", "exp",
    "flatnonzero", "frombuffer", "fromiter", "partition", "repeat", "sin", "where", "zeros",
}  # fmt: skip


class Allocations:
    """Hears of every allocation in `mlc_nb.runtime`, and makes one of them fail, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sites: dict[tuple[str, int], None] = {}
        self.failing: tuple[str, int] | None = None
        for module in ROOM:
            monkeypatch.setattr(module, "np", self._listening_numpy())
        monkeypatch.setattr(
            arena, "_anonymous", self._listening(arena._anonymous, OSError(12, "Cannot allocate memory"))
        )

    def _listening_numpy(self) -> ModuleType:
        proxy = ModuleType("numpy")
        proxy.__dict__.update(vars(np))
        for name in ALLOCATING:
            setattr(proxy, name, self._listening(getattr(np, name), MemoryError(f"Unable to allocate ({name})")))
        return proxy

    def _listening(self, function: Callable[..., Any], error: Exception) -> Callable[..., Any]:
        def listened(*arguments: Any, **options: Any) -> Any:
            frame = sys._getframe(1)
            site = (frame.f_code.co_filename.rpartition("/")[2], frame.f_lineno)
            self.sites[site] = None
            if site == self.failing:
                self.failing = None
                raise error
            return function(*arguments, **options)

        return listened


def use(engine: mlc_nb.MLCEngine) -> None:
    """Requests that go through every part of the runtime."""
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 3}
    engine.chat.completions.create(
        messages=QUESTION, **sampling, top_p=0.9, frequency_penalty=0.5, logprobs=True, top_logprobs=2
    )
    engine.chat.completions.create(messages=QUESTION, **sampling, top_k=5, min_p=0.1, logit_bias={"5": 1.0})
    engine.completions.create(prompt="Once upon a time", **sampling, echo=True, logprobs=1)


def ask(engine: mlc_nb.MLCEngine) -> str:
    reply = engine.chat.completions.create(messages=QUESTION, max_tokens=10, temperature=0)
    return str(reply.choices[0].message.content)


def within_time(work: Callable[[], None]) -> Exception | None:
    """Do it on a thread, so that a hang is a failure; what it raised."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "it hangs"
    return raised[0] if raised else None


def load_and_use() -> None:
    with mlc_nb.MLCEngine() as engine:
        use(engine)


def test_an_allocation_that_fails_at_any_site_of_the_runtime(warm_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del warm_model
    allocations = Allocations(monkeypatch)
    assert within_time(load_and_use) is None
    sites = list(allocations.sites)
    assert len(sites) > 25
    assert {name for name, _ in sites} == {f"{module.__name__.rpartition('.')[2]}.py" for module in ROOM}
    engine = mlc_nb.MLCEngine()
    for site in sites:
        allocations.failing = site
        # First in an engine that runs: the request or the engine fails, and says why.
        error = within_time(lambda: use(engine))  # noqa: B023 - it has ended before the next turn
        if allocations.failing is not None:  # a site of loading
            engine.terminate()
            error = within_time(load_and_use)
        assert allocations.failing is None, f"{site} was not reached"
        assert error is None or isinstance(error, MLCError), (site, error)
        if error is not None:
            assert "allocate" in str(error) or "memory" in str(error).lower(), (site, error)
        # The next engine is sound, whatever became of this one.
        engine = mlc_nb.MLCEngine()
        assert ask(engine) == ANSWER, site
    engine.terminate()
    gc.collect()
    assert mlc_nb.engines() == []


LIMITED = """
import json, resource, sys
import psutil
import mlc_nb
def ask():
    reply = mlc_nb.MLCEngine().chat.completions.create(
        messages=[{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
        max_tokens=10, temperature=0)
    return reply.choices[0].message.content
when, mebibytes = sys.argv[1], int(sys.argv[2])
ask()  # what other packages do when they are imported without memory is their own affair
if when == "loading":
    mlc_nb.unload()
_, most = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + mebibytes * 2**20, most))
outcome = []
for _ in range(2):
    try:
        outcome.append(ask())
    except mlc_nb.MLCError as error:
        outcome.append(type(error).__name__)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
print(json.dumps(outcome))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS")
@pytest.mark.parametrize(
    ("when", "mebibytes"), [("loading", 1), ("loading", 60), ("loading", 150), ("loading", 300), ("running", 1)]
)
def test_an_address_space_that_is_too_small_is_an_error_and_then_forgotten(
    warm_model: Path, when: str, mebibytes: int
) -> None:
    del warm_model
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, when, str(mebibytes)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = json.loads(done.stdout)
    assert first in (ANSWER, "OutOfMemoryError", "EngineTerminatedError", "MLCError", "ModelFormatError")
    assert second == ANSWER


def test_a_cache_that_goes_while_in_use_changes_no_answer(
    warm_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = library_root()
    model = tmp_path / "model.gguf"
    shutil.copyfile(warm_model, model)
    monkeypatch.setenv("MLC_NB_HOME", str(tmp_path / "home"))
    shutil.copytree(libraries, library_root(), ignore=shutil.ignore_patterns(".lock", ".work-*"))
    with mlc_nb.MLCEngine(model) as engine:
        for path in library_root().rglob("*"):
            if path.is_file():
                path.write_bytes(b"\0" * 100)
        shutil.rmtree(library_root())
        model.unlink()
        assert ask(engine) == ANSWER
    with pytest.raises(mlc_nb.ModelNotFoundError, match=r"There is no file .*model\.gguf"):
        mlc_nb.MLCEngine(model)


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "directory"])
def test_a_model_file_that_is_damaged_is_one_clear_error(warm_model: Path, tmp_path: Path, damage: str) -> None:
    model = tmp_path / "model.gguf"
    if damage == "directory":
        model.mkdir()
    else:
        content = warm_model.read_bytes()
        model.write_bytes(content[:5_000_000] if damage == "truncated" else b"\xff" * 4096 + content[4096:])
    with pytest.raises(MLCError, match="model"):
        mlc_nb.MLCEngine(model)
    assert mlc_nb.engines() == []


def test_jumps_of_the_clock_change_nothing(warm_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del warm_model
    real, jumps = time.time, iter(range(10**9))

    def jumping() -> float:
        return real() + (1e8 if next(jumps) % 2 else -1e8)

    monkeypatch.setattr(time, "time", jumping)
    with mlc_nb.MLCEngine(engine_config={"keep_alive": 5.0}) as engine:
        stream = engine.chat.completions.create(messages=QUESTION, stream=True, max_tokens=10, temperature=0)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == ANSWER
        assert [row.state for row in mlc_nb.engines()] == ["ready"]
        started = time.monotonic()
        engine.terminate()
        assert time.monotonic() - started < 2
