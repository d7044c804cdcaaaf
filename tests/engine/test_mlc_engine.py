from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import openai.types
import openai.types.chat
import pytest

from mlc_nb.engine.async_engine import AsyncMLCEngine
from mlc_nb.engine.engine import MLCEngine
from mlc_nb.errors import BadRequestError, EngineTerminatedError, ModelNotFoundError, RequestAborted
from tests.engine.scripted import END, VOCAB_SIZE, answering, encode, mixed

HI = [{"role": "user", "content": "Hi"}]
ANSWER = "Grüße aus Köln 👩‍👩‍👧‍👦, stop here and there"
Serve = Callable[..., None]

# One table of requests; every row is given to both engines, whole and as a stream.
CHAT_ROWS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "max_tokens": 5},
    {"max_completion_tokens": 3, "seed": 1},
    {"stop": "stop"},
    {"stop": ["here", "p h"]},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3, "stop": "here"},
    {"model": "scripted", "user": "me", "n": 1, "response_format": {"type": "text"}},
    {"extra_body": {"debug_config": {"ignore_eos": True}, "max_tokens": 60}},
    {"logit_bias": {str(END): 100}, "temperature": 0.0},
    {"request_id": "mine"},
]
COMPLETION_ROWS: list[dict[str, Any]] = [
    {"max_tokens": 5},
    {"max_tokens": 4, "echo": True, "suffix": "<end>"},
    {"logprobs": 2, "max_tokens": 4},
    {"max_tokens": 8, "stop": [" ü", "K"]},
]
OPENER = "<|im_start|>assistant\n"


def without_times(response: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = response.model_dump()
    dumped.pop("created")
    dumped.pop("id")
    if dumped.get("usage"):
        dumped["usage"].pop("extra")
    return dumped


def join_chat(chunks: list[Any]) -> dict[str, Any]:
    choices = [choice for chunk in chunks for choice in chunk.choices]
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    return {
        "text": "".join(choice.delta.content for choice in choices),
        "finish_reason": choices[-1].finish_reason,
        "tokens": [entry.token for entry in entries],
    }


@pytest.mark.parametrize("row", CHAT_ROWS, ids=str)
def test_chat_is_the_same_sync_async_whole_and_streamed(serve: Serve, row: dict[str, Any]) -> None:
    serve(answering(ANSWER))
    with MLCEngine("scripted") as engine:
        whole = engine.chat.completions.create(messages=HI, **row)
        chunks = list(
            engine.chat.completions.create(messages=HI, stream=True, stream_options={"include_usage": True}, **row)
        )

    async def run() -> tuple[Any, list[Any]]:
        async with AsyncMLCEngine("scripted") as engine:
            whole = await engine.chat.completions.create(messages=HI, **row)
            stream = await engine.chat.completions.create(
                messages=HI, stream=True, stream_options={"include_usage": True}, **row
            )
            return whole, [chunk async for chunk in stream]

    async_whole, async_chunks = asyncio.run(run())
    assert without_times(async_whole) == without_times(whole)
    assert [without_times(chunk) for chunk in async_chunks] == [without_times(chunk) for chunk in chunks]

    openai.types.chat.ChatCompletion.model_validate(whole.model_dump(), strict=True)
    for chunk in chunks:
        openai.types.chat.ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)

    choice = whole.choices[0]
    joined = join_chat(chunks)
    assert joined["text"] == choice.message.content
    assert joined["finish_reason"] == choice.finish_reason
    roles = [choice.delta.role for chunk in chunks for choice in chunk.choices]
    assert roles == ["assistant"] + [None] * (len(roles) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    if row.get("logprobs"):
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        text = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content).decode()
        assert text.startswith(choice.message.content)
        assert joined["tokens"] == [entry.token for entry in choice.logprobs.content]
        assert all(len(entry.top_logprobs) == row.get("top_logprobs", 0) for entry in choice.logprobs.content)
        assert all(entry.logprob <= 0 for entry in choice.logprobs.content)
    if "request_id" in row:
        assert whole.id == "mine"
    else:
        assert whole.id.startswith("chatcmpl-")


def test_finish_reasons_text_and_usage(serve: Serve) -> None:
    serve(answering(ANSWER))
    engine = MLCEngine("scripted")
    prompt_tokens = len(encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"))
    ended = engine.chat.completions.create(messages=HI)
    assert (ended.choices[0].finish_reason, ended.choices[0].message.content) == ("stop", ANSWER)
    assert (ended.usage.prompt_tokens, ended.usage.completion_tokens) == (prompt_tokens, len(encode(ANSWER)))
    assert ended.usage.total_tokens == prompt_tokens + len(encode(ANSWER))
    cut = engine.chat.completions.create(messages=HI, stop="stop")
    assert (cut.choices[0].finish_reason, cut.choices[0].message.content) == ("stop", ANSWER[: ANSWER.index("stop")])
    short = engine.chat.completions.create(messages=HI, max_tokens=3)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 3)
    assert short.choices[0].message.content == engine.core.model.tokenizer.decode(encode(ANSWER)[:3])
    biased = engine.chat.completions.create(messages=HI, logit_bias={END: 100}, temperature=0)
    assert (biased.choices[0].message.content, biased.usage.completion_tokens) == ("", 0)


