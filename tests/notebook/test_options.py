"""From the line behind a magic to options and prompt."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest
from IPython.core.error import UsageError
from pydantic import BaseModel

from mlc_nb.errors import BadRequestError
from mlc_nb.notebook.batch_cell import column_of, prompts_of_rows, rows_of
from mlc_nb.notebook.functions import toolbox
from mlc_nb.notebook.interpolation import interpolate
from mlc_nb.notebook.json_schema import json_schema_format
from mlc_nb.notebook.options import parse_options, parse_prompt_line
from mlc_nb.protocol.tools import FunctionCall, ToolCall

PARSER = argparse.ArgumentParser(prog="x", exit_on_error=False)
PARSER.add_argument("-n", "--number", type=int)
PARSER.add_argument("--stop", action="append")
PARSER.add_argument("--echo", action="store_true")
MAGIC = SimpleNamespace(parser=PARSER)


@pytest.mark.parametrize(
    ("line", "number", "echo", "prompt"),
    [
        ("Once upon a time", None, False, "Once upon a time"),
        ("-n 3 --echo It's   a long way", 3, True, "It's   a long way"),
        ("--number=3 a -n 5", 3, False, "a -n 5"),
        ("--num 3 a", 3, False, "a"),
        ('"--dash" and', None, False, '"--dash" and'),
        ('"--dashed prompt"', None, False, "--dashed prompt"),
        ('--echo "a;"', None, True, "a;"),
        ("", None, False, ""),
        ("- a list", None, False, "- a list"),
        ("'open", None, False, "'open"),
    ],
)
def test_a_line_with_a_prompt(line: str, number: int | None, echo: bool, prompt: str) -> None:
    parsed = parse_prompt_line(MAGIC, line)
    assert parsed is not None
    options, found = parsed
    assert (options.number, options.echo, found) == (number, echo, prompt)


def test_a_semicolon_at_the_end_silences() -> None:
    for line, silent in (("-n 3;", True), ("-n 3 ; ", True), ("-n 3", False), ('--stop ";"', False)):
        options = parse_options(MAGIC, line)
        assert options is not None
        assert options.silent is silent
    assert parse_options(MAGIC, '--stop ";"').stop == [";"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "filled", "missed"),
    [
        ("{name} and {other}", "Bob and {other}", ["other"]),
        ("{{name}} ${name} {name!r} {name:>5} {1} {} {a b}", "{{name}} $Bob {name!r} {name:>5} {1} {} {a b}", []),
        ("{other} {other}", "{other} {other}", ["other"]),
        ('{"json": {name}}', '{"json": {name}}', []),
        ("{braces}", "{name}", []),
        ("{größe}", "1", []),
        ("{print}", "{print}", ["print"]),
    ],
)
def test_interpolation(text: str, filled: str, missed: list[str]) -> None:
    namespace = {"name": "Bob", "braces": "{name}", "größe": 1}
    assert interpolate(text, namespace) == (filled, missed)


def test_interpolation_of_named_variables_alone() -> None:
    namespace = {"a": 1, "b": 2}
    assert interpolate("{a} {b} {c}", namespace, ["a"]) == ("1 {b} {c}", [])
    assert interpolate("{b}", namespace, ["a"]) == ("{b}", ["a"])
    with pytest.raises(UsageError, match="there is no variable 'z'"):
        interpolate("{z}", namespace, ["z"])


class City(BaseModel):
    name: str


def test_schemas_come_from_variables_and_files(tmp_path: object) -> None:
    schema = {"type": "object", "properties": {"name": {"title": "Name", "type": "string"}}}
    namespace = {"a": schema, "b": '{"type": "object"}', "c": City, "d": list[int], "e": 3, "f": "[1]", "g": object()}

    def found(name: str) -> object:
        return json_schema_format(name, namespace)["json_schema"]["schema"]

    assert found("a") == schema
    assert found("b") == {"type": "object"}
    assert found("c") == {**schema, "required": ["name"], "title": "City", "additionalProperties": False}
    assert found("d") == {"items": {"type": "integer"}, "type": "array"}
    path = f"{tmp_path}/schema.json"
    with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write('{"type": "string"}')
    assert found(path) == {"type": "string"}
    for name, said in (("e", "found int"), ("f", "must be a JSON object"), ("nope", "no such variable or file")):
        with pytest.raises(BadRequestError, match=said):
            found(name)
    with pytest.raises(BadRequestError, match=r"Is a directory|Permission"):
        found("/")


def weather(city: str, days: int = 1) -> dict[str, object]:
    """The weather of a city."""
    if city == "Atlantis":
        raise LookupError("under water")
    return {"city": city, "days": days}


def call(name: str, arguments: str) -> ToolCall:
    return ToolCall(id="1", function=FunctionCall(name=name, arguments=arguments))


def test_functions_are_described_and_run() -> None:
    box = toolbox("weather", {"weather": weather})
    (tool,) = box.tools
    assert tool["function"]["description"] == "The weather of a city."
    assert tool["function"]["parameters"]["required"] == ["city"]
    assert box.run(call("weather", '{"city": "Rome"}')) == '{"city": "Rome", "days": 1}'
    assert box.run(call("weather", '{"city": "Atlantis"}')) == "error: LookupError: under water"
    assert box.run(call("weather", '{"city": "Rome", "days": "x"}')).startswith("error: days: Input should be")
    assert box.run(call("weather", "{")).startswith("error: JSONDecodeError")
    assert box.can_run([call("weather", "{}")])
    assert not box.can_run([call("other", "{}")])


async def late() -> None: ...


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, "found int"),
        ([], "the list is empty"),
        (late, "late is async"),
        (lambda *a: a, "has parameters without a name"),
        (City, "found ModelMetaclass"),
    ],
)
def test_what_is_no_tool_is_refused(value: object, said: str) -> None:
    with pytest.raises(BadRequestError, match=said):
        toolbox("t", {"t": value})
    with pytest.raises(BadRequestError, match="no such variable"):
        toolbox("u", {"t": value})


def test_rows_and_templates() -> None:
    rows = rows_of("d", [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}])
    assert column_of(rows, "a") == ["1", "2"]
    assert column_of(rows_of("d", ["x", "y"]), None) == ["x", "y"]
    assert prompts_of_rows("{a}{b} {{a}}", rows) == ["1x {{a}}", "2y {{a}}"]
    for bad, said in (
        (lambda: rows_of("d", "text"), "found str"),
        (lambda: rows_of("d", 3), "found int"),
        (lambda: column_of(rows, None), "name one column"),
        (lambda: column_of(rows, "z"), "row 0 has no column 'z'"),
        (lambda: prompts_of_rows("{z}", rows), "row 0 has no column 'z'"),
        (lambda: prompts_of_rows("same", rows), "all prompts are one"),
    ):
        with pytest.raises(UsageError, match=said):
            bad()
