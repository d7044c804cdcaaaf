"""Narrows JSON schemas where a model could write without an end: a number has no last digit by itself.

Every answer that the narrowed schema allows is one that the given schema allows.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ANY_OBJECT", "with_bounded_numbers"]

_LARGEST = 2**53 - 1
"""In a number of JSON, every integer up to here is kept by every reader."""

_SMALLEST_STEP = 1e-9

_ONE_SCHEMA = ("items", "additionalProperties", "additionalItems", "unevaluatedProperties", "contains", "propertyNames")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

ANY_OBJECT: dict[str, Any] = {
    "type": "object",
    "additionalProperties": {"$ref": "#/$defs/value"},
    "$defs": {
        "value": {
            "anyOf": [
                {"type": ["string", "number", "boolean", "null"]},
                {"type": "array", "items": {"$ref": "#/$defs/value"}},
                {"type": "object", "additionalProperties": {"$ref": "#/$defs/value"}},
            ]
        }
    },
}
"""A schema of every JSON object."""


def with_bounded_numbers(schema: Any) -> Any:
    """Return a schema whose numbers, where it sets them no bound, go to 2**53 and have at most 9 decimal places."""
    if not isinstance(schema, dict):
        return schema
    bounded = dict(schema)
    for key in _ONE_SCHEMA:
        if isinstance(bounded.get(key), dict):
            bounded[key] = with_bounded_numbers(bounded[key])
    for key in _LISTS_OF_SCHEMAS:
        if isinstance(bounded.get(key), list):
            bounded[key] = [with_bounded_numbers(part) for part in bounded[key]]
    for key in _MAPS_OF_SCHEMAS:
        if isinstance(bounded.get(key), dict):
            bounded[key] = {name: with_bounded_numbers(part) for name, part in bounded[key].items()}
    types = bounded.get("type")
    types = types if isinstance(types, list) else [types]
    if ("number" in types or "integer" in types) and "enum" not in bounded and "const" not in bounded:
        _bound(bounded, has_fractions="number" in types)
    return bounded


def _bound(schema: dict[str, Any], *, has_fractions: bool) -> None:
    limits = [schema.get(key) for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")]
    given = [limit for limit in limits if limit is not None]
    if any(isinstance(limit, bool) or not isinstance(limit, int | float) or abs(limit) >= _LARGEST for limit in given):
        return
    if limits[:2] == [None, None]:
        schema["minimum"] = -_LARGEST
    if limits[2:] == [None, None]:
        schema["maximum"] = _LARGEST
    if has_fractions:
        schema.setdefault("multipleOf", _SMALLEST_STEP)
