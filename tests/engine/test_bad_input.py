"""Whatever is typed: one clear error from both engines, and the next request is answered as if nothing had been."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mlc_nb.engine.async_engine import AsyncMLCEngine
from mlc_nb.engine.engine import MLCEngine
from mlc_nb.errors import BadRequestError, MLCError, RequestAborted
from mlc_nb.protocol.common import short_repr
from tests.engine.scripted import VOCAB_SIZE, answering

Serve = Callable[..., None]
HI = [{"role": "user", "content": "Hi"}]
ANSWER = "Grüße aus Köln 👩‍👩‍👧‍👦"
DEEP = "[" * 100_000


def schema(value: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


def tool(parameters: object) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


SHARED_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"stop": ""}, "stop holds an empty string"),
    ({"stop": ["a", ""]}, "stop holds an empty string"),
    ({"stop": ["a"] * 17}, "stop holds 17 strings"),
    ({"stop": 5}, "stop must be"),
    ({"stop": "\ud800"}, "stop.*lone surrogate"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"n": 0}, "n should be"),
    ({"n": 10**9}, "n should be"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    *(({"repetition_penalty": x}, "repetition_penalty should be") for x in (0, 1e-300, 1e-45, 1e39, 1e300)),
    ({"temperature": 1e39}, "temperature should be"),
    ({"max_tokens": 10**23}, "max_tokens should be less than or equal to 2147483648"),
    ({"max_tokens": 10**5000}, "max_tokens should be .*number of 16610 bits"),
    ({"top_k": 10**5000}, "top_k should be"),
    ({"logit_bias": {10**5000: 1}}, "not a token id"),
    ({"model": "m" * 100_000}, r"model is 'm+\.\.\.m+', but this engine's is"),
    ({"extra_body": {"x" * 100_000: 1}}, r"x\.\.\.x+ is not a known field"),
    (
        {"response_format": {"type": "json_object", "schema": 5}},
        r"request: response_format.schema should be a valid string or a valid dictionary, got 5 \(int\)\.$",
    ),
    ({"seed": 2**64}, "seed"),
    ({"logit_bias": {VOCAB_SIZE: 1}}, f"logit_bias names the token id {VOCAB_SIZE}"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"model": "gpt-4"}, "model is 'gpt-4', but this engine's is"),
    ({"stream_options": {"include_usage": True}}, "stream_options needs stream"),
    ({"debug_config": {"ignore_eos": 1}}, "debug_config.ignore_eos"),
    ({"debug_config": {"special_request": "query_engine_metrics"}}, "special_request is not supported yet"),
    ({"extra_body": {"no_such_field": 1}}, "no_such_field is not a known field"),
    ({"extra_body": 5}, "extra_body must be a dict"),
    ({"request_id": 5}, "request_id must be a string"),
    ({"request_id": "\ud800"}, "printable"),
    ({"request_id": "x" * 1000}, "at most 256"),
    ({"response_format": {"type": "json_object", "schema": "{"}}, "schema is no JSON"),
    ({"response_format": {"type": "json_object", "schema": DEEP}}, "schema is no JSON: it is nested too deeply"),
    ({"response_format": {"type": "json_object", "schema": "[]"}}, "schema must be a JSON object"),
    ({"response_format": {"type": "json_schema"}}, "json_schema is missing"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "text", "regex": "a"}}, "regex does not go with"),
    ({"response_format": {"type": "regex", "regex": ""}}, "empty expression"),
    ({"response_format": {"type": "regex", "regex": "("}}, "response_format.regex cannot be used"),
    ({"response_format": {"type": "regex", "regex": "\ud800"}}, "lone surrogate"),
    ({"response_format": {"type": "grammar", "grammar": "x" * (1 << 19)}}, "at most 262144"),
    ({"response_format": {"type": "grammar", "grammar": "start: nothing"}}, "unknown name"),
    (schema({"type": "objekt"}), "Invalid type: objekt"),
    (schema({"type": "string", "pattern": "("}), "json_schema.schema cannot be used"),
    (schema({"enum": ["\ud800"]}), "json_schema.schema cannot be used"),
    (schema({"enum": [float("nan")]}), "schema is no JSON"),
    (schema({"enum": [object()]}), "schema is no JSON"),
    (schema(5), "json_schema.schema"),
]
CHAT_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages is empty"),
    ({"messages": "Hi"}, "messages must be a list"),
    ({"messages": [{"role": "user", "content": "\ud83d"}]}, "lone surrogate"),
    ({"messages": [{"role": "user", "content": "a", "name": "\ud83d"}]}, "lone surrogate"),
    ({"messages": [{"role": "user", "content": "ab " * 2_000_000}]}, "6000.* characters"),
    ({"messages": [{"role": "user", "content": "ab " * 1000}]}, "prompt has .* tokens"),
    ({"messages": [*HI, {"role": "assistant", "content": "x"}]}, "ends with an assistant message"),
    ({"messages": [*HI, {"role": "tool", "content": "x"}]}, "tool_call_id is missing"),
    ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    (
        tool({}) | {"tool_choice": {"type": "function"}},
        "request: tool_choice.function is missing.$",
    ),
    ({"metadata": {5: "a"}}, r"metadata\[5\] \(the key\) should be a valid string"),
    (tool({"type": "object"}), "tools cannot be used with scripted"),
    (tool("x"), r"tools\[0\].function.parameters"),
]
COMPLETION_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": []}, "prompt is empty"),
    ({"prompt": [VOCAB_SIZE]}, rf"prompt\[0\] is the token id {VOCAB_SIZE}"),
    ({"prompt": [1, -1]}, r"prompt\[1\] is the token id -1"),
    ({"prompt": [1, 2**70]}, r"prompt\[1\] is the token id"),
    ({"prompt": [1] * 3_000_000}, "prompt has 3000000 tokens"),
    ({"prompt": "ab " * 2_000_000}, "6000000 characters"),
    ({"prompt": "\udfff"}, "request: prompt holds a lone surrogate at character 0, which no UTF-8 text can hold.$"),
    ({"prompt": [10**5000]}, r"prompt\[0\] is the token id <number"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"logprobs": 6}, "logprobs"),
    ({"best_of": 1, "n": 2}, "best_of"),
]


def both(fields: dict[str, Any], kind: str) -> list[str]:
    """What both engines say to a request; they must not hang, and must answer a good request afterwards."""
    messages = []
    with MLCEngine("scripted") as engine:
        create = engine.chat.completions.create if kind == "chat" else engine.completions.create
        with pytest.raises(BadRequestError) as refusal:
            create(**fields)
        messages.append(str(refusal.value))
        assert engine.chat.completions.create(messages=HI).choices[0].message.content == ANSWER
        assert engine.metrics().running_requests == engine.metrics().waiting_requests == 0

    async def run() -> None:
        async with AsyncMLCEngine("scripted") as engine:
            create = engine.chat.completions.create if kind == "chat" else engine.completions.create
            with pytest.raises(BadRequestError) as refusal:
                await create(**fields)
            messages.append(str(refusal.value))
            answer = await engine.chat.completions.create(messages=HI)
            assert answer.choices[0].message.content == ANSWER

    asyncio.run(run())
    return messages


def short(value: object) -> str:
    return short_repr(value)[:60]


@pytest.mark.parametrize(("fields", "message"), SHARED_ROWS + CHAT_ROWS, ids=short)
@pytest.mark.timeout(30)
def test_bad_chat_requests(serve: Serve, fields: dict[str, Any], message: str) -> None:
    serve(answering(ANSWER))
    said = both({"messages": HI, **fields}, "chat")
    assert said[0] == said[1]
    assert len(said[0]) < 1000
    assert "\n" not in said[0]
    with pytest.raises(BadRequestError, match=message):
        raise BadRequestError(said[0])


@pytest.mark.parametrize(("fields", "message"), SHARED_ROWS + COMPLETION_ROWS, ids=short)
@pytest.mark.timeout(30)
def test_bad_completion_requests(serve: Serve, fields: dict[str, Any], message: str) -> None:
    serve(answering(ANSWER))
    said = both({"prompt": "a", **fields}, "completion")
    assert said[0] == said[1]
    assert len(said[0]) < 1000
    with pytest.raises(BadRequestError, match=message):
        raise BadRequestError(said[0])


def test_nul_and_other_odd_characters_are_text(serve: Serve) -> None:
    serve(answering(ANSWER))
    odd = "a\0b\x1b\u202e\ufffe\U0010ffff\r\n"
    with MLCEngine("scripted") as engine:
        answer = engine.chat.completions.create(messages=[{"role": "user", "content": odd, "name": "a\0"}], stop="\0")
        assert answer.choices[0].message.content == ANSWER
        echoed = engine.completions.create(prompt=odd + "<|im_start|>assistant\n", echo=True, max_tokens=1)
        assert echoed.choices[0].text.startswith(odd)


def wait_until_free(engine: MLCEngine | AsyncMLCEngine) -> None:
    deadline = time.monotonic() + 0.5
    while engine.core.metrics().running_requests:
        assert time.monotonic() < deadline, "the request was not aborted within a step"
        time.sleep(0.005)


def test_streams_that_are_left_do_not_touch_the_next_request(serve: Serve) -> None:
    serve(answering(ANSWER), step_seconds=0.002)
    engine = MLCEngine("scripted")

    def leave_by_break() -> None:
        for _ in engine.chat.completions.create(messages=HI, stream=True):
            break

    def leave_by_exception() -> None:
        with contextlib.suppress(ZeroDivisionError):
            for _ in engine.chat.completions.create(messages=HI, stream=True):
                _ = 1 / 0

    def keep_half_read() -> None:
        half_read.append(engine.chat.completions.create(messages=HI, stream=True))
        next(half_read[-1])

    half_read: list[Any] = []
    for leave in (leave_by_break, leave_by_exception, keep_half_read):
        leave()
        assert engine.chat.completions.create(messages=HI).choices[0].message.content == ANSWER
    half_read.clear()
    wait_until_free(engine)


def test_a_second_thread_while_a_stream_is_half_read(serve: Serve) -> None:
    serve(answering(ANSWER))
    engine = MLCEngine("scripted")
    stream = engine.chat.completions.create(messages=HI, stream=True)
    text = next(stream).choices[0].delta.content
    texts: list[str | None] = []

    def ask() -> None:
        texts.append(engine.chat.completions.create(messages=HI).choices[0].message.content)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert texts == [ANSWER] * 3
    assert text + "".join(chunk.choices[0].delta.content for chunk in stream) == ANSWER


def test_one_async_engine_in_two_runs_and_a_stream_over_both(serve: Serve) -> None:
    serve(answering(ANSWER))
    engine = AsyncMLCEngine("scripted")
    kept: list[Any] = []

    async def first() -> str:
        kept.append(await engine.chat.completions.create(messages=HI, stream=True))
        return (await anext(kept[0])).choices[0].delta.content

    async def second() -> str:
        assert (await engine.chat.completions.create(messages=HI)).choices[0].message.content == ANSWER
        return "".join([chunk.choices[0].delta.content async for chunk in kept[0]])

    assert asyncio.run(first()) + asyncio.run(second()) == ANSWER


def test_an_unknown_mode(serve: Serve) -> None:
    serve(answering(ANSWER))
    for engine_type in (MLCEngine, AsyncMLCEngine):
        with pytest.raises(BadRequestError, match="mode must be one of local, interactive, server"):
            engine_type("scripted", mode="turbo")


@pytest.mark.parametrize("engine_type", [MLCEngine, AsyncMLCEngine])
def test_names_that_nothing_can_have(serve: Serve, engine_type: type[MLCEngine]) -> None:
    serve(answering(ANSWER))
    for name in ("a\0b", "a\ud800"):
        rows: list[dict[str, Any]] = [{"model": name}, {"model_lib": name}, {"engine_config": {"model": name}}]
        for arguments in rows:
            with pytest.raises(BadRequestError, match=r"model.* holds a NUL character or a lone surrogate"):
                engine_type(**arguments)
    unknown: dict[str, Any] = {"foo": 1}
    with pytest.raises(TypeError, match=rf"^{engine_type.__name__}\.__init__.* 'foo'"):
        engine_type("scripted", **unknown)


def test_the_extremes_that_are_taken_warn_of_nothing(serve: Serve) -> None:
    serve(answering(ANSWER))
    with MLCEngine("scripted") as engine:
        extremes: list[dict[str, Any]] = [
            {"temperature": 5e-324},
            {"temperature": 1e-5},
            {"temperature": 100.0},
            {"repetition_penalty": 0.01, "frequency_penalty": 2.0},
            {"repetition_penalty": 100.0, "presence_penalty": -2.0},
            {"top_p": 5e-324, "min_p": 5e-324},
            {"logit_bias": {1: 5e-324, 2: -100, 3: 100.0}},
            {"max_tokens": 2**31, "top_k": 2**31},
        ]
        for extreme in extremes:
            answer = engine.chat.completions.create(messages=HI, seed=1, **extreme)
            assert answer.choices[0].finish_reason in ("stop", "length")


def test_an_unfinished_request_says_why(serve: Serve) -> None:
    serve(answering(ANSWER), step_seconds=0.01)

    def ended_by(end: Callable[[MLCEngine], None]) -> str:
        engine = MLCEngine("scripted")
        stream = engine.chat.completions.create(messages=HI, stream=True, request_id="mine")
        next(stream)
        end(engine)
        with pytest.raises(RequestAborted) as refusal:
            list(stream)
        return str(refusal.value)

    assert "did not finish: it was aborted by abort" in ended_by(lambda engine: engine.abort("mine"))
    assert "the engine was reset" in ended_by(MLCEngine.reset)
    assert ended_by(MLCEngine.terminate) == (
        "Request mine did not finish: the engine was terminated (or its model unloaded) while the request ran."
    )


def test_a_request_id_in_flight_is_refused_and_the_first_goes_on(serve: Serve) -> None:
    serve(answering(ANSWER), step_seconds=0.005)
    engine = MLCEngine("scripted")
    stream = engine.chat.completions.create(messages=HI, stream=True, request_id="mine")
    with pytest.raises(MLCError, match="in flight already"):
        engine.chat.completions.create(messages=HI, request_id="mine")
    assert "".join(chunk.choices[0].delta.content for chunk in stream) == ANSWER
