from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, completion_create_params
from openai.types.completion_create_params import CompletionCreateParamsBase

from mlc_nb.errors import BadRequestError
from mlc_nb.protocol.chat import ChatCompletionRequest, ChatCompletionResponse
from mlc_nb.protocol.common import validate
from mlc_nb.protocol.completions import CompletionRequest

HI = [{"role": "user", "content": "Hi"}]
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
UNSET: dict[str, Any] = {
    "messages": HI,
    "prompt": "Hi",
    "stop": None,
    "logit_bias": None,
}


def chat(**fields: Any) -> ChatCompletionRequest:
    return validate(ChatCompletionRequest, {"messages": HI, **fields})


def complete(**fields: Any) -> CompletionRequest:
    return validate(CompletionRequest, {"prompt": "Hi", **fields})


@pytest.mark.parametrize("name", [*completion_create_params.CompletionCreateParamsBase.__annotations__, "stream"])
def test_every_openai_chat_field_works_or_is_refused_by_name(name: str) -> None:
    assert name in ChatCompletionRequest.model_fields
    chat(**{name: UNSET.get(name)})
    with pytest.raises(BadRequestError, match=rf"\b{name}\b"):
        chat(**{name: object()})


@pytest.mark.parametrize("name", [*CompletionCreateParamsBase.__annotations__, "stream"])
def test_every_openai_completion_field_works_or_is_refused_by_name(name: str) -> None:
    assert name in CompletionRequest.model_fields
    complete(**{name: UNSET.get(name)})
    with pytest.raises(BadRequestError, match=rf"\b{name}\b"):
        complete(**{name: object()})


F = {"type": "function", "function": {"name": "f"}}
# A value of every key that asks for something: it works ...
WORKING: dict[str, Any] = {
    "messages": HI, "prompt": "Hi", "model": "m", "frequency_penalty": 1.0, "presence_penalty": -1, "n": 2, "seed": 1,
    "logit_bias": {"1": 2}, "max_tokens": 5, "max_completion_tokens": 5, "stop": ["a"], "stream": True,
    "temperature": 0.5, "top_p": 0.5, "user": "me", "metadata": {"a": "b"}, "prompt_cache_key": "k",
    "safety_identifier": "me", "response_format": {"type": "json_object"}, "echo": True, "suffix": "s", "best_of": 2,
    "modalities": ["text"], "service_tier": "auto", "store": False, "verbosity": "medium", "reasoning_effort": "none",
    "function_call": "none",
}  # fmt: skip
# ... or is refused by name.
REFUSED: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"}, "function_call": "auto", "functions": [{"name": "f"}],
    "modalities": ["audio"], "prediction": {"type": "content", "content": "x"}, "reasoning_effort": "high",
    "service_tier": "flex", "store": True, "verbosity": "low", "web_search_options": {}, "moderation": {"model": "m"},
    "prompt_cache_retention": "24h", "prompt_cache_options": {"a": 1},
}  # fmt: skip
TOGETHER: dict[str, dict[str, Any]] = {
    "logprobs": {}, "top_logprobs": {"logprobs": True, "top_logprobs": 2}, "tools": {"tools": [F]},
    "tool_choice": {"tools": [F], "tool_choice": "required"}, "parallel_tool_calls": {"parallel_tool_calls": False},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
}  # fmt: skip


@pytest.mark.parametrize("name", [*completion_create_params.CompletionCreateParamsBase.__annotations__, "stream"])
def test_every_openai_chat_field_has_a_value_that_works_or_is_refused(name: str) -> None:
    assert name in WORKING or name in REFUSED or name in TOGETHER
    if name in WORKING:
        chat(**{name: WORKING[name]})
    if name in REFUSED:
        with pytest.raises(BadRequestError, match=rf"\b{name}\b"):
            chat(**{name: REFUSED[name]})
    if name in TOGETHER:
        chat(**(TOGETHER[name] or {"logprobs": True}))


@pytest.mark.parametrize("name", [*CompletionCreateParamsBase.__annotations__, "stream"])
def test_every_openai_completion_field_has_a_value_that_works(name: str) -> None:
    complete(**({name: WORKING[name]} if name in WORKING else TOGETHER[name] or {"logprobs": 2}))


NUMBERS = ["temperature", "top_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_p"]
INTEGERS = ["max_tokens", "max_completion_tokens", "seed", "top_k", "top_logprobs", "n"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["0.5", True, float("nan"), float("inf"), float("-inf"), [1.0], {}, -3.0])
def test_numbers_are_numbers(name: str, value: object) -> None:
    with pytest.raises(BadRequestError, match=name):
        chat(**{name: value})


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", ["5", True, 1.0, float("nan"), [1], -(10**30)])
def test_integers_are_integers(name: str, value: object) -> None:
    with pytest.raises(BadRequestError, match=name):
        chat(logprobs=True, **{name: value})


def test_an_integer_is_a_number_too() -> None:
    assert chat(temperature=1, frequency_penalty=-2, top_p=0).temperature == 1.0


