"""``--tools``: functions of the user that a model may call, and tools that are only described to it."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlc_nb.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mlc_nb.protocol.tools import ToolCall

__all__ = ["Toolbox", "call_text", "result_text", "toolbox"]

_FORMS = "a function, a list of functions, or a list of tools as OpenAI writes them"
_LONGEST_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Toolbox:
    """What a model may call.

    Attributes
    ----------
    tools
        As ``ChatCompletionRequest.tools`` takes them.
    functions
        Those that can be run here, by name; the other tools are for the user to run.
    """

    tools: list[dict[str, Any]] = field(default_factory=list)
    functions: dict[str, Callable[..., object]] = field(default_factory=dict)

    def can_run(self, calls: list[ToolCall]) -> bool:
        """Whether all of the calls are of functions that were given."""
        return all(call.function.name in self.functions for call in calls)

    def run(self, call: ToolCall) -> str:
        """Run a call; an exception of the function, or arguments that it does not take, are the result as well."""
        from pydantic import ValidationError, validate_call

        try:
            result = validate_call(self.functions[call.function.name])(**json.loads(call.function.arguments or "{}"))
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
            return f"error: {'; '.join(problems)}"
        except Exception as error:  # whatever the user's function raises, the model learns of it
            return f"error: {type(error).__name__}: {error}"
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def toolbox(name: str, namespace: Mapping[str, Any]) -> Toolbox:
    """Return the tools in the variable ``name``.

    Raises
    ------
    BadRequestError
        There is no such variable, or it holds something else than tools.
    """
    if name not in namespace:
        raise BadRequestError(f"--tools {name}: there is no such variable. Give the name of {_FORMS}.")
    value = namespace[name]
    entries = list(value) if isinstance(value, list | tuple) else [value]
    if not entries:
        raise BadRequestError(f"--tools {name}: the list is empty. Give {_FORMS}.")
    box = Toolbox()
    for entry in entries:
        if isinstance(entry, dict):
            box.tools.append(entry)
        elif inspect.isroutine(entry):
            box.tools.append(_described(entry, name))
            box.functions[entry.__name__] = entry
        else:
            raise BadRequestError(f"--tools {name}: found {type(entry).__name__}. Give {_FORMS}.")
    return box


def call_text(call: ToolCall) -> str:
    """Return a call as one line."""
    return _shortened(f"{call.function.name}({call.function.arguments})")


def result_text(result: str) -> str:
    """Return the result of a call as one line."""
    return _shortened(" ".join(result.split()))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 2] + " …"


def _described(function: Any, name: str) -> dict[str, Any]:
    from pydantic import PydanticUserError, TypeAdapter

    if inspect.iscoroutinefunction(function):
        raise BadRequestError(f"--tools {name}: {function.__name__} is async. Give a function that returns its result.")
    try:
        parameters = TypeAdapter(function).json_schema()
    except (PydanticUserError, ValueError, TypeError, NameError) as error:
        raise BadRequestError(
            f"--tools {name}: the parameters of {function.__name__} cannot be described to a model: "
            f"{str(error).splitlines()[0]}. Annotate them with types that JSON has."
        ) from None
    if parameters.get("type") != "object":
        raise BadRequestError(
            f"--tools {name}: {function.__name__} has parameters without a name (*args or /). Give each a name."
        )
    described: dict[str, Any] = {"name": function.__name__, "parameters": parameters}
    if function.__doc__:
        described["description"] = inspect.getdoc(function)
    return {"type": "function", "function": described}
