"""Tools from the request to the answer: templates of three families on scripted answers, and the real model."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import openai.types.chat
import pytest

from mlc_nb.engine import provider
from mlc_nb.engine.async_engine import AsyncMLCEngine
from mlc_nb.engine.core import EngineCore
from mlc_nb.engine.engine import MLCEngine
from mlc_nb.engine.model import load_model
from mlc_nb.engine.prepare import chat_request, prepare_chat
from mlc_nb.engine.tool_use import plan_tool_use
from mlc_nb.errors import BadRequestError
from mlc_nb.protocol.chat_template import ChatTemplate
from mlc_nb.protocol.engine_config import EngineConfig, resolve_engine_config
from tests.engine.scripted import answering, make_model
from tests.engine.templates import HERMES_TEMPLATE, TEMPLATES

Serve = Callable[..., None]
HI = [{"role": "user", "content": "Weather in Rome?"}]
CITY = {"city": {"type": "string", "maxLength": 12}, "unit": {"$ref": "#/$defs/unit"}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather now.",
        "parameters": {
            "type": "object",
            "properties": CITY,
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"unit": {"enum": ["C", "F"]}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
ARGUMENTS = {"city": "Rome", "unit": "C"}
ANSWERS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": ARGS}\n</tool_call>',
    "llama": '{"name": "get_weather", "parameters": ARGS}',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": ARGS}]',
}


def template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], bos_token="<|im_start|>", eos_token="<|im_end|>")


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_call_whole_and_streamed_and_sent_back(serve: Serve, family: str) -> None:
    answer = ANSWERS[family].replace("ARGS", json.dumps(ARGUMENTS))
    serve(answering(answer), chat_template=template(family), context=4096, num_pages=256)
    with MLCEngine("scripted") as engine:
        whole = engine.chat.completions.create(messages=HI, tools=TOOLS)
        chunks = list(engine.chat.completions.create(messages=HI, tools=TOOLS, stream=True))
        cut = engine.chat.completions.create(messages=HI, tools=TOOLS, max_tokens=whole.usage.completion_tokens - 6)
        off = engine.chat.completions.create(messages=HI, tools=TOOLS, tool_choice="none")
        message = whole.choices[0].message
        assert message.tool_calls is not None
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
        again = engine.chat.completions.create(messages=[*HI, message, result], tools=TOOLS)

    parsed = openai.types.chat.ChatCompletion.model_validate(whole.model_dump(), strict=True)
    for chunk in chunks:
        openai.types.chat.ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    assert message.content is None
    assert whole.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls
    assert call.id.startswith("call_")
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", ARGUMENTS)
    assert parsed.choices[0].message.tool_calls is not None

    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
    assert (deltas[0].function.name, deltas[0].type, deltas[0].id is not None) == ("get_weather", "function", True)
    assert all((delta.function.name, delta.id, delta.type) == (None, None, None) for delta in deltas[1:])
    assert len(deltas) > 3
    assert "".join(delta.function.arguments or "" for delta in deltas) == call.function.arguments
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == ""
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"

    assert cut.choices[0].finish_reason == "length"
    assert (off.choices[0].finish_reason, off.choices[0].message.content) == ("stop", answer)
    assert again.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("as_text", [True, False])
def test_what_templates_see_of_calls_and_tools(family: str, as_text: bool) -> None:
    model = dataclasses.replace(make_model(), chat_template=template(family))
    arguments = json.dumps(ARGUMENTS) if as_text else ARGUMENTS
    call = {"id": "call_abc", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_abc", "content": "sunny"},
    ]
    request = chat_request({"messages": messages, "tools": TOOLS}, frozenset())
    use = plan_tool_use(model, request)
    assert use is not None
    generation = prepare_chat(model, request, None, use, max_tokens=4096)
    text = model.tokenizer.decode(list(generation.prompt_token_ids), skip_special_tokens=False)
    assert '{"city": "Rome", "unit": "C"}' in text
    assert "The weather now." in text
    assert "<|im_start|>tool\nsunny<|im_end|>" in text
    request = chat_request({"messages": messages, "tools": TOOLS, "tool_choice": "none"}, frozenset())
    assert plan_tool_use(model, request) is None


def test_text_and_several_calls_and_only_one(serve: Serve) -> None:
    call = ANSWERS["hermes"].replace("ARGS", json.dumps(ARGUMENTS))
    serve(answering(f"Let me see.\n{call}\n{call}"), chat_template=template("hermes"), context=4096, num_pages=256)
    with MLCEngine("scripted") as engine:
        several = engine.chat.completions.create(messages=HI, tools=TOOLS, logprobs=True)
        one = engine.chat.completions.create(messages=HI, tools=TOOLS, parallel_tool_calls=False)
    assert several.choices[0].message.content == "Let me see."
    assert len(several.choices[0].message.tool_calls or ()) == 2
    assert several.choices[0].logprobs is not None
    assert len(several.choices[0].logprobs.content or ()) == several.usage.completion_tokens
    assert len(one.choices[0].message.tool_calls or ()) == 1


def test_special_tokens_that_open_calls_are_seen() -> None:
    model = make_model()
    tokenizer = type(model.tokenizer).from_str(model.tokenizer.to_str())
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    opener = tokenizer.token_to_id("[TOOL_CALLS]")
    use = plan_tool_use(
        dataclasses.replace(model, tokenizer=tokenizer, chat_template=template("mistral")),
        chat_request({"messages": HI, "tools": TOOLS}, frozenset()),
    )
    assert use is not None
    assert use.shown_token_ids == {opener}
    from mlc_nb.engine.token_bytes import TokenBytes

    token_bytes = TokenBytes(tokenizer)
    assert token_bytes.of(opener) == b""
    assert token_bytes.showing(use.shown_token_ids).of(opener) == b"[TOOL_CALLS]"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "function"}]}, r"tools\[0\].function is missing"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, r"tools\[0\].type"),
        ({"tools": [NOW, NOW]}, "two functions with the name 'now'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, r"tools\[0\].function.name"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice must be 'none', 'auto', 'required'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "names the function 'x'"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "allowed_tools"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format together with tools"),
        ({"functions": [{"name": "f"}]}, "functions is OpenAI's older form: use tools"),
        (
            {
                "tools": [NOW, {"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}],
                "tool_choice": "required",
            },
            r"tools\[1\].function.parameters cannot be used: Invalid type: objekt",
        ),
    ],
    ids=str,
)
def test_bad_tools(serve: Serve, fields: dict[str, Any], message: str) -> None:
    serve(answering("a"), chat_template=template("hermes"))
    with pytest.raises(BadRequestError, match=message):
        MLCEngine("scripted").chat.completions.create(messages=HI, **fields)


def test_a_template_without_tools_refuses_them_by_name(serve: Serve) -> None:
    serve(answering("a"))
    engine = MLCEngine("scripted")
    with pytest.raises(BadRequestError, match="tools cannot be used with scripted"):
        engine.chat.completions.create(messages=HI, tools=TOOLS)
    assert (
        engine.chat.completions.create(messages=HI, tools=TOOLS, tool_choice="none").choices[0].message.content == "a"
    )


@pytest.fixture(scope="module", params=list(TEMPLATES))
def real(request: pytest.FixtureRequest) -> Iterator[AsyncMLCEngine]:
    """The real model, with a template that knows tools."""
    config = resolve_engine_config({"max_single_sequence_length": 1024, "mode": "server"})
    model = dataclasses.replace(load_model("smollm2", config=config), chat_template=template(request.param))
    core = EngineCore(model, config)

    def provide(name: str, device: str, model_lib: str | None, engine_config: EngineConfig) -> EngineCore:
        del name, device, model_lib, engine_config
        return core

    previous = provider.set_core_provider(provide)
    yield AsyncMLCEngine("smollm2")
    provider.set_core_provider(previous)
    core.terminate()


def test_a_required_call_is_made(real: AsyncMLCEngine) -> None:
    choices: list[Any] = [
        "required",
        {"type": "function", "function": {"name": "get_weather"}},
        {"type": "function", "function": {"name": "now"}},
    ]

    async def ask() -> list[Any]:
        requests = (
            real.chat.completions.create(
                messages=HI, tools=TOOLS, tool_choice=choice, max_tokens=300, seed=seed, parallel_tool_calls=False
            )
            for choice in choices
            for seed in range(3)
        )
        return await asyncio.gather(*requests)

    answers = asyncio.run(ask())
    names = []
    for answer in answers:
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = answer.choices[0].message.tool_calls
        names.append(call.function.name)
        schema = {"get_weather": WEATHER["function"]["parameters"], "now": {"maxProperties": 0}}[call.function.name]
        jsonschema.validate(json.loads(call.function.arguments), schema)
    assert set(names[:3]) <= {"get_weather", "now"}
    assert names[3:] == ["get_weather"] * 3 + ["now"] * 3


def test_the_default_model_refuses_tools() -> None:
    model = load_model("smollm2", config=resolve_engine_config(None))
    assert model.chat_template is not None
    assert not model.chat_template.uses_tools
    with pytest.raises(BadRequestError, match="does not write tools at all"):
        plan_tool_use(model, chat_request({"messages": HI, "tools": TOOLS}, frozenset()))


def test_a_template_of_an_unknown_form_refuses_tools() -> None:
    unknown = ChatTemplate(HERMES_TEMPLATE.replace("tool_call>", "call>"), bos_token="", eos_token="")
    model = dataclasses.replace(make_model(), chat_template=unknown)
    with pytest.raises(BadRequestError, match="in a way that is known here"):
        plan_tool_use(model, chat_request({"messages": HI, "tools": TOOLS}, frozenset()))