def test_the_answer_goes_on_to_the_context_limit(serve: Serve) -> None:
    serve(answering("a" * 100), context=40)
    response = MLCEngine("scripted").chat.completions.create(messages=HI)
    assert response.choices[0].finish_reason == "length"
    assert response.usage.total_tokens == 40


@pytest.mark.parametrize("row", COMPLETION_ROWS, ids=str)
@pytest.mark.parametrize("as_ids", [False, True])
def test_completions(serve: Serve, row: dict[str, Any], as_ids: bool) -> None:
    serve(answering(ANSWER))
    prompt = encode("x" + OPENER) if as_ids else "x" + OPENER
    shown = "x" + OPENER
    with MLCEngine("scripted") as engine:
        whole = engine.completions.create(prompt=prompt, **row)
        chunks = list(engine.completions.create(prompt=prompt, stream=True, **row))

    async def run() -> Any:
        async with AsyncMLCEngine("scripted") as engine:
            streamed = await engine.completions.create(prompt=prompt, stream=True, **row)
            return await engine.completions.create(prompt=prompt, **row), [chunk async for chunk in streamed]

    async_whole, async_chunks = asyncio.run(run())
    assert without_times(async_whole) == without_times(whole)
    assert [without_times(chunk) for chunk in async_chunks] == [without_times(chunk) for chunk in chunks]
    openai.types.Completion.model_validate(whole.model_dump(), strict=True)
    choice = whole.choices[0]
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason is not None
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    if row.get("echo"):
        assert choice.text.startswith(shown)
        assert choice.text.endswith("<end>")
    if "logprobs" in row:
        logprobs = choice.logprobs
        assert logprobs is not None
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 4
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert choice.text[offset:].startswith(token) or "\ufffd" in token
        assert all(len(top) <= 2 for top in logprobs.top_logprobs)
    if "stop" in row:
        assert choice.text == "Gr" or " ü" not in choice.text


BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages is empty"),
    ({}, "messages is missing"),
    ({"messages": "Hi"}, "messages must be a list"),
    ({"messages": [*HI, {"role": "assistant", "content": "yes"}]}, "assistant message"),
    ({"messages": HI, "max_tokens": 0}, "max_tokens .*greater than or equal to 1"),
    ({"messages": HI, "max_tokens": -1}, "max_tokens"),
    ({"messages": HI, "stop": ""}, "stop holds an empty string"),
    ({"messages": HI, "temprature": 1.0}, r"temprature is not a known field \(did you mean temperature"),
    ({"messages": HI, "model": "other"}, "model is 'other', but this engine's is 'scripted'"),
    ({"messages": HI, "logit_bias": {VOCAB_SIZE: 1}}, f"token id {VOCAB_SIZE}.*0 to {VOCAB_SIZE - 1}"),
    ({"messages": HI, "stream": "yes"}, "stream should be a valid boolean"),
    ({"messages": HI, "stream_options": {"include_usage": True}}, "stream_options needs stream"),
    ({"messages": HI, "request_id": 5}, "request_id must be a string"),
    ({"messages": HI, "extra_body": 5}, "extra_body must be a dict"),
    ({"messages": HI, "extra_body": {"messages": HI}}, "messages is given twice"),
    ({"messages": HI, "extra_body": {"debug_config": {"ignore_eos": 1}}}, "debug_config.ignore_eos"),
    ({"messages": [{"role": "user", "content": "word " * 600}]}, r"has \d+ tokens.*at most 512"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_CHAT, ids=lambda value: str(value)[:40])
