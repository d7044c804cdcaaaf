"""How families of models write calls of functions, told from their chat templates; and grammars that force a call."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlc_nb.engine.bounded_json import with_bounded_numbers
from mlc_nb.engine.grammar import JSON_OPTIONS
from mlc_nb.protocol.response_format import GrammarSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

    from mlc_nb.protocol.chat_template import ChatTemplate
    from mlc_nb.protocol.tools import FunctionDefinition

__all__ = ["HERMES", "LLAMA", "MISTRAL", "ToolFormat", "call_grammar", "tool_format"]

_MOST_CALLS = 16


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls stand in the text of an answer; each is a JSON object.

    Attributes
    ----------
    opener, closer
        What stands in front of a call, or of all calls, and behind it.
    arguments_key
        What the model calls the arguments in the object.
    separators
        What may stand around objects, besides white space.
    may_be_bare
        Whether an answer may begin with a call without the opener.
    """

    name: str
    opener: str
    closer: str
    arguments_key: str
    separators: str = ""
    may_be_bare: bool = False


HERMES = ToolFormat("Hermes/Qwen", "<tool_call>", "</tool_call>", "arguments")
LLAMA = ToolFormat("Llama 3.1", "<|python_tag|>", "", "parameters", separators=";,", may_be_bare=True)
MISTRAL = ToolFormat("Mistral", "[TOOL_CALLS]", "", "arguments", separators="[,]")


def tool_format(template: ChatTemplate) -> ToolFormat | None:
    """Return how the model writes calls; None where its template does not say so in a way that is known."""
    source = template.source
    if "[TOOL_CALLS]" in source:
        return None if "[ARGS]" in source else MISTRAL
    if "<tool_call>" in source:
        return None if "<function=" in source or "<arg_key>" in source else HERMES
    if "<|python_tag|>" in source or '"parameters"' in source:
        return LLAMA
    return None


def call_grammar(
    form: ToolFormat, functions: Sequence[FunctionDefinition], tokenizer: Tokenizer, *, parallel: bool
) -> GrammarSource:
    """Return a grammar of one call of one of the functions, or of several where ``parallel``."""
    opener, more = _literal(form.opener, tokenizer), f"{{0,{_MOST_CALLS - 1}}}"
    rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(functions)))}"]
    if form is HERMES:
        closer = _literal(form.closer, tokenizer)
        rules.append(f'start: one ("\\n" one){more}' if parallel else "start: one")
        rules.append(f'one: {opener} "\\n" call "\\n" {closer}')
    elif form is MISTRAL:
        rules.append(f'start: {opener} "[" call (", " call){more} "]"' if parallel else f'start: {opener} "[" call "]"')
    else:
        rules.append("start: call")  # Llama's templates have one call in a message
    for index, function in enumerate(functions):
        head = json.dumps(f'{{"name": {json.dumps(function.name)}, "{form.arguments_key}": ')
        rules.append(f'call_{index}: {head} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {parameters_schema(function)}")
    return GrammarSource("lark", "\n".join(rules), "tools")


def parameters_schema(function: FunctionDefinition) -> str:
    """JSON text of the schema of a function's arguments."""
    schema: dict[str, Any] = dict(function.parameters or {"properties": {}, "additionalProperties": False})
    schema.setdefault("type", "object")
    return json.dumps({**with_bounded_numbers(schema), "x-guidance": JSON_OPTIONS})


def _literal(text: str, tokenizer: Tokenizer) -> str:
    """Write a text in Lark; a special token can only be asked for by its id."""
    token_id = tokenizer.token_to_id(text)
    added = tokenizer.get_added_tokens_decoder()
    if token_id is not None and token_id in added and added[token_id].special:
        return f"<[{token_id}]>"
    return json.dumps(text)
