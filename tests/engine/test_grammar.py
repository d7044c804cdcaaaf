"""Grammars on the real vocabulary: what they allow, where they end, and what they cost."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mlc_nb.engine.bounded_json import with_bounded_numbers
from mlc_nb.engine.model import LoadedModel, load_model
from mlc_nb.errors import BadRequestError, MLCError
from mlc_nb.protocol.engine_config import resolve_engine_config
from mlc_nb.protocol.response_format import GrammarSource
from tests.engine.schemas import SCHEMAS
from tests.engine.scripted import make_model

if TYPE_CHECKING:
    from mlc_nb.engine.grammar import GrammarConstraint


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("smollm2", config=resolve_engine_config(None))


def compiled(model: LoadedModel, schema: Any) -> GrammarConstraint:
    return model.grammars.compile(model, GrammarSource("json_schema", json.dumps(schema), "schema"))


def accepts(model: LoadedModel, constraint: GrammarConstraint, text: str) -> bool:
    """Whether the text may be written token by token, and may end there."""
    constraint = constraint.fork()
    for token_id in model.tokenizer.encode(text, add_special_tokens=False).ids:
        if not constraint.allowed()[token_id]:
            return False
        constraint.accept(token_id)
    return constraint.is_finished or bool(constraint.allowed()[sorted(model.stop_token_ids)].any())


def test_white_space_is_bounded(model: LoadedModel) -> None:
    constraint = compiled(model, {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]})
    for text in ('{"a":[1,2]}', '{"a": [1, 2]}', '{"a": [1,2], "b": {}}'):
        assert accepts(model, constraint, text)
    for text in ('{"a":  [1]}', '{ "a": []}', '{"a": []\n}', '\n{"a": []}', '{"a": []} ', '{"b": 1}', '{"a": [1'):
        assert not accepts(model, constraint, text)


def test_a_schema_cannot_loosen_what_holds_for_all(model: LoadedModel) -> None:
    loose = {"x-guidance": {"whitespace_flexible": True, "lenient": True}, "type": "array"}
    assert not accepts(model, compiled(model, loose), "[ \n 1]")
    with pytest.raises(BadRequestError, match="uniqueItems"):
        compiled(model, {**loose, "uniqueItems": True})


def test_stop_tokens_only_where_the_answer_may_end(model: LoadedModel) -> None:
    constraint = model.grammars.compile(model, GrammarSource("regex", "ab?", "regex"))
    stops = sorted(model.stop_token_ids)
    (a,) = model.tokenizer.encode("a", add_special_tokens=False).ids
    (b,) = model.tokenizer.encode("b", add_special_tokens=False).ids
    assert not constraint.allowed()[stops].any()
    fork = constraint.fork()
    constraint.accept(a)
    assert constraint.allowed()[stops].all()
    assert not constraint.is_finished
    constraint.accept(b)
    assert constraint.is_finished
    assert fork.allowed()[a]
    with pytest.raises(MLCError, match="within its grammar"):
        fork.accept(b)


def test_numbers_end() -> None:
    bounded = with_bounded_numbers({"anyOf": [{"type": "integer"}, {"type": ["number", "null"], "minimum": 0}]})
    assert bounded["anyOf"][0] == {"type": "integer", "minimum": -(2**53 - 1), "maximum": 2**53 - 1}
    assert bounded["anyOf"][1] == {"type": ["number", "null"], "minimum": 0, "maximum": 2**53 - 1, "multipleOf": 1e-9}
    untouched: list[dict[str, Any]] = [
        {"const": {"type": "integer"}},
        {"type": "integer", "minimum": 2**60},
        {"enum": [{"type": "number"}]},
        {"properties": {"type": {"const": "number"}}},
        {"type": "number", "enum": [1.5]},
    ]
    for schema in untouched:
        assert with_bounded_numbers(schema) == schema


@pytest.mark.parametrize("name", SCHEMAS)
def test_bounding_keeps_the_schema_usable(model: LoadedModel, name: str) -> None:
    assert compiled(model, SCHEMAS[name]).allowed().any()


def test_a_vocabulary_without_an_end_is_refused() -> None:
    model = dataclasses.replace(make_model(), stop_token_ids=frozenset())
    with pytest.raises(BadRequestError, match="end-of-text token"):
        compiled(model, {"type": "object"})


def test_masks_are_cheap(model: LoadedModel) -> None:
    """A step of the default model takes 4 ms on two cores; masks are computed within it, on the engine's thread."""
    schema = SCHEMAS["array of objects"]
    text = '[{"id": 1, "name": "Anna Maria"}, {"id": 22, "name": "Bob ü and others"}, {"id": 130, "name": ""}]'
    token_ids = model.tokenizer.encode(text, add_special_tokens=False).ids
    started = time.thread_time()
    constraint = compiled(model, schema)
    assert time.thread_time() - started < 1.0
    seconds = []
    for token_id in token_ids:
        started = time.thread_time()
        assert constraint.allowed()[token_id]
        constraint.accept(token_id)
        seconds.append(time.thread_time() - started)
    assert constraint.is_finished
    assert np.mean(seconds[1:]) < 0.001, f"{1e6 * np.mean(seconds[1:]):.0f} us a token"
    print(f"mask: mean {1e6 * np.mean(seconds[1:]):.0f} us, longest {1e6 * max(seconds[1:]):.0f} us")