def test_bad_chat_requests_get_one_clear_error(serve: Serve, fields: dict[str, Any], message: str) -> None:
    serve(answering(ANSWER))
    engine = MLCEngine("scripted")
    with pytest.raises(BadRequestError, match=message) as failure:
        engine.chat.completions.create(**fields)
    assert "\n" not in str(failure.value)
    assert isinstance(failure.value, ValueError)
    assert engine.chat.completions.create(messages=HI).choices[0].message.content == ANSWER


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [VOCAB_SIZE]}, rf"prompt\[0\] is the token id {VOCAB_SIZE}"),
        ({"prompt": [-1]}, r"prompt\[0\] is the token id -1"),
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"prompt": "a", "n": 3, "best_of": 2}, "best_of must be at least n"),
        ({"prompt": "a", "messages": HI}, "messages is not a known field"),
    ],
    ids=str,
)
def test_bad_completion_requests_get_one_clear_error(serve: Serve, fields: dict[str, Any], message: str) -> None:
    serve(answering(ANSWER))
    with pytest.raises(BadRequestError, match=message):
        MLCEngine("scripted").completions.create(**fields)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "turbo"}, "mode must be one of local, interactive, server"),
        ({"engine_config": {"kv_cache_page_size": 8}}, "kv_cache_page_size"),
        ({"engine_config": {"speculative_mode": "eagle"}}, "speculative_mode is not supported yet"),
        ({"engine_config": 5}, "engine_config must be an EngineConfig"),
        ({"engine_config": {"mode": "server"}, "mode": "interactive"}, "engine_config.mode is 'server'"),
        ({"enable_tracing": True}, "enable_tracing is not supported yet"),
        ({"device": 3}, "device must be a string"),
        ({"model": 3}, "model must be a name or a path"),
    ],
    ids=str,
)
def test_bad_arguments_of_the_engine(
    serve: Serve, arguments: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    serve(answering(ANSWER))
    with pytest.raises(BadRequestError, match=message):
        MLCEngine(**{"model": "scripted", **arguments})
    gc.collect()
    assert capfd.readouterr().err == ""


def test_a_missing_model_raises_once_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelNotFoundError):
        MLCEngine("no-such-model")
    gc.collect()
    assert capfd.readouterr().err == ""
    # By name: the first engine of a process may start the permanent thread that ends things.
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("mlc_nb engine")]


def test_every_call_after_terminate_raises(serve: Serve) -> None:
    serve(answering(ANSWER))
    engine = MLCEngine("scripted")
    engine.terminate()
    engine.terminate()
    calls: list[Callable[[], object]] = [
        lambda: engine.chat.completions.create(messages=HI),
        lambda: engine.completions.create(prompt="a"),
        lambda: engine.abort("x"),
        engine.metrics,
        engine.reset,
    ]
    for call in calls:
        with pytest.raises(EngineTerminatedError, match="terminated"):
            call()


def test_a_second_call_while_a_stream_is_half_read(serve: Serve) -> None:
    serve(answering(ANSWER))
    engine = MLCEngine("scripted")
    stream = engine.chat.completions.create(messages=HI, stream=True)
    first = next(stream)
    assert engine.chat.completions.create(messages=HI).choices[0].message.content == ANSWER
    assert first.choices[0].delta.content + join_chat(list(stream))["text"] == ANSWER


def test_abort_by_id_and_the_end_of_a_with_block(serve: Serve) -> None:
    serve(answering("a" * 400), step_seconds=0.005)
    engine = MLCEngine("scripted")
    stream = engine.chat.completions.create(messages=HI, stream=True, request_id="mine")
    next(stream)
    engine.abort(stream.request_id)
    with pytest.raises(RequestAborted, match="mine"):
        list(stream)
    with engine.chat.completions.create(messages=HI, stream=True) as other:
        next(other)
    assert list(other) == []
    wait_until_free(engine)


def wait_until_free(engine: MLCEngine | AsyncMLCEngine) -> None:
    deadline = time.monotonic() + 0.5
    while engine.core.metrics().running_requests:
        assert time.monotonic() < deadline, "the request was not aborted within a step"
        time.sleep(0.005)


def test_cancelled_closed_and_dropped_async_streams_are_aborted(serve: Serve) -> None:
    serve(answering("a" * 400), step_seconds=0.005)
    engine = AsyncMLCEngine("scripted")

    async def cancelled() -> None:
        task = asyncio.create_task(engine.chat.completions.create(messages=HI))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def closed() -> None:
        async with await engine.chat.completions.create(messages=HI, stream=True) as stream:
            await anext(stream)

    async def dropped() -> None:
        async for _ in await engine.chat.completions.create(messages=HI, stream=True):
            break

    async def left_by_a_generator() -> None:
        async def texts() -> AsyncIterator[str]:
            async for chunk in await engine.chat.completions.create(messages=HI, stream=True):
                yield chunk.choices[0].delta.content

        generator = texts()
        await anext(generator)
        await generator.aclose()

    for leave in (cancelled, closed, dropped, left_by_a_generator):
        asyncio.run(leave())  # a new event loop each time
        wait_until_free(engine)
    assert engine.core.metrics().aborted_requests == 4


