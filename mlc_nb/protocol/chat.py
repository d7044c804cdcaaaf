"""Chat completions: the request, and the answer whole and in chunks, as the OpenAI API has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from mlc_nb.protocol.common import (
    StrictModel,
    TokenCount,
    UnicodeText,
    not_supported_yet,
    refused,
    short_repr,
)
from mlc_nb.protocol.refusals import as_plain
from mlc_nb.protocol.responses import ResponseModel, Usage
from mlc_nb.protocol.sampling import GenerationFields
from mlc_nb.protocol.tools import PastToolCall, Tool, ToolCall, ToolCallDelta, ToolChoice, function_names

__all__ = [
    "ChatChoice",
    "ChatChunkChoice",
    "ChatCompletionChunk",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatDelta",
    "ChatLogprobs",
    "ChatMessage",
    "ChatResponseMessage",
    "TokenLogprob",
    "TopLogprob",
]

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_LABELS = 16


def _as_text(value: object) -> object:
    """Join text parts; other kinds of parts have no meaning to a text model."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a string or a list of text parts, got {type(value).__name__}")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            found = f"type {kind!r}" if isinstance(kind, str) else type(part).__name__
            raise ValueError(f"part {index} is of {found}; only {{'type': 'text', 'text': ...}} is supported")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(f"part {index} must have exactly the keys 'type' and 'text', and 'text' a string")
        texts.append(part["text"])
    return "".join(texts)


def _as_role(value: object) -> object:
    if value == "function":
        raise ValueError("'function' is OpenAI's older form and not supported: use the role tool with a tool_call_id")
    if not isinstance(value, str) or value not in ROLES:
        raise ValueError(f"must be one of {', '.join(ROLES)}, got {short_repr(value)}")
    return value


class ChatMessage(StrictModel):
    """One message of the conversation.

    Attributes
    ----------
    role
        ``developer`` means the same as ``system``.
    content
        A string, or a list of text parts, which are joined; may be missing where there are ``tool_calls``.
    name
        Handed to the model's chat template.
    tool_calls
        On an assistant message: the calls that it made.
    tool_call_id
        On a message of role ``tool``: the call whose result it is.
    """

    role: Annotated[str, BeforeValidator(_as_role)]
    content: Annotated[UnicodeText | None, BeforeValidator(_as_text)] = None
    name: UnicodeText | None = None
    # An assistant message that is copied from a response carries these, empty.
    refusal: Annotated[None, not_supported_yet()] = None
    annotations: Annotated[None, not_supported_yet([])] = None
    audio: Annotated[None, not_supported_yet()] = None
    function_call: Annotated[None, not_supported_yet()] = None
    tool_calls: Annotated[tuple[PastToolCall, ...], BeforeValidator(_as_tuple)] = ()
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _suits_its_role(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls is given on a message of role {self.role}; only the assistant makes calls")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(f"tool_call_id is given on a message of role {self.role}; it belongs to the role tool")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("tool_call_id is missing: a message of role tool says which call it answers")
        if self.content is None and not self.tool_calls:
            raise ValueError(f"content is missing: a message of role {self.role} needs text")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content or ""}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def _as_tuple(value: object) -> object:
    if value is None:
        return ()
    return tuple(as_plain(item) for item in value) if isinstance(value, list | tuple) else value


