"""The async engine on the real model: any loop, several at once, and pages back however a stream is left."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from mlc_nb.engine.async_engine import AsyncMLCEngine
from mlc_nb.engine.engine import MLCEngine
from mlc_nb.errors import RequestAborted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me a long story."}],
    "max_tokens": 400,
    "temperature": 0,
    "extra_body": {"debug_config": {"ignore_eos": True}},
}
SHORT: dict[str, Any] = {**LONG, "max_tokens": 8}
SLOW_SCHEMA = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncMLCEngine]:
    opened = AsyncMLCEngine(mode="server", engine_config={"max_single_sequence_length": 1024})
    yield opened
    opened.terminate()


async def cancel_a_whole_answer(engine: AsyncMLCEngine) -> None:
    task = asyncio.create_task(engine.chat.completions.create(**LONG))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancel_a_reader(engine: AsyncMLCEngine) -> None:
    async def read() -> None:
        async for _ in await engine.chat.completions.create(stream=True, **LONG):
            pass

    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(read(), 0.15)


async def close_a_stream(engine: AsyncMLCEngine) -> None:
    stream = await engine.chat.completions.create(stream=True, **LONG)
    await anext(stream)
    await stream.aclose()
    assert [chunk async for chunk in stream] == []


async def drop_a_stream(engine: AsyncMLCEngine) -> None:
    stream = await engine.chat.completions.create(stream=True, **LONG)
    await anext(stream)
    del stream
    gc.collect()


async def break_out(engine: AsyncMLCEngine) -> None:
    async for _ in await engine.chat.completions.create(stream=True, n=3, **LONG):
        break


async def abort_by_id(engine: AsyncMLCEngine) -> None:
    stream = await engine.chat.completions.create(stream=True, request_id="mine", **LONG)
    await anext(stream)
    await engine.abort("mine")
    with pytest.raises(RequestAborted):
        async for _ in stream:
            pass


@pytest.mark.parametrize(
    "leave", [cancel_a_whole_answer, cancel_a_reader, close_a_stream, drop_a_stream, break_out, abort_by_id]
)
def test_pages_come_back_within_a_step(
    engine: AsyncMLCEngine, leave: Callable[[AsyncMLCEngine], Awaitable[None]]
) -> None:
    async def run() -> None:
        expected = await engine.chat.completions.create(**SHORT)
        free = (await engine.metrics()).free_pages
        await leave(engine)
        deadline = time.monotonic() + 1.0
        while (await engine.metrics()).running_requests or (await engine.metrics()).free_pages != free:
            assert time.monotonic() < deadline, "pages were not returned"
            await asyncio.sleep(0.01)
        again = await engine.chat.completions.create(**SHORT)
        assert again.choices[0].message == expected.choices[0].message

    asyncio.run(run())


def test_loops_one_after_the_other_and_at_once(engine: AsyncMLCEngine) -> None:
    async def ask() -> list[str | None]:
        answers = await asyncio.gather(*(engine.chat.completions.create(**SHORT) for _ in range(3)))
        return [answer.choices[0].message.content for answer in answers]

    first = asyncio.run(ask())
    assert len(set(first)) == 1
    results: list[list[str | None]] = []
    threads = [threading.Thread(target=lambda: results.append(asyncio.run(ask()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [first] * 3
    assert asyncio.run(ask()) == first


def test_the_sync_engine_of_the_same_core_in_a_running_loop(engine: AsyncMLCEngine) -> None:
    async def ask() -> tuple[str | None, str | None]:
        sync = MLCEngine(mode="server", engine_config={"max_single_sequence_length": 1024})
        chunks = [chunk.choices[0].delta.content for chunk in sync.chat.completions.create(stream=True, **SHORT)]
        answer = await engine.chat.completions.create(**SHORT)
        sync.terminate()
        return "".join(chunks), answer.choices[0].message.content

    from_sync, from_async = asyncio.run(ask())
    assert from_sync == from_async


def test_a_slow_grammar_and_a_long_prompt_do_not_hold_up_the_loop(engine: AsyncMLCEngine) -> None:
    """What a request needs before it is submitted runs beside the loop."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SLOW_SCHEMA}}
    words = [{"role": "user", "content": "word " * 50_000}]

    async def run() -> float:
        longest, last = 0.0, time.perf_counter()
        tasks = [
            asyncio.create_task(engine.chat.completions.create(**{**SHORT, "response_format": form})),
            asyncio.create_task(engine.chat.completions.create(**{**SHORT, "messages": words})),
        ]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.005)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        await asyncio.gather(*tasks, return_exceptions=True)
        return longest

    assert asyncio.run(run()) < 0.5


def test_top_level_await_without_any_patch() -> None:
    code = (
        "import asyncio, mlc_nb\n"
        "engine = mlc_nb.AsyncMLCEngine()\n"
        "async def main():\n"
        "    async for chunk in await engine.chat.completions.create(\n"
        "        messages=[{'role': 'user', 'content': 'Hi'}], max_tokens=3, stream=True\n"
        "    ):\n"
        "        pass\n"
        "    return chunk.choices[0].finish_reason\n"
        "print(asyncio.run(main()), asyncio.run(main()))\n"
        "import sys; print('nest_asyncio' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["length", "length", "False"]
