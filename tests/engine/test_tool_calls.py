"""Calls are found in text however it is cut into pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlc_nb.engine.tool_calls import CallPiece, ToolCallParser
from mlc_nb.engine.tool_formats import HERMES, LLAMA, MISTRAL, ToolFormat

NAMES = ("weather", "add")
ARGUMENTS = '{"city": "Köln \\"}\\" <tool_call>", "days": [1, {"a": null}]}'
WEATHER, ADD = ("weather", ARGUMENTS), ("add", '{"a": 1}')


def run(form: ToolFormat, pieces: list[str], *, parallel: bool = True) -> tuple[str, list[tuple[str, str]], bool]:
    parser = ToolCallParser(form, NAMES, parallel=parallel)
    found = [piece for text in pieces for piece in parser.feed(text)] + parser.finish()
    content = "".join(piece for piece in found if isinstance(piece, str))
    calls: list[tuple[str, str]] = []
    for piece in found:
        if isinstance(piece, CallPiece):
            if piece.name is not None:
                assert piece.index == len(calls)
                assert piece.call_id
                assert piece.call_id.startswith("call_")
                calls.append((piece.name, ""))
            calls[piece.index] = (calls[piece.index][0], calls[piece.index][1] + piece.arguments)
    return content, calls, parser.calls_are_complete


def obj(call: tuple[str, str], key: str = "arguments") -> str:
    return f'{{"name": "{call[0]}", "{key}": {call[1]}}}'


# form, text, content, calls, whether they are complete
ROWS = [
    (HERMES, f"<tool_call>\n{obj(WEATHER)}\n</tool_call>", "", [WEATHER], True),
    (
        HERMES,
        f"Sure.\n<tool_call>{obj(ADD)}</tool_call>\n<tool_call>{obj(WEATHER)}</tool_call>",
        "Sure.",
        [ADD, WEATHER],
        True,
    ),
    (HERMES, f"<tool_call>{obj(ADD)}</tool_call> Done.", " Done.", [ADD], True),
    (HERMES, f"<tool_call>{obj(ADD)}", "", [ADD], True),
    (HERMES, f"<tool_call>{obj(ADD)[:-1]}", "", [ADD], False),
    (
        HERMES,
        f"<tool_call>{obj(WEATHER)[:40]}",
        "",
        [("weather", ARGUMENTS[:7])],
        False,
    ),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [ADD], True),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [ADD], True),
    (HERMES, '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")], True),
    (HERMES, '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")], True),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": True}}</tool_call>', "", [("add", '{"a": True}')], False),
    (
        HERMES,
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        [],
        False,
    ),
    (HERMES, "<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", [], False),
    (HERMES, "<tool_call></tool_call>", "<tool_call></tool_call>", [], False),
    (HERMES, "a <tool_cal", "a <tool_cal", [], False),
    (HERMES, " \n plain {text} <b> \n", " \n plain {text} <b> \n", [], False),
    (HERMES, '{"name": "add", "arguments": {}}', '{"name": "add", "arguments": {}}', [], False),
    (LLAMA, obj(WEATHER, "parameters"), "", [WEATHER], True),
    (LLAMA, f"\n\n{obj(ADD, 'parameters')}; {obj(WEATHER, 'parameters')}", "", [ADD, WEATHER], True),
    (LLAMA, f"<|python_tag|>{obj(ADD, 'parameters')}", "", [ADD], True),
    (LLAMA, '<|python_tag|>search.call(query="x")', '<|python_tag|>search.call(query="x")', [], False),
    (LLAMA, '{"city": "Rome"}', '{"city": "Rome"}', [], False),
    (LLAMA, f"Like {obj(ADD, 'parameters')}", f"Like {obj(ADD, 'parameters')}", [], False),
    (LLAMA, '{"type": "function", "name": "add", "parameters": {"a": 1}}', "", [ADD], True),
    (MISTRAL, f"[TOOL_CALLS][{obj(ADD)}, {obj(WEATHER)}]", "", [ADD, WEATHER], True),
    (MISTRAL, f"[TOOL_CALLS] [{obj(ADD)}", "", [ADD], True),
    (MISTRAL, "[1, 2] and [TOOL", "[1, 2] and [TOOL", [], False),
]


@pytest.mark.parametrize(("form", "text", "content", "calls", "complete"), ROWS)
def test_calls_in_one_piece_and_character_by_character(
    form: ToolFormat, text: str, content: str, calls: list[tuple[str, str]], complete: bool
) -> None:
    assert run(form, [text]) == (content, calls, complete)
    assert run(form, list(text)) == (content, calls, complete)


def test_one_call_where_only_one_may_be_made() -> None:
    text = f"<tool_call>{obj(ADD)}</tool_call>\n<tool_call>{obj(WEATHER)}</tool_call>"
    assert run(HERMES, [text], parallel=False) == ("", [ADD], True)
    assert run(HERMES, [text[:-30]], parallel=False) == ("", [ADD], True)


def test_arguments_come_while_they_are_written() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.feed('<tool_call>{"name": "add", "argu') != []
    pieces = [parser.feed(text) for text in ('ments": {"a', '": ', "1}")]
    assert [[piece.arguments for piece in found if isinstance(piece, CallPiece)] for found in pieces] == [
        ['{"a'],
        ['": '],
        ["1}"],
    ]


values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(), values, max_size=4), st.sampled_from([HERMES, LLAMA, MISTRAL]), st.data())
def test_any_arguments_in_any_pieces(arguments: dict[str, object], form: ToolFormat, data: st.DataObject) -> None:
    call = ("add", json.dumps(arguments, ensure_ascii=data.draw(st.booleans())))
    text = f"{form.opener}{obj(call, form.arguments_key)}{form.closer}"
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert run(form, pieces) == ("", [call], True)


@settings(deadline=None, max_examples=200)
@given(
    st.text(st.sampled_from(list('<tool_call>/{}[]", \n:namedrgus')), max_size=60),
    st.sampled_from([HERMES, LLAMA, MISTRAL]),
)
def test_no_text_is_lost(text: str, form: ToolFormat) -> None:
    content, calls, _ = run(form, list(text))
    if not calls:
        assert content == text
