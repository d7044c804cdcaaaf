"""Structured output by the real default model, at temperature 1."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from mlc_nb.engine.async_engine import AsyncMLCEngine
from mlc_nb.errors import MLCError
from tests.engine.schemas import SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Iterator

DRAFT = jsonschema.Draft202012Validator
MAX_TOKENS = 200
Choice = tuple[str, str]


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncMLCEngine]:
    opened = AsyncMLCEngine(mode="server", engine_config={"max_single_sequence_length": 1024})
    yield opened
    opened.terminate()


async def ask(engine: AsyncMLCEngine, question: str, form: dict[str, Any], seed: int = 0) -> Choice:
    response = await engine.chat.completions.create(
        messages=[{"role": "user", "content": question}],
        response_format=form,
        temperature=1.0,
        seed=seed,
        max_tokens=MAX_TOKENS,
    )
    choice = response.choices[0]
    return choice.message.content or "", choice.finish_reason


def schema_form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def test_fifty_schemas_at_temperature_one(engine: AsyncMLCEngine) -> None:
    assert len(SCHEMAS) == 50

    async def ask_all() -> list[Choice]:
        requests = (ask(engine, f"Give me JSON: {name}.", schema_form(schema)) for name, schema in SCHEMAS.items())
        return await asyncio.gather(*requests)

    cut = []
    for (name, schema), (text, finish_reason) in zip(SCHEMAS.items(), asyncio.run(ask_all()), strict=True):
        if finish_reason == "length":
            cut.append(name)
            continue
        validator = DRAFT(schema, format_checker=DRAFT.FORMAT_CHECKER)
        problems = [problem.message for problem in validator.iter_errors(json.loads(text))]
        assert not problems, (name, text)
    assert len(cut) <= len(SCHEMAS) // 20, cut


def test_the_other_forms(engine: AsyncMLCEngine) -> None:
    schema = json.dumps(
        {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
    )
    forms: list[dict[str, Any]] = [
        {"type": "json_object", "schema": schema},
        {"type": "json_object"},
        {"type": "regex", "regex": r"[0-9]{3}-[0-9]{4}|none"},
        {"type": "grammar", "grammar": 'start: "yes" | "no, " REASON\nREASON: /because [a-z ]{3,20}/'},
    ]

    async def ask_all() -> list[Choice]:
        return await asyncio.gather(*(ask(engine, "What is it?", form) for form in forms))

    (by_schema, _), (anything, anything_finish), (number, _), (reason, _) = asyncio.run(ask_all())
    assert json.loads(by_schema)["a"] in ("x", "y")
    if anything_finish == "stop":
        assert isinstance(json.loads(anything), dict)
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}|none", number)
    assert re.fullmatch(r"yes|no, because [a-z ]{3,20}", reason)


def test_the_same_answer_alone_and_in_company(engine: AsyncMLCEngine) -> None:
    names = ["nested objects", "array of integers", "any of objects"]

    async def ask_all() -> list[Choice]:
        requests = [ask(engine, "JSON please.", schema_form(SCHEMAS[name]), seed=7) for name in names]
        others = [ask(engine, "Tell me more.", {"type": "text"}, seed=index) for index in range(3)]
        return (await asyncio.gather(*requests, *others))[: len(names)]

    together = asyncio.run(ask_all())
    alone = [asyncio.run(ask(engine, "JSON please.", schema_form(SCHEMAS[name]), seed=7)) for name in names]
    assert together == alone


def test_what_cannot_be_held_is_refused_and_hurts_nobody(engine: AsyncMLCEngine) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        (schema_form({"type": "strin"}), "Invalid type: strin"),
        (schema_form({"not": {"type": "string"}}), "not"),
        (schema_form({"$ref": "#"}), "no text matches it"),
        (schema_form({"$ref": "https://example.org/x"}), "not fetch"),
        (schema_form({"type": "string", "format": "no-such-format"}), "Unknown format: no-such-format"),
        (schema_form({"oneOf": [{"type": "number"}, {"type": "integer"}]}), "write anyOf"),
        (schema_form({"enum": [f"value {i}" for i in range(100_000)]}), "characters"),
        ({"type": "regex", "regex": "("}, "unclosed group"),
        ({"type": "regex", "regex": r"[^\s\S]"}, "no text matches it"),
        ({"type": "regex", "regex": "((a{1000}){1000}){1000}"}, "too many expressions"),
        ({"type": "grammar", "grammar": "start: nothing"}, "unknown name"),
    ]

    async def refuse_all() -> None:
        running = asyncio.create_task(ask(engine, "JSON please.", schema_form(SCHEMAS["nested objects"])))
        for form, message in bad:
            with pytest.raises(MLCError, match=message):
                await ask(engine, "x", form)
        assert (await running)[1] == "stop"

    asyncio.run(refuse_all())


def test_a_grammar_that_exceeds_a_step_fails_alone(engine: AsyncMLCEngine) -> None:
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}

    async def run() -> None:
        running = asyncio.create_task(ask(engine, "JSON please.", schema_form(SCHEMAS["nested objects"])))
        with pytest.raises(MLCError, match=r"grammar|cannot be used"):
            await ask(engine, "x", schema_form(many))
        assert (await running)[1] == "stop"

    asyncio.run(run())
