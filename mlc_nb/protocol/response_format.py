"""The shape that a request wants its answer in: any JSON, JSON of a schema, a regular expression or a grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from mlc_nb.protocol.common import StrictModel, UnicodeText, short_repr

__all__ = ["MAX_GRAMMAR_CHARACTERS", "GrammarSource", "JsonSchemaFormat", "ResponseFormat", "schema_text"]

MAX_GRAMMAR_CHARACTERS = 1 << 18
"""Of a schema, expression or grammar: what is longer describes data rather than a form."""


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """What an answer must match, in text.

    Attributes
    ----------
    kind
        ``json_object`` (any, without a text), ``json_schema`` (JSON text), ``regex`` or ``lark``.
    field
        The request field that it came from, for error messages.
    """

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    text: str
    field: str


class JsonSchemaFormat(StrictModel):
    """OpenAI's ``json_schema`` object; the schema is enforced whether ``strict`` is set or not."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """The form of the answer.

    Attributes
    ----------
    type
        ``text`` (no form), ``json_object`` (any JSON object, or what ``schema`` says), ``json_schema``; as
        extensions ``regex`` and ``grammar``.
    schema
        With ``json_object``: a JSON schema, as text or as a dict.
    json_schema
        With ``json_schema``: ``{"name": ..., "schema": {...}}``.
    regex
        With ``regex``: what the whole answer matches; neither look-around nor back references.
    grammar
        With ``grammar``: a context-free grammar in llguidance's dialect of Lark, whose first rule is ``start``.
    """

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    schema_: str | dict[str, Any] | None = Field(default=None, alias="schema")
    json_schema: JsonSchemaFormat | None = None
    regex: UnicodeText | None = None
    grammar: UnicodeText | None = None

    @model_validator(mode="after")
    def _check_form(self) -> ResponseFormat:
        forms = {"schema": self.schema_, "json_schema": self.json_schema, "regex": self.regex, "grammar": self.grammar}
        own = "schema" if self.type == "json_object" else self.type
        foreign = [name for name, form in forms.items() if form is not None and name != own]
        if foreign:
            raise ValueError(f"{foreign[0]} does not go with the type {self.type!r}")
        if own in forms and own != "schema" and forms[own] is None:
            raise ValueError(f"{own} is missing: the type {self.type!r} needs it")
        if self.type != "text":
            _ = self.source
        return self

    @property
    def source(self) -> GrammarSource | None:
        """What the answer must match; None where anything goes."""
        if self.type == "json_schema":
            assert self.json_schema is not None  # checked above
            text, field = schema_text(self.json_schema.schema_), "json_schema.schema"
            return GrammarSource("json_schema", _bounded(text), f"response_format.{field}")
        if self.type == "json_object" and self.schema_ is None:
            return GrammarSource("json_object", "", "response_format")
        if self.type == "json_object":
            return GrammarSource("json_schema", _bounded(schema_text(self.schema_)), "response_format.schema")
        if self.type == "regex":
            return GrammarSource("regex", _bounded(self.regex or ""), "response_format.regex")
        if self.type == "grammar":
            return GrammarSource("lark", _bounded(self.grammar or ""), "response_format.grammar")
        return None


def schema_text(schema: str | dict[str, Any] | None) -> str:
    """Write a JSON schema as JSON text.

    Raises
    ------
    ValueError
        It is no JSON object.
    """
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"schema is no JSON: {reason}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f'schema must be a JSON object such as {{"type": "object"}}, got {short_repr(parsed)}')
    return text


def _bounded(text: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise ValueError(f"has {len(text)} characters of schema or grammar; at most {MAX_GRAMMAR_CHARACTERS} are taken")
    if not text:
        raise ValueError("holds an empty expression or grammar, which only an empty answer could match")
    return text
