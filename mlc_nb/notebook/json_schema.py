"""``--json-schema``: from a variable or a file to a JSON schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc_nb.errors import BadRequestError
from mlc_nb.protocol.response_format import schema_text

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["json_schema_format"]

_FORMS = (
    "a variable that holds a schema (a dict, JSON text, a pydantic model or another type), or the path of a .json file"
)


def json_schema_format(name: str, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``response_format`` of the schema that ``name``, a variable or a file, stands for.

    A variable goes before a file.

    Raises
    ------
    BadRequestError
        There is neither, or it holds no schema.
    """
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": _schema(name, namespace)}}


def _schema(name: str, namespace: Mapping[str, Any]) -> dict[str, Any]:
    if name in namespace:
        return _of_value(namespace[name], f"--json-schema {name}")
    path = Path(name).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = "there is no such variable or file" if isinstance(error, FileNotFoundError) else str(error)
        raise BadRequestError(f"--json-schema {name}: {reason}. Give {_FORMS}.") from None
    return _of_value(text, f"--json-schema {name}")


def _of_value(value: Any, option: str) -> dict[str, Any]:
    from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter

    if isinstance(value, str | dict):
        try:
            schema: dict[str, Any] = json.loads(schema_text(value))
        except ValueError as error:
            raise BadRequestError(f"{option}: {error}. Give {_FORMS}.") from None
        return schema
    if isinstance(value, type) or hasattr(value, "__origin__"):
        try:
            closed: dict[str, Any] = _closed(TypeAdapter(value).json_schema())
        except (PydanticSchemaGenerationError, PydanticUserError) as error:
            reason = str(error).splitlines()[0]
            raise BadRequestError(f"{option}: no schema can be made of this type: {reason}") from None
        return closed
    raise BadRequestError(f"{option}: found {type(value).__name__}. Give {_FORMS}.")


def _closed(schema: Any) -> Any:
    """Allow no keys but those that a type has: it would drop others, and a model could write them without an end."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(part) for name, part in schema.items()}
    if schema.get("type") == "object" and "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed
