"""What a chat request with tools needs: which functions are offered, how calls are read, and what forces them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlc_nb.engine.tool_calls import ToolCallParser
from mlc_nb.engine.tool_formats import MISTRAL, ToolFormat, call_grammar, parameters_schema, tool_format
from mlc_nb.errors import BadRequestError
from mlc_nb.protocol.response_format import GrammarSource

if TYPE_CHECKING:
    from mlc_nb.engine.model import LoadedModel
    from mlc_nb.protocol.chat import ChatCompletionRequest
    from mlc_nb.protocol.tools import Tool

__all__ = ["ToolUse", "messages_for_template", "plan_tool_use"]

_MISTRAL_ID_LENGTH = 9


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request.

    Attributes
    ----------
    tools
        What the model may call.
    grammar
        What forces a call; None where the model decides.
    shown_token_ids
        Special tokens that open or close calls, so that they must show in the text.
    """

    tool_format: ToolFormat
    tools: tuple[Tool, ...]
    parallel: bool
    grammar: GrammarSource | None
    shown_token_ids: frozenset[int]

    def for_template(self) -> list[dict[str, Any]]:
        """Return the tools as chat templates read them."""
        return [tool.for_template() for tool in self.tools]

    def parser(self) -> ToolCallParser:
        """Return what reads the calls of one answer."""
        names = frozenset(tool.function.name for tool in self.tools)
        return ToolCallParser(self.tool_format, names, parallel=self.parallel)


def plan_tool_use(model: LoadedModel, request: ChatCompletionRequest) -> ToolUse | None:
    """Return how the request uses tools; None where it does not.

    Raises
    ------
    BadRequestError
        The model's template does not know tools, or a function's parameters are no usable schema.
    """
    if not request.tools or request.tool_choice == "none" or model.chat_template is None:
        return None
    form = tool_format(model.chat_template) if model.chat_template.uses_tools else None
    if form is None:
        what = "in a way that is known here" if model.chat_template.uses_tools else "at all"
        raise BadRequestError(
            f"Invalid request: tools cannot be used with {model.model_id}: its chat template does not write tools "
            f"{what}. Take a model that was trained to call tools, or leave tools out (response_format can hold an "
            "answer to JSON)."
        )
    named = request.named_function
    tools = tuple(tool for tool in request.tools if named in (None, tool.function.name))
    # By name means this function, once.
    parallel = request.parallel_tool_calls is not False and named is None
    is_forced = named is not None or request.tool_choice == "required"
    markers = {model.tokenizer.token_to_id(marker) for marker in (form.opener, form.closer) if marker}
    return ToolUse(
        tool_format=form,
        tools=tools,
        parallel=parallel,
        grammar=_forced(model, form, tools, parallel=parallel) if is_forced else None,
        shown_token_ids=frozenset(token_id for token_id in markers if token_id is not None),
    )


def _forced(model: LoadedModel, form: ToolFormat, tools: tuple[Tool, ...], *, parallel: bool) -> GrammarSource:
    for index, tool in enumerate(tools):
        field = f"tools[{index}].function.parameters"
        # On its own first, so that the error says which function it is about.
        model.grammars.compile(model, GrammarSource("json_schema", parameters_schema(tool.function), field))
    functions = [tool.function for tool in tools]
    return call_grammar(form, functions, model.tokenizer, parallel=parallel)


def messages_for_template(request: ChatCompletionRequest, model: LoadedModel) -> list[dict[str, Any]]:
    """Return the conversation as the model's chat template reads it."""
    messages = [message.for_template() for message in request.messages]
    if model.chat_template is not None and tool_format(model.chat_template) is MISTRAL:
        # Mistral's templates refuse ids that do not have nine letters or digits.
        for message in messages:
            if "tool_call_id" in message:
                message["tool_call_id"] = _short_id(message["tool_call_id"])
            for call in message.get("tool_calls", ()):
                call["id"] = _short_id(call["id"])
    return messages


def _short_id(call_id: str) -> str:
    if len(call_id) == _MISTRAL_ID_LENGTH and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_MISTRAL_ID_LENGTH]
