"""The sync and the async engine give the same answers, which the openai package's own types accept."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai.types
import openai.types.chat
import pytest

from mlc_nb.engine.async_engine import AsyncMLCEngine
from mlc_nb.engine.engine import MLCEngine
from mlc_nb.errors import EngineTerminatedError

if TYPE_CHECKING:
    from collections.abc import Iterator

HI = [{"role": "user", "content": "Name a colour."}]
SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
CHAT_ROWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 5},
    "nucleus": {"seed": 5, "top_p": 0.8, "top_k": 40, "min_p": 0.02},
    "penalties": {"seed": 1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "bias": {"temperature": 0, "logit_bias": {"2": -100}},
    "stop": {"seed": 2, "stop": [".", "e"]},
    "logprobs": {"seed": 2, "logprobs": True, "top_logprobs": 3},
    "several": {"seed": 4, "n": 3},
    "ids and labels": {"temperature": 0, "user": "me", "request_id": "mine", "metadata": {"a": "b"}},
    "ignore eos": {"temperature": 0, "extra_body": {"debug_config": {"ignore_eos": True}}},
    "json object": {"seed": 1, "response_format": {"type": "json_object"}},
    "schema": {
        "seed": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA, "strict": True}},
    },
    "regex": {"seed": 1, "response_format": {"type": "regex", "regex": "red|green|blue"}, "n": 2},
    "grammar": {"seed": 1, "response_format": {"type": "grammar", "grammar": 'start: "red" | "blue"'}},
}
COMPLETION_ROWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "echo and suffix": {"temperature": 0, "echo": True, "suffix": "<end>"},
    "logprobs": {"seed": 1, "logprobs": 3},
    "several": {"seed": 1, "n": 2, "stop": "."},
    "best of": {"seed": 1, "best_of": 3},
    "schema": {"seed": 1, "response_format": {"type": "json_object", "schema": '{"enum": ["a", "b"]}'}},
}


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[MLCEngine, AsyncMLCEngine]]:
    config = {"max_single_sequence_length": 1024}
    pair = MLCEngine(engine_config=config), AsyncMLCEngine(engine_config=config)
    yield pair
    for engine in pair:
        engine.terminate()
    with pytest.raises(EngineTerminatedError):
        pair[0].chat.completions.create(messages=HI)


def plain(response: Any) -> dict[str, Any]:
    """What must be equal: all but ids, clocks and how much of the prompt was cached."""
    dumped: dict[str, Any] = response.model_dump()
    del dumped["id"], dumped["created"]
    if dumped.get("usage"):
        dumped["usage"] = {key: dumped["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return dumped


def texts(chunks: list[dict[str, Any]]) -> dict[int, tuple[str, str | None]]:
    found: dict[int, tuple[str, str | None]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["delta"]["content"] if "delta" in choice else choice["text"]
            before, _ = found.get(choice["index"], ("", None))
            found[choice["index"]] = (before + text, choice["finish_reason"])
    return found


def whole_texts(response: dict[str, Any]) -> dict[int, tuple[str, str | None]]:
    found = {}
    for choice in response["choices"]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        found[choice["index"]] = (text, choice["finish_reason"])
    return found


def ask_both(
    engines: tuple[MLCEngine, AsyncMLCEngine], kind: str, fields: dict[str, Any], *, streams: bool
) -> tuple[Any, list[Any]]:
    sync, concurrent = engines
    create = sync.chat.completions.create if kind == "chat" else sync.completions.create
    whole = create(**fields)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(create(**fields, **options)) if streams else []

    async def run() -> tuple[Any, list[Any]]:
        create = concurrent.chat.completions.create if kind == "chat" else concurrent.completions.create
        whole = await create(**fields)
        return whole, [chunk async for chunk in await create(**fields, **options)] if streams else []

    async_whole, async_chunks = asyncio.run(run())
    assert plain(async_whole) == plain(whole)
    assert texts([plain(chunk) for chunk in async_chunks]) == texts([plain(chunk) for chunk in chunks])
    return whole, chunks


@pytest.mark.parametrize("row", CHAT_ROWS)
def test_chat(engines: tuple[MLCEngine, AsyncMLCEngine], row: str) -> None:
    whole, chunks = ask_both(engines, "chat", {"messages": HI, "max_tokens": 24, **CHAT_ROWS[row]}, streams=True)
    openai.types.chat.ChatCompletion.model_validate(whole.model_dump(), strict=True)
    for chunk in chunks:
        openai.types.chat.ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    assert texts([chunk.model_dump() for chunk in chunks]) == whole_texts(whole.model_dump())
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(whole.choices) == CHAT_ROWS[row].get("n", 1)


@pytest.mark.parametrize("row", COMPLETION_ROWS)
def test_completions(engines: tuple[MLCEngine, AsyncMLCEngine], row: str) -> None:
    fields = {"prompt": "The sky is", "max_tokens": 16, **COMPLETION_ROWS[row]}
    whole, chunks = ask_both(engines, "completion", fields, streams="best_of" not in fields)
    openai.types.Completion.model_validate(whole.model_dump(), strict=True)
    for chunk in chunks:
        dumped = chunk.model_dump()
        for choice in dumped["choices"]:
            # OpenAI's own streams have null here until the last chunk; only the package's type knows no null.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        openai.types.Completion.model_validate(dumped, strict=True)
    if chunks:
        assert texts([chunk.model_dump() for chunk in chunks]) == whole_texts(whole.model_dump())
