"""The request fields that chat and completions share: how to sample, when to stop, how to stream."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from mlc_nb.protocol.common import (
    MAX_INTEGER,
    LogitBias,
    Probability,
    StopStrings,
    StreamOptions,
    StrictModel,
    TokenCount,
    not_supported_yet,
)
from mlc_nb.protocol.refusals import as_plain
from mlc_nb.protocol.response_format import GrammarSource, ResponseFormat

__all__ = ["MAX_CHOICES", "DebugConfig", "GenerationFields"]

MAX_CHOICES = 128
LIGHT_TEXT = 1 << 14

Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]


class DebugConfig(StrictModel):
    """Switches outside the OpenAI API, given as ``extra_body={"debug_config": {...}}``.

    Attributes
    ----------
    ignore_eos
        Do not end the answer at the model's stop tokens, only at ``max_tokens`` or a stop string. An answer with a
        ``response_format`` ends where its form does.
    """

    ignore_eos: bool = False
    pinned_system_prompt: Annotated[None, not_supported_yet(False)] = None
    special_request: Annotated[None, not_supported_yet()] = None
    grammar_execution_mode: Annotated[None, not_supported_yet("constraint")] = None
    disagg_config: Annotated[None, not_supported_yet()] = None


class GenerationFields(StrictModel):
    """Fields that chat and completion requests have in common; None takes the default that is described.

    Attributes
    ----------
    model
        The engine's own model name, or None.
    frequency_penalty, presence_penalty
        -2 to 2, default 0; they count generated tokens, not the prompt.
    repetition_penalty
        0.01 to 100, default 1: divides the positive and multiplies the negative logits of generated tokens.
    logit_bias
        Token id to a number from -100 to 100 that is added to its logit.
    max_tokens
        Most tokens in the answer; None, or more than there is room for, goes on to the end of the context window.
    n
        How many answers to give, default 1; their seeds follow from ``seed``.
    seed
        Same seed, same answer; None draws a new one.
    stop
        Up to 16 strings that end the answer at their first character.
    temperature
        0 (or less than 1e-5) is greedy; at most 100, default 1.
    top_p, top_k, min_p
        Keep the smallest set of tokens with this probability mass; this many tokens (0 keeps all); the tokens with
        at least this share of the top probability. Defaults 1, 0 and 0.
    user
        The caller's own label; it has no effect.
    response_format
        The form that the answer is held to; see `ResponseFormat`.
    """

    model: str | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0, allow_inf_nan=False)] | None = None
    logit_bias: LogitBias = Field(default_factory=dict)
    max_tokens: TokenCount | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopStrings = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_INTEGER)] | None = None
    min_p: Probability | None = None
    user: str | None = None
    response_format: Annotated[ResponseFormat, BeforeValidator(as_plain)] | None = None
    debug_config: DebugConfig | None = None

    @model_validator(mode="after")
    def _check_together(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=True")
        return self

    @property
    def grammar(self) -> GrammarSource | None:
        """What the answer must match; None where anything goes."""
        return None if self.response_format is None else self.response_format.source

    @property
    def text_length(self) -> int:
        """Characters or ids of the prompt."""
        return 0

    @property
    def is_light(self) -> bool:
        """Whether it takes no time worth speaking of to encode the prompt and to compile the grammar."""
        return self.grammar is None and self.text_length < LIGHT_TEXT

    @property
    def num_choices(self) -> int:
        """How many answers go out."""
        return self.n or 1

    @property
    def num_generated(self) -> int:
        """How many answers are generated, of which the best go out."""
        return self.num_choices

    @property
    def wants_stream_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def ignores_eos(self) -> bool:
        """Whether the model's stop tokens do not end the answer."""
        return self.debug_config is not None and self.debug_config.ignore_eos