def _as_plain_messages(value: object) -> object:
    """Take message objects, such as the one of an earlier response, for their dicts."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a list of messages, got {type(value).__name__}")
    if not value:
        raise ValueError("is empty: give at least one message")
    return [as_plain(message) for message in value]


class ChatCompletionRequest(GenerationFields):
    """A request for the next assistant message; see `GenerationFields` for the shared fields.

    Attributes
    ----------
    messages
        The conversation; a system message only first, an assistant message not last.
    logprobs, top_logprobs
        Give the log probability of each token of the answer, and of the 0 to 20 likeliest tokens in its place.
    max_completion_tokens
        The newer name of ``max_tokens``.
    tools
        Functions that the model may ask to have run; needs a chat template that knows tools.
    tool_choice
        ``auto`` (the default where there are tools), ``none``, ``required`` (at least one call) or the one function to
        call, ``{"type": "function", "function": {"name": ...}}``.
    parallel_tool_calls
        Whether one answer may make several calls; true unless it is said otherwise.
    metadata, prompt_cache_key, safety_identifier
        The caller's own labels; they have no effect (prompts share a cache without a key).
    """

    messages: Annotated[list[ChatMessage], BeforeValidator(_as_plain_messages)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_completion_tokens: TokenCount | None = None
    audio: Annotated[None, not_supported_yet()] = None
    function_call: Annotated[None, refused("is OpenAI's older form: use tool_choice", "none")] = None
    functions: Annotated[None, refused("is OpenAI's older form: use tools", [])] = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_LABELS)] | None = None
    modalities: Annotated[None, not_supported_yet(["text"])] = None
    moderation: Annotated[None, not_supported_yet()] = None
    parallel_tool_calls: bool | None = None
    prediction: Annotated[None, not_supported_yet()] = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Annotated[None, not_supported_yet()] = None
    prompt_cache_retention: Annotated[None, not_supported_yet()] = None
    reasoning_effort: Annotated[None, not_supported_yet("none")] = None
    safety_identifier: str | None = None
    service_tier: Annotated[None, not_supported_yet("auto", "default")] = None
    store: Annotated[None, refused("asks to keep the answer, and nothing is kept here: leave it out", False)] = None
    tool_choice: ToolChoice | None = None
    tools: Annotated[tuple[Tool, ...], BeforeValidator(_as_tuple)] = ()
    verbosity: Annotated[None, not_supported_yet("medium")] = None
    web_search_options: Annotated[None, not_supported_yet()] = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=True")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise ValueError(
                f"max_tokens is {self.max_tokens} but max_completion_tokens, its other name, is "
                f"{self.max_completion_tokens}: give one of them"
            )
        self._check_tools()
        for index, message in enumerate(self.messages[1:], start=1):
            if message.role in ("system", "developer"):
                raise ValueError(f"messages[{index}] has the role {message.role}, which only the first may have")
        if self.messages[-1].role == "assistant":
            raise ValueError(
                "messages ends with an assistant message: the last one must be the user's (completions.create goes on "
                "from any text)"
            )
        return self

    def _check_tools(self) -> None:
        names = function_names(self.tools)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"tools has two functions with the name {twice[0]!r}")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice asks for a call, but there are no tools")
        named = self.named_function
        if named is not None and named not in names:
            raise ValueError(f"tool_choice names the function {named!r}; the tools are {', '.join(names)}")
        if self.tools and self.tool_choice != "none" and self.grammar is not None:
            raise ValueError(
                "response_format together with tools is not supported yet: give tool_choice='none' or one of them"
            )
        called: set[str] = set()
        for index, message in enumerate(self.messages):
            called.update(call.id for call in message.tool_calls)
            if message.tool_call_id is not None and message.tool_call_id not in called:
                raise ValueError(
                    f"messages[{index}].tool_call_id is {message.tool_call_id!r}, but no assistant message before it "
                    "has tool_calls with that id"
                )

    @property
    def named_function(self) -> str | None:
        """The function that must be called, if it is one by name."""
        return None if self.tool_choice is None or isinstance(self.tool_choice, str) else self.tool_choice.function.name

    @property
    def text_length(self) -> int:
        """Characters of all messages."""
        return sum(len(message.content or "") for message in self.messages)

    @property
    def is_light(self) -> bool:
        """Whether it takes no time worth speaking of to encode the messages and to compile grammars."""
        return super().is_light and not self.tools

    @property
    def token_limit(self) -> int | None:
        """Most tokens in the answer, whichever of the two names gave it."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens


class TopLogprob(ResponseModel):
    """A likely token in one place of the answer; ``bytes`` are its UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    """The token that was chosen, and the likeliest ones in its place."""

    top_logprobs: list[TopLogprob] = Field(default_factory=list)


class ChatLogprobs(ResponseModel):
    """Log probabilities of the tokens whose text is in ``content``."""

    content: list[TokenLogprob] | None = None
    refusal: None = None


class ChatResponseMessage(ResponseModel):
    """The answer; ``content`` is None where it consists of calls alone."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[ToolCall] | None = None
    refusal: None = None


class ChatChoice(ResponseModel):
    """One answer and why it ended."""

    index: int = 0
    finish_reason: Literal["stop", "length", "tool_calls"]
    message: ChatResponseMessage
    logprobs: ChatLogprobs | None = None


class ChatCompletionResponse(ResponseModel):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str = ""
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(ResponseModel):
    """What a chunk adds: the role once, in the first chunk; ``content`` is always a string, maybe empty."""

    role: Literal["assistant"] | None = None
    content: str = ""
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(ResponseModel):
    """A piece of an answer; the last one has the finish reason."""

    index: int = 0
    delta: ChatDelta
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(ResponseModel):
    """One element of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str = ""
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