def test_all_bad_fields_are_named_at_once() -> None:
    with pytest.raises(BadRequestError) as failure:
        chat(temperature="hot", max_tokens=0, tools=[{}], temprature=1, messages=[{"role": "bob", "content": 5}])
    message = str(failure.value)
    for part in ("temperature", "max_tokens", "tools", "temprature", "messages[0].role", "messages[0].content"):
        assert part in message
    assert "\n" not in message
    assert "pydantic" not in message


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
json_values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@settings(deadline=None)
@given(json_values, st.sampled_from([*ChatCompletionRequest.model_fields, "other"]))
def test_no_value_of_any_field_raises_anything_else(value: object, name: str) -> None:
    with contextlib.suppress(BadRequestError):
        chat(**{name: value})


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (None, "must be a list"),
        ({"role": "user"}, "must be a list"),
        ([], "is empty"),
        (["Hi"], r"messages\[0\]"),
        ([{"content": "Hi"}], r"messages\[0\].role is missing"),
        ([{"role": "user"}], "content is missing"),
        ([{"role": "user", "content": None}], "content is missing"),
        ([{"role": "tool", "content": "x"}], "tool_call_id is missing"),
        ([{"role": "tool", "content": "x", "tool_call_id": "a"}], "no assistant message before it has tool_calls"),
        ([{"role": "user", "content": "x", "tool_call_id": "a"}], "belongs to the role tool"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "only the assistant makes calls"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "a"}]}, *HI],
            r"tool_calls\[0\].function is missing",
        ),
        ([{"role": "function", "name": "f", "content": "x"}], "use the role tool"),
        ([{"role": "user", "content": "\ud800"}], "lone surrogate"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "part 0 is of type 'image_url'"),
        ([{"role": "user", "content": ["x"]}], "part 0 is of str"),
        ([{"role": "user", "content": [{"type": "text"}]}], "'type' and 'text'"),
        ([*HI, {"role": "system", "content": "x"}, *HI], r"messages\[1\] has the role system"),
        ([*HI, {"role": "assistant", "content": "x"}], "assistant message"),
        ([{"role": "user", "content": "x", "weight": 1}], r"messages\[0\].weight is not a known field"),
    ],
    ids=str,
)
def test_bad_messages(messages: object, expected: str) -> None:
    with pytest.raises(BadRequestError, match=expected):
        chat(messages=messages)


def test_good_messages_as_templates_read_them() -> None:
    request = chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
            {"role": "assistant", "content": "", "tool_calls": None, "refusal": None},
            *HI,
        ]
    )
    assert [message.for_template() for message in request.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab", "name": "me"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "Hi"},
    ]


def test_the_message_of_a_response_can_be_sent_back() -> None:
    response = {
        "id": "chatcmpl-1",
        "created": 1,
        "model": "m",
        "choices": [{"finish_reason": "stop", "message": {"content": "yes"}}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
    ours = ChatCompletionResponse.model_validate(response)
    theirs = ChatCompletion.model_validate(ours.model_dump(), strict=True)
    for message in (ours.choices[0].message, theirs.choices[0].message, theirs.choices[0].message.model_dump()):
        assert chat(messages=[*HI, message, *HI]).messages[1].content == "yes"


def test_the_two_names_of_the_token_limit() -> None:
    assert chat(max_tokens=5).token_limit == chat(max_completion_tokens=5).token_limit == 5
    assert chat(max_tokens=5, max_completion_tokens=5).token_limit == 5
    assert chat().token_limit is None
    with pytest.raises(BadRequestError, match="give one of them"):
        chat(max_tokens=5, max_completion_tokens=6)


def test_stop_strings() -> None:
    given_stops = ["a", "b"]
    request = chat(stop=given_stops)
    assert request.stop == ("a", "b")
    assert given_stops == ["a", "b"]
    assert chat(stop="ab").stop == ("ab",)
    assert chat(stop=[]).stop == chat(stop=None).stop == ()
    for bad in ("", ["a", ""], [1], 5, {"a": 1}, ["\ud800"], ["x"] * 17):
        with pytest.raises(BadRequestError, match="stop"):
            chat(stop=bad)


def test_logit_bias() -> None:
    assert chat(logit_bias={"5": 1, 7: -100}).logit_bias == {5: 1.0, 7: -100.0}
    not_ids = [{"a": 1}, {"-1": 1}, {True: 1}, {1.5: 1}, [5], "5"]
    not_biases = [{"5": 101}, {"5": "1"}, {"5": True}, {"5": float("nan")}]
    for bad in not_ids + not_biases:
        with pytest.raises(BadRequestError, match="logit_bias"):
            chat(logit_bias=bad)


def test_dependent_fields() -> None:
    with pytest.raises(BadRequestError, match="top_logprobs needs logprobs"):
        chat(top_logprobs=3)
    with pytest.raises(BadRequestError, match="stream_options needs stream"):
        chat(stream_options={"include_usage": True})
    assert chat(stream=True, stream_options={"include_usage": True}).wants_stream_usage
    assert chat(debug_config={"ignore_eos": True}).ignores_eos
    with pytest.raises(BadRequestError, match=r"debug_config.special_request is not supported yet"):
        chat(debug_config={"special_request": "query_engine_metrics"})


@pytest.mark.parametrize("prompt", ["", [], (), None, 5, b"x", [True], ["a"], [[1]], [1.5], "\ud800"], ids=repr)
def test_bad_prompts(prompt: object) -> None:
    with pytest.raises(BadRequestError, match="prompt"):
        complete(prompt=prompt)


def test_good_prompts() -> None:
    assert complete(prompt=[1, 2]).prompt == (1, 2)
    assert complete(prompt=" ").prompt == " "
