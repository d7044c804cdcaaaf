"""Functions that a model may ask its caller to run: how they are offered, called and answered."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mlc_nb.protocol.common import StrictModel, UnicodeText, short_repr
from mlc_nb.protocol.responses import ResponseModel

__all__ = [
    "FunctionCall",
    "FunctionDefinition",
    "FunctionDelta",
    "PastToolCall",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "function_names",
]

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionDefinition(StrictModel):
    """A function that the caller can run.

    Attributes
    ----------
    parameters
        JSON schema of an object that holds the arguments; None where there are none.
    strict
        Has no effect: arguments follow the schema wherever a call is required.
    """

    name: FunctionName
    description: UnicodeText | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """An entry of ``tools``; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates read it."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


def function_names(tools: tuple[Tool, ...]) -> list[str]:
    """Names of the functions, in order."""
    return [tool.function.name for tool in tools]


class _Named(StrictModel):
    name: FunctionName


class _NamedChoice(StrictModel):
    type: Literal["function"]
    function: _Named


def _as_tool_choice(value: object) -> object:
    if isinstance(value, dict):
        if value.get("type") in ("allowed_tools", "custom"):
            raise ValueError(f"of type {value['type']!r} is not supported yet: name one function, or give fewer tools")
        return value
    if value not in (None, "none", "auto", "required"):
        raise ValueError(
            "must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}, got "
            f"{short_repr(value)}"
        )
    return value


ToolChoice = Annotated[_NamedChoice | Literal["none", "auto", "required"], BeforeValidator(_as_tool_choice)]


def _as_arguments(value: object) -> object:
    """Take a dict for its JSON text."""
    if not isinstance(value, dict):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"must hold what JSON can hold: {error}") from None


class _PastFunctionCall(StrictModel):
    name: str
    arguments: Annotated[UnicodeText, BeforeValidator(_as_arguments)]

    def for_template(self) -> dict[str, Any]:
        """Templates write arguments as JSON, so they want the value; what is no JSON stays the text that it is."""
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            arguments = self.arguments
        return {"name": self.name, "arguments": arguments}


class PastToolCall(StrictModel):
    """A call that an assistant message of the conversation made; arguments as JSON text or as a dict."""

    id: str
    type: Literal["function"] = "function"
    function: _PastFunctionCall

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates read it."""
        return {"id": self.id, "type": self.type, "function": self.function.for_template()}


class FunctionCall(ResponseModel):
    """Which function to run; ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(ResponseModel):
    """A call in an answer; its result goes back in a message of role ``tool`` with the same id."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionDelta(ResponseModel):
    """The name, once, and pieces of the arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(ResponseModel):
    """What a chunk adds to the call with this index; the first piece has id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta
