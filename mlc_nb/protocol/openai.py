"""The OpenAI-shaped objects, gathered for import."""

from __future__ import annotations

from mlc_nb.protocol.chat import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatMessage,
)
from mlc_nb.protocol.completions import CompletionRequest, CompletionResponse
from mlc_nb.protocol.responses import Usage

__all__ = [
    "ChatCompletionChunk",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatMessage",
    "CompletionRequest",
    "CompletionResponse",
    "Usage",
]
