"""Completions of a raw prompt: the request, and the answer whole and in chunks (which share one type)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from mlc_nb.protocol.common import UnicodeText
from mlc_nb.protocol.responses import ResponseModel, Usage
from mlc_nb.protocol.sampling import MAX_CHOICES, GenerationFields

__all__ = ["CompletionChoice", "CompletionLogprobs", "CompletionRequest", "CompletionResponse"]


def _as_prompt(value: object) -> object:
    if isinstance(value, str):
        prompt: str | tuple[int, ...] = value
    elif isinstance(value, list | tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        prompt = tuple(value)
    elif isinstance(value, list | tuple) and all(isinstance(i, str | list | tuple) for i in value):
        raise ValueError("holds several prompts, which is not supported yet: send one request for each")
    else:
        raise ValueError(f"must be a string or a list of token ids, got {type(value).__name__}")
    if not prompt:
        raise ValueError("is empty: give at least one token")
    return prompt


Prompt = Annotated[UnicodeText | tuple[int, ...], BeforeValidator(_as_prompt)]


class CompletionRequest(GenerationFields):
    """A request to go on from a prompt; see `GenerationFields` for the shared fields.

    Attributes
    ----------
    prompt
        Text, encoded as it is with no BOS token in front, or token ids.
    best_of
        How many answers to generate, of which the ``n`` with the likeliest tokens (on average) go out; default ``n``.
    echo
        Put the prompt in front of the answer.
    suffix
        Text that is put after the answer; the model does not see it.
    logprobs
        0 to 5: the log probability of each token of the answer (with ``echo``, of the prompt too), and of so many
        likeliest tokens in its place.
    """

    prompt: Prompt
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    suffix: UnicodeText | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def text_length(self) -> int:
        """Characters or ids of the prompt."""
        return len(self.prompt)

    @property
    def num_generated(self) -> int:
        """How many answers are generated, of which the best go out."""
        return self.best_of or self.num_choices

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.num_generated < self.num_choices:
            raise ValueError(f"best_of is {self.best_of}, but n is {self.num_choices}: best_of must be at least n")
        if self.stream and self.num_generated > self.num_choices:
            raise ValueError("best_of cannot be streamed: the best answer is known only when all have ended")
        return self


class CompletionLogprobs(ResponseModel):
    """Log probabilities, one entry a token; ``text_offset`` is where its text begins in the choice's text.

    The first token of a prompt that is echoed has none.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    """A text, whole or a piece; the last piece has the finish reason."""

    index: int = 0
    text: str
    finish_reason: Literal["stop", "length"] | None = None
    logprobs: CompletionLogprobs | None = None


class CompletionResponse(ResponseModel):
    """A whole answer, or one element of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str = ""
    choices: list[CompletionChoice]
    usage: Usage | None = None