def test_one_async_engine_in_several_loops_at_once(serve: Serve) -> None:
    serve(answering(ANSWER))
    engine = AsyncMLCEngine("scripted")
    texts: list[str | None] = []

    async def ask() -> None:
        responses = await asyncio.gather(*(engine.chat.completions.create(messages=HI) for _ in range(4)))
        texts.extend(response.choices[0].message.content for response in responses)

    threads = [threading.Thread(target=asyncio.run, args=(ask(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert texts == [ANSWER] * 12


def test_the_sync_engine_in_a_running_loop(serve: Serve) -> None:
    serve(answering(ANSWER))

    async def ask() -> str:
        return MLCEngine("scripted").chat.completions.create(messages=HI).choices[0].message.content

    assert asyncio.run(ask()) == ANSWER


def test_async_abort_metrics_and_reset(serve: Serve) -> None:
    serve(answering("a" * 400), step_seconds=0.005)

    async def run() -> None:
        async with AsyncMLCEngine("scripted") as engine:
            stream = await engine.chat.completions.create(messages=HI, stream=True, request_id="a")
            await anext(stream)
            await engine.abort("a")
            with pytest.raises(RequestAborted):
                await anext_until_error(stream)
            assert (await engine.metrics()).aborted_requests == 1
            await engine.reset()
            assert (await engine.metrics()).as_dict()["aborted_requests"] == 0
        with pytest.raises(EngineTerminatedError):
            await engine.chat.completions.create(messages=HI)

    asyncio.run(run())


async def anext_until_error(stream: Any) -> None:
    async for _ in stream:
        pass


def test_several_answers_differ_by_their_seeds_and_come_back_by_index(serve: Serve) -> None:
    serve(mixed, sharpness=3.0)
    fields: dict[str, Any] = {"messages": HI, "n": 3, "seed": 5, "max_tokens": 6, "temperature": 1.0}
    with MLCEngine("scripted") as engine:
        one = engine.chat.completions.create(**{**fields, "n": 1})
        whole = engine.chat.completions.create(**fields)
        chunks = list(engine.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    openai.types.chat.ChatCompletion.model_validate(whole.model_dump())
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert texts[0] == one.choices[0].message.content
    assert len(set(texts)) == 3
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 18
    for index, text in enumerate(texts):
        pieces = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(piece.delta.content for piece in pieces) == text
        assert [piece.delta.role for piece in pieces if piece.delta.role] == ["assistant"]
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [18]


def test_the_best_of_several_answers_have_the_likeliest_tokens(serve: Serve) -> None:
    serve(mixed, sharpness=3.0)
    fields: dict[str, Any] = {"prompt": "a", "seed": 5, "max_tokens": 4, "temperature": 1.0}
    with MLCEngine("scripted") as engine:
        everything = engine.completions.create(**fields, n=6, logprobs=0, echo=False, suffix="!")
        best = engine.completions.create(**fields, n=2, best_of=6, suffix="!")
        with pytest.raises(BadRequestError, match="best_of cannot be streamed"):
            engine.completions.create(**fields, best_of=2, stream=True)
    means = [sum(choice.logprobs.token_logprobs) / 4 for choice in everything.choices if choice.logprobs]
    ranked = sorted(range(6), key=lambda index: means[index], reverse=True)
    assert [choice.text for choice in best.choices] == [everything.choices[index].text for index in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert all(choice.logprobs is None for choice in best.choices)
    assert best.usage is not None
    assert best.usage.completion_tokens == 24


@pytest.mark.parametrize("n", [1, 3])
def test_an_echo_with_logprobs_scores_every_token_of_the_prompt_but_the_first(serve: Serve, n: int) -> None:
    serve(mixed, sharpness=3.0)
    prompt = [*encode("Grüße aus Köln, the quick brown fox"), END] * 6
    fields: dict[str, Any] = {"prompt": prompt, "logprobs": 2, "max_tokens": 4, "echo": True, "n": n, "seed": 1}
    with MLCEngine("scripted") as engine:
        engine.completions.create(**{**fields, "echo": False})
        whole = engine.completions.create(**fields)
        chunks = list(engine.completions.create(**fields, stream=True))
    for choice in whole.choices:
        logprobs = choice.logprobs
        assert logprobs is not None
        assert len(logprobs.tokens) == len(prompt) + 4
        assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
        likely = [mixed(prompt[:end]) == prompt[end] for end in range(1, len(prompt))]
        total = np.log(np.exp(3.0) + VOCAB_SIZE - 1)
        expected = [3.0 - total if is_likely else -total for is_likely in likely]
        assert logprobs.token_logprobs[1 : len(prompt)] == pytest.approx(expected, abs=1e-4)
        assert all(len(top or {}) == 2 for top in logprobs.top_logprobs[1:])
        assert logprobs.text_offset == sorted(logprobs.text_offset)
        for token, offset in list(zip(logprobs.tokens, logprobs.text_offset, strict=True))[: len(prompt)]:
            assert "\ufffd" in token or choice.text[offset:].startswith(token)
        pieces = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == choice.index]
        assert [token for piece in pieces if piece.logprobs for token in piece.logprobs.tokens] == logprobs.tokens
        assert pieces[0].logprobs.token_logprobs == logprobs.token_logprobs[: len(prompt)]
