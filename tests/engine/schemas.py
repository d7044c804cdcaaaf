"""Fifty schemas in the manner of the JSON Schema test suite; each is to be met by a whole answer."""

from __future__ import annotations

from typing import Any


def closed(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """An object with these properties only, all of them required unless said otherwise."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
        **more,
    }


SHORT = {"type": "string", "maxLength": 24}
AGE = {"type": "integer", "minimum": 0, "maximum": 130}

SCHEMAS: dict[str, dict[str, Any]] = {
    # types
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "string": SHORT,
    "several types": {"type": ["integer", "boolean", "null"]},
    # enum and const
    "enum of strings": {"enum": ["red", "green", "blue"]},
    "enum of kinds": {"enum": [6, "foo", [], True, {"foo": 12}]},
    "enum with escapes": {"enum": ["foo\nbar", "foo\rbar", 'say "hi"', "back\\slash"]},
    "const": {"const": {"foo": "bar", "baz": ["a", 1]}},
    "const beyond ascii": {"const": "Grüße 你好 👩‍👩‍👧‍👦"},
    "enum in properties": closed({"foo": {"enum": ["foo"]}, "bar": {"enum": ["bar", "rab"]}}),
    # numbers with bounds
    "minimum and maximum": {"type": "number", "minimum": 1.1, "maximum": 3.5},
    "exclusive bounds": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "integers below zero": {"type": "integer", "minimum": -120, "maximum": -7},
    "multiple of": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000},
    # strings
    "length": {"type": "string", "minLength": 3, "maxLength": 12},
    "length in characters": {"type": "string", "minLength": 2, "maxLength": 2},
    "pattern": {"type": "string", "pattern": "^[A-Z][a-z]{2,7}-[0-9]{3}$"},
    "pattern without anchors": {"type": "string", "pattern": "^.{0,5}ab{1,3}c.{0,5}$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "email": {"type": "string", "format": "email", "maxLength": 30},
    # arrays
    "array of integers": {"type": "array", "items": AGE, "minItems": 1, "maxItems": 5},
    "no more than one": {"type": "array", "items": SHORT, "maxItems": 1},
    "exactly three": {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3},
    "a tuple": {"type": "array", "prefixItems": [AGE, SHORT, {"type": "boolean"}], "items": False, "minItems": 3},
    "a tuple and more": {"type": "array", "prefixItems": [{"enum": ["head"]}], "items": AGE, "maxItems": 4},
    "nested arrays": {
        "type": "array",
        "items": {"type": "array", "items": AGE, "minItems": 2, "maxItems": 2},
        "minItems": 1,
        "maxItems": 3,
    },
    "array of objects": {
        "type": "array",
        "items": closed({"id": AGE, "name": SHORT}),
        "minItems": 1,
        "maxItems": 3,
    },
    # objects
    "properties": closed({"name": SHORT, "age": AGE}),
    "optional properties": closed({"name": SHORT, "age": AGE, "nick": SHORT}, ["name"]),
    "nested objects": closed({"user": closed({"name": SHORT, "home": closed({"city": SHORT, "zip": AGE})})}),
    "additional properties of one type": {
        "type": "object",
        "properties": {"total": AGE},
        "required": ["total"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 3,
    },
    "property names with escapes": closed({'foo"bar': AGE, "foo\nbar": AGE, "föö": AGE}),
    "a required property without a schema": {
        "type": "object",
        "properties": {"foo": {"enum": [1, 2]}},
        "required": ["foo", "bar"],
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        "maxProperties": 2,
    },
    "no properties": closed({}),
    # combinations
    "any of": {"anyOf": [AGE, {"type": "boolean"}]},
    "any of objects": {"anyOf": [closed({"cat": SHORT}), closed({"dog": SHORT, "barks": {"type": "boolean"}})]},
    "one of": {"oneOf": [{"type": "boolean"}, AGE]},
    "one of by a constant": {
        "oneOf": [
            closed({"kind": {"const": "circle"}, "radius": AGE}),
            closed({"kind": {"const": "square"}, "side": AGE}),
        ]
    },
    "all of": {"allOf": [{"type": "integer", "minimum": 10}, {"maximum": 20}]},
    "nullable": closed({"value": {"anyOf": [SHORT, {"type": "null"}]}}),
    # references
    "a definition": closed(
        {"from": {"$ref": "#/$defs/city"}, "to": {"$ref": "#/$defs/city"}},
        **{"$defs": {"city": {"enum": ["Rome", "Paris", "Oslo"]}}},
    ),
    "a pointer with escapes": closed({"a": {"$ref": "#/$defs/til~0de~1slash"}}, **{"$defs": {"til~de/slash": AGE}}),
    "a list by recursion": {
        "$ref": "#/$defs/node",
        "$defs": {"node": closed({"value": AGE, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}})},
    },
    "boolean schemas": {
        "type": "object",
        "properties": {"foo": {"type": "null"}, "bar": False},
        "required": ["foo"],
        "additionalProperties": False,
    },
}
