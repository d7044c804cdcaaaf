"""What chat and completion responses share."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = ["PromptTokensDetails", "ResponseModel", "Usage"]


class ResponseModel(BaseModel):
    """Base of everything that goes out."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class PromptTokensDetails(ResponseModel):
    """How many of the prompt's tokens the prefix cache had already."""

    cached_tokens: int


class Usage(ResponseModel):
    """Tokens of one request, and how fast they went.

    Attributes
    ----------
    completion_tokens
        Generated tokens; the stop token that ended the answer is not one of them.
    extra
        Measured rates: ``cached_tokens``, ``prefill_tokens``, ``decode_tokens``, ``prefill_tokens_per_s``,
        ``decode_tokens_per_s``,
        ``ttft_s``, ``inter_token_latency_s`` and ``end_to_end_latency_s``; None where there was nothing to measure
        (a decode rate needs two tokens).
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    extra: dict[str, Any] | None = None
