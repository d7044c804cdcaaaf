"""Chat completions: the request, and the answer whole and in chunks, as the OpenAI API has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from mlc_nb.protocol.common import StrictModel, UnicodeText, not_supported_yet, short_repr
from mlc_nb.protocol.responses import ResponseModel, Usage
from mlc_nb.protocol.sampling import GenerationFields

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

ROLES = ("system", "developer", "user", "assistant")


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
    if value in ("tool", "function"):
        raise ValueError(f"{value!r} is not supported yet: tool calling comes in a later version")
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
        A string, or a list of text parts, which are joined.
    name
        Handed to the model's chat template.
    """

    role: Annotated[str, BeforeValidator(_as_role)]
    content: Annotated[UnicodeText | None, BeforeValidator(_as_text)] = None
    name: str | None = None
    # An assistant message that is copied from a response carries these, empty.
    refusal: Annotated[None, not_supported_yet()] = None
    annotations: Annotated[None, not_supported_yet([])] = None
    audio: Annotated[None, not_supported_yet()] = None
    function_call: Annotated[None, not_supported_yet()] = None
    tool_calls: Annotated[None, not_supported_yet([])] = None
    tool_call_id: Annotated[None, not_supported_yet()] = None

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None:
            raise ValueError(f"content is missing: a message of role {self.role} needs text")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        return message


def _as_plain_messages(value: object) -> object:
    """Take message objects, such as the one of an earlier response, for their dicts."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a list of messages, got {type(value).__name__}")
    if not value:
        raise ValueError("is empty: give at least one message")
    return [message.model_dump() if isinstance(message, BaseModel) else message for message in value]


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
    """

    messages: Annotated[list[ChatMessage], BeforeValidator(_as_plain_messages)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    audio: Annotated[None, not_supported_yet()] = None
    function_call: Annotated[None, not_supported_yet("none")] = None
    functions: Annotated[None, not_supported_yet([])] = None
    metadata: Annotated[None, not_supported_yet({})] = None
    modalities: Annotated[None, not_supported_yet(["text"])] = None
    moderation: Annotated[None, not_supported_yet()] = None
    parallel_tool_calls: Annotated[None, not_supported_yet(True)] = None
    prediction: Annotated[None, not_supported_yet()] = None
    prompt_cache_key: Annotated[None, not_supported_yet()] = None
    prompt_cache_options: Annotated[None, not_supported_yet()] = None
    prompt_cache_retention: Annotated[None, not_supported_yet()] = None
    reasoning_effort: Annotated[None, not_supported_yet("none")] = None
    safety_identifier: Annotated[None, not_supported_yet()] = None
    service_tier: Annotated[None, not_supported_yet("auto", "default")] = None
    store: Annotated[None, not_supported_yet(False)] = None
    tool_choice: Annotated[None, not_supported_yet("none")] = None
    tools: Annotated[None, not_supported_yet([])] = None
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
        for index, message in enumerate(self.messages[1:], start=1):
            if message.role in ("system", "developer"):
                raise ValueError(f"messages[{index}] has the role {message.role}, which only the first may have")
        if self.messages[-1].role == "assistant":
            raise ValueError("messages ends with an assistant message: the last one must be the user's")
        return self

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
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(ResponseModel):
    """One answer and why it ended."""

    index: int = 0
    finish_reason: Literal["stop", "length"]
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


class ChatChunkChoice(ResponseModel):
    """A piece of an answer; the last one has the finish reason."""

    index: int = 0
    delta: ChatDelta
    finish_reason: Literal["stop", "length"] | None = None
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
