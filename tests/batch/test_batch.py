"""``mlc_nb.batch`` with the real model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import mlc_nb

if TYPE_CHECKING:
    from mlc_nb.batch.result import BatchItem, BatchResult

GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "progress": False}


def run(*arguments: Any, **options: Any) -> BatchResult:
    return asyncio.run(mlc_nb.batch(*arguments, **options))


@pytest.fixture(scope="module", autouse=True)
def engine() -> Any:
    with mlc_nb.MLCEngine() as engine:
        yield engine


def test_answers_come_in_the_order_of_the_requests(engine: mlc_nb.MLCEngine) -> None:
    prompts = [f"Tell me something about {subject}." for subject in ("France", "bread", "the moon", "cats", "rain")]
    alone = [
        engine.chat.completions.create(messages=[{"role": "user", "content": prompt}], max_tokens=12, temperature=0)
        for prompt in prompts
    ]
    result = run(prompts * 2, **GREEDY)
    assert [item.index for item in result] == list(range(10))
    assert result.texts == [answer.choices[0].message.content for answer in alone] * 2
    assert len(set(result.texts)) == 5
    assert result.errors == []
    assert result.completion_tokens == 2 * sum(answer.usage.completion_tokens for answer in alone)


def test_a_request_may_be_a_prompt_messages_or_fields() -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    result = run([question["content"], [question], {"messages": [question], "max_tokens": 2}], **GREEDY)
    assert result.texts[0] == result.texts[1]
    assert result[2].response is not None
    assert result[2].response.usage.completion_tokens == 2


def test_a_request_that_fails_ends_no_other() -> None:
    result = run(["Hi", 3, {"prompt": "x"}, "word " * 9000, "Hi"], **GREEDY)
    assert [item.index for item in result.errors] == [1, 2, 3]
    assert all(isinstance(item.error, mlc_nb.BadRequestError) for item in result.errors)
    assert result.texts[0] == result.texts[4] != None  # noqa: E711 - both, and not None
    assert "3 failed" in result.summary()
    bundle = result._repr_mimebundle_()
    assert "BadRequestError: a request must be a prompt" in bundle["text/plain"]
    assert "<td" in bundle["text/html"]


def test_no_more_than_asked_for_run_at_a_time(engine: mlc_nb.MLCEngine) -> None:
    async def most_running() -> int:
        task = asyncio.ensure_future(
            mlc_nb.batch(["Tell me a story."] * 6, concurrency=2, max_tokens=30, progress=False)
        )
        most = 0
        while not task.done():
            metrics = engine.metrics()
            most = max(most, metrics.running_requests + metrics.waiting_requests)
            await asyncio.sleep(0.005)
        await task
        return most

    assert asyncio.run(most_running()) == 2


def test_a_cancelled_batch_leaves_nothing_running(engine: mlc_nb.MLCEngine) -> None:
    async def cancel() -> None:
        task = asyncio.ensure_future(mlc_nb.batch(["Tell me a story."] * 20, max_tokens=500, progress=False))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(100):
            if engine.metrics().running_requests + engine.metrics().waiting_requests == 0:
                return
            await asyncio.sleep(0.02)
        pytest.fail("requests went on")

    asyncio.run(cancel())


def test_items_are_told_as_they_come_and_an_engine_can_be_given() -> None:
    async def ask() -> list[BatchItem]:
        told: list[BatchItem] = []
        async with mlc_nb.AsyncMLCEngine() as engine:
            result = await mlc_nb.batch(["a", "b", "c"], engine=engine, on_item=told.append, **GREEDY)
            assert sorted(told, key=lambda item: item.index) == list(result)
            assert await mlc_nb.batch([], engine=engine) is not None
            with pytest.raises(mlc_nb.BadRequestError, match="a model or an engine"):
                await mlc_nb.batch(["a"], engine=engine, model="smollm2")
        return told

    assert len(asyncio.run(ask())) == 3


@pytest.mark.parametrize("requests", ["one prompt", 3, {"messages": []}, b"x", None])
def test_what_is_no_list_of_requests_is_refused(requests: object) -> None:
    with pytest.raises(mlc_nb.BadRequestError, match="must be a list"):
        run(requests)


@pytest.mark.parametrize("concurrency", [0, -1, 1.5, "2", True])
def test_a_wrong_concurrency_is_refused(concurrency: object) -> None:
    with pytest.raises(mlc_nb.BadRequestError, match="concurrency must be a whole number"):
        run(["a"], concurrency=concurrency)


def test_the_package_can_be_called_whoever_imports_it_first() -> None:
    code = (
        "import asyncio, mlc_nb.batch.run, mlc_nb\n"
        "print(asyncio.run(mlc_nb.batch(['Hi'], max_tokens=3, temperature=0)).texts)\n"
        "mlc_nb.show_logprobs(mlc_nb.MLCEngine().chat.completions.create(\n"
        "    messages=[{'role': 'user', 'content': 'Hi'}], max_tokens=2, temperature=0, logprobs=True))\n"
    )
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("['Hello! How']\n")
    assert "Hello" in finished.stdout.splitlines()[2]
    assert finished.stderr == ""
