"""Limits, room for new engines, and the end of idle ones, on scripted models; and the table of memory of a real one."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import pytest

import mlc_nb
from mlc_nb import admission, registry
from mlc_nb.admission import MemoryPolicy, configure_memory, memory_policy
from mlc_nb.engine.core import EngineCore
from mlc_nb.engine.memory_plan import MemoryPlan
from mlc_nb.errors import BadRequestError, EngineTerminatedError, OutOfMemoryError
from mlc_nb.runtime.memory import MemoryNeeds
from tests.engine.scripted import make_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mlc_nb.engine.room import Room
    from mlc_nb.protocol.engine_config import EngineConfig

GIB = 2**30
HELLO = [{"role": "user", "content": "hi"}]


def load(model: str, device: str, model_lib: str | None, config: EngineConfig, room: Room) -> EngineCore:
    """Plan 1 GiB of imaginary weights for a scripted model; so much KV cache that they matter alone."""
    del model, device, model_lib
    plan = MemoryPlan(MemoryNeeds(GIB, 1, 0, 0), 16, room.free_bytes(), room.most_bytes())
    if plan.missing:
        if not room.make(plan.missing):
            raise plan.refusal(room.others(), configured=False)
        plan = MemoryPlan(plan.needs, 16, room.free_bytes(), room.most_bytes())
        assert not plan.missing
    room.take(plan.size)
    return EngineCore(make_model(step_seconds=0.005, context=2048, num_pages=128), config, room)


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    assert mlc_nb.engines() == []
    monkeypatch.setattr(registry, "create_core", load)
    monkeypatch.setattr(admission, "_policy", MemoryPolicy())
    yield
    mlc_nb.unload(all=True)


def get(name: str, **config: object) -> mlc_nb.MLCEngine:
    return mlc_nb.get_engine(f"/models/{name}.gguf", engine_config=config)


def loaded() -> list[str]:
    return [row.model.removeprefix("/models/").removesuffix(".gguf") for row in mlc_nb.engines()]


def test_the_engine_idle_longest_goes_when_room_is_wanted(caplog: pytest.LogCaptureFixture) -> None:
    configure_memory(memory_limit="2.5 GiB")
    first, second = get("a"), get("b")
    time.sleep(0.01)
    first.chat.completions.create(messages=HELLO, max_tokens=2)
    with caplog.at_level(logging.WARNING):
        get("c")
    assert loaded() == ["a", "c"]
    assert "Unloading /models/b.gguf, idle for 0 s, to make room for /models/c.gguf" in caplog.text
    with pytest.raises(EngineTerminatedError):
        second.chat.completions.create(messages=HELLO)
    assert get("b").core is not second._core
    assert loaded() == ["c", "b"]


def test_busy_and_pinned_engines_stay_and_the_refusal_says_what_would_help() -> None:
    configure_memory(memory_limit=int(2.5 * GIB))
    busy, _ = get("busy"), get("pinned", pinned=True)
    stream = busy.chat.completions.create(messages=HELLO, stream=True)
    next(stream)
    with pytest.raises(OutOfMemoryError) as refusal:
        get("c")
    text = str(refusal.value)
    assert "unloading /models/busy.gguf, which holds 1,024.0 MiB" in text
    assert "unloading /models/pinned.gguf" in text
    assert "a higher memory_limit" in text
    assert loaded() == ["busy", "pinned"]
    assert [row.pinned for row in mlc_nb.engines()] == [False, True]
    stream.close()
    deadline = time.monotonic() + 2
    while mlc_nb.engines()[0].idle_seconds == 0:
        assert time.monotonic() < deadline
    get("c")
    assert loaded() == ["pinned", "c"]


def test_pinning_makes_no_other_engine_and_eviction_can_be_switched_off() -> None:
    configure_memory(memory_limit=1.5 * GIB, evict=False)
    first = get("a")
    assert get("a", pinned=True, keep_alive=1000).core is first.core
    with pytest.raises(OutOfMemoryError):
        get("b")
    configure_memory(evict=True)
    with pytest.raises(OutOfMemoryError):
        get("b")
    configure_memory(memory_limit=None)
    get("b")
    assert loaded() == ["a", "b"]


def test_nothing_is_unloaded_in_vain() -> None:
    get("a")
    get("b")
    configure_memory(memory_limit=0.5 * GIB)
    with pytest.raises(OutOfMemoryError):
        get("c")
    assert loaded() == ["a", "b"]


def test_what_was_granted_counts_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def free_bytes(self) -> int:
            return int(1.5 * GIB)

    monkeypatch.setattr(admission, "device_memory", lambda _device: Device())
    get("a", pinned=True)
    with pytest.raises(OutOfMemoryError, match=r"free +512\.0 MiB"):
        get("b")


@pytest.mark.parametrize("way", ["config", "policy"])
def test_idle_engines_go_after_their_time(way: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        if way == "policy":
            configure_memory(keep_alive=0.3)
            engine = get("a")
        else:
            engine = get("a", keep_alive=0.3)
        get("b", pinned=True, keep_alive=0)
        get("c", keep_alive=1000)
        stream = engine.chat.completions.create(messages=HELLO, stream=True)
        started = time.monotonic()
        while time.monotonic() < started + 1.2:
            next(stream)
        stream.close()
        assert loaded() == ["a", "b", "c"]
        while "a" in loaded():
            assert time.monotonic() < started + 6
            time.sleep(0.02)
    assert loaded() == ["b", "c"]
    assert "Unloading /models/a.gguf, which was idle for" in caplog.text


@pytest.mark.parametrize(
    ("limit", "size"),
    [(5, 5), ("5", 5), ("2 KiB", 2048), ("2.5GiB", int(2.5 * GIB)), ("3 gb", 3 * 10**9), ("1.5M", 1_500_000)],
)
def test_sizes_are_read_with_their_units(limit: float | str, size: int) -> None:
    assert configure_memory(memory_limit=limit).memory_limits == {"cpu": size}
    assert configure_memory(memory_limit={"cpu": limit}, keep_alive=3) == MemoryPolicy({"cpu": size}, True, 3)
    assert configure_memory(memory_limit=None) == memory_policy() == MemoryPolicy({}, True, 3)


@pytest.mark.parametrize(
    "limit", [0, -5, "", "much", "5 apples", "-1 GiB", float("nan"), True, [1], "0 GiB", "1 2 GiB"]
)
def test_sizes_that_are_none_are_refused(limit: object) -> None:
    with pytest.raises(BadRequestError, match="memory_limit must be bytes or a text"):
        configure_memory(memory_limit=limit)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [-1, "soon", float("nan")])
def test_a_time_that_is_none_is_refused(seconds: object) -> None:
    with pytest.raises(BadRequestError, match="keep_alive must be a number of seconds or None"):
        configure_memory(keep_alive=seconds)  # type: ignore[arg-type]
    assert memory_policy() == MemoryPolicy()


def test_the_rows_of_memory_add_up_to_what_the_process_takes(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    before = mlc_nb.registry.memory_table()
    engine = mlc_nb.MLCEngine(smollm2_path)
    loaded = mlc_nb.registry.memory_table()
    engine.chat.completions.create(messages=HELLO, max_tokens=30)
    used = mlc_nb.registry.memory_table()
    for table in (before, loaded, used):
        assert sum(row.size for row in table.rows) == pytest.approx(table.process_bytes, rel=0.05)
        assert 0 < table.free_bytes <= table.total_bytes
    rows = {row.purpose: row.size for row in used.rows}
    weights, kv_cache = rows[f"{smollm2_path}: weights"], rows[f"{smollm2_path}: KV cache"]
    (row,) = mlc_nb.engines()
    assert weights == pytest.approx(row.weight_bytes, rel=0.02)
    assert 0 < kv_cache <= row.kv_bytes
    assert row.memory_bytes == sum(size for purpose, size in rows.items() if purpose.startswith(str(smollm2_path)))
    # What the engine measures of itself is what the process grew by.
    assert loaded.process_bytes - before.process_bytes > weights * 0.95
    engine.terminate()
    after = mlc_nb.registry.memory_table()
    assert [row.purpose for row in after.rows] == [row.purpose for row in before.rows]
    assert used.process_bytes - after.process_bytes > (weights + kv_cache) * 0.95


def test_the_kv_cache_is_resized_and_the_weights_stay(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with mlc_nb.MLCEngine(smollm2_path, engine_config={"max_total_sequence_length": 4096}) as engine:

        def answer() -> str:
            reply = engine.chat.completions.create(messages=HELLO, max_tokens=20, temperature=0)
            return reply.choices[0].message.content

        first = answer()
        before = mlc_nb.engines()[0]
        engine.resize_kv_cache(1024)
        (after,) = mlc_nb.engines()
        assert (before.pages_total, after.pages_total) == (256, 64)
        assert after.kv_bytes * 4 == before.kv_bytes
        assert (after.pages_used, after.weight_bytes) == (0, before.weight_bytes)
        assert after.memory_bytes < before.memory_bytes
        assert engine.config.max_total_sequence_length == 1024
        assert answer() == first
        with pytest.raises(BadRequestError, match="at most 1024"):
            engine.completions.create(prompt=[5] * 1500)
        stream = engine.chat.completions.create(messages=HELLO, stream=True)
        next(stream)
        with pytest.raises(BadRequestError, match="Requests are in flight"):
            engine.resize_kv_cache(2048)
        stream.close()
        engine.completions.create(prompt="a", max_tokens=1)
        configure_memory(memory_limit="256 MiB")
        with pytest.raises(OutOfMemoryError, match=r"max_total_sequence_length of at most"):
            engine.resize_kv_cache(90_000)
        configure_memory(memory_limit=None)
        with pytest.raises(BadRequestError, match="32 bits"):
            engine.resize_kv_cache(10**9)
        engine.resize_kv_cache(8192)
        assert answer() == first
        assert mlc_nb.engines()[0].pages_total == 512
