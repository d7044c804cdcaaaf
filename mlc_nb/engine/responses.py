"""From the deltas of an answer to OpenAI-shaped chunks and responses."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol, TypeVar

from mlc_nb.engine.choices import best_choices, by_choice
from mlc_nb.protocol.chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogprobs,
    ChatResponseMessage,
    TokenLogprob,
    TopLogprob,
)
from mlc_nb.protocol.completions import CompletionChoice, CompletionLogprobs, CompletionRequest, CompletionResponse

if TYPE_CHECKING:
    from mlc_nb.engine.generation import GenerationRequest
    from mlc_nb.engine.model import LoadedModel
    from mlc_nb.engine.stream import StreamDelta, TokenChance, TokenLogprobs
    from mlc_nb.protocol.chat import ChatCompletionRequest

__all__ = ["ChatResponder", "CompletionResponder", "Responder"]

ChunkT = TypeVar("ChunkT")
ResponseT = TypeVar("ResponseT", covariant=True)


class Responder(Protocol[ChunkT, ResponseT]):
    """Shapes the answers to one request."""

    def chunks(self, delta: StreamDelta) -> list[ChunkT]:
        """Return the elements of the stream for the next delta."""

    def response(self, deltas: list[StreamDelta]) -> ResponseT:
        """Return all answers; the last delta has the usage."""


class ChatResponder:
    """Shapes the answers to a chat request."""

    def __init__(self, request: ChatCompletionRequest, generation: GenerationRequest, model: LoadedModel) -> None:
        self._id = generation.request_id
        self._model = request.model or model.model_id
        self._created = int(time.time())
        self._with_logprobs = bool(request.logprobs)
        self._with_usage = request.wants_stream_usage
        self._begun: set[int] = set()

    def chunks(self, delta: StreamDelta) -> list[ChatCompletionChunk]:
        """Return the elements of the stream for the next delta."""
        choice = ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(role=None if delta.index in self._begun else "assistant", content=delta.text),
            finish_reason=delta.finish_reason,
            logprobs=self._logprobs(delta.logprobs),
        )
        self._begun.add(delta.index)
        chunks = [self._chunk([choice])]
        if self._with_usage and delta.usage is not None:
            last = self._chunk([])
            last.usage = delta.usage
            chunks.append(last)
        return chunks

    def response(self, deltas: list[StreamDelta]) -> ChatCompletionResponse:
        """Return all answers; the last delta has the usage."""
        usage = deltas[-1].usage
        assert usage is not None  # the engine sets it in the last delta
        choices = [self._choice(index, pieces) for index, pieces in enumerate(by_choice(deltas))]
        return ChatCompletionResponse(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
        )

    def _choice(self, index: int, deltas: list[StreamDelta]) -> ChatChoice:
        finish_reason = deltas[-1].finish_reason
        assert finish_reason is not None  # the engine sets it in the last delta of each answer
        return ChatChoice(
            index=index,
            finish_reason=finish_reason,
            message=ChatResponseMessage(content="".join(delta.text for delta in deltas)),
            logprobs=self._logprobs([entry for delta in deltas for entry in delta.logprobs]),
        )

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        return ChatCompletionChunk(id=self._id, created=self._created, model=self._model, choices=choices)

    def _logprobs(self, entries: tuple[TokenLogprobs, ...] | list[TokenLogprobs]) -> ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        return ChatLogprobs(
            content=[
                TokenLogprob(
                    token=entry.chosen.token,
                    logprob=entry.chosen.logprob,
                    bytes=list(entry.chosen.data),
                    top_logprobs=[_top_logprob(chance) for chance in entry.top],
                )
                for entry in entries
            ]
        )


def _top_logprob(chance: TokenChance) -> TopLogprob:
    return TopLogprob(token=chance.token, logprob=chance.logprob, bytes=list(chance.data))


class CompletionResponder:
    """Shapes the answers to a completion request: the prompt first where it is echoed, the suffix last.

    Parameters
    ----------
    prompt_text
        What ``echo`` puts in front.
    """

    def __init__(
        self, request: CompletionRequest, generation: GenerationRequest, model: LoadedModel, prompt_text: str
    ) -> None:
        self._id = generation.request_id
        self._model = request.model or model.model_id
        self._created = int(time.time())
        self._with_logprobs = request.logprobs is not None
        self._with_usage = request.wants_stream_usage
        self._prefix = prompt_text if request.echo else ""
        self._suffix = request.suffix or ""
        self._num_choices = request.num_choices
        self._begun: set[int] = set()

    def chunks(self, delta: StreamDelta) -> list[CompletionResponse]:
        """Return the elements of the stream for the next delta."""
        chunks = []
        if delta.index not in self._begun and self._prefix:
            chunks.append(self._response([CompletionChoice(index=delta.index, text=self._prefix)]))
        self._begun.add(delta.index)
        choice = CompletionChoice(
            index=delta.index,
            text=delta.text,
            # With a suffix to come, the finish reason goes into the very last piece.
            finish_reason=None if self._suffix else delta.finish_reason,
            logprobs=self._logprobs(delta.logprobs),
        )
        chunks.append(self._response([choice]))
        if delta.finish_reason is not None and self._suffix:
            last_choice = CompletionChoice(index=delta.index, text=self._suffix, finish_reason=delta.finish_reason)
            chunks.append(self._response([last_choice]))
        if delta.usage is not None and self._with_usage:
            last = self._response([])
            last.usage = delta.usage
            chunks.append(last)
        return chunks

    def response(self, deltas: list[StreamDelta]) -> CompletionResponse:
        """Return the best answers; the last delta has the usage."""
        best = best_choices(by_choice(deltas), self._num_choices)
        response = self._response([self._choice(index, pieces) for index, pieces in enumerate(best)])
        response.usage = deltas[-1].usage
        return response

    def _choice(self, index: int, deltas: list[StreamDelta]) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=self._prefix + "".join(delta.text for delta in deltas) + self._suffix,
            finish_reason=deltas[-1].finish_reason,
            logprobs=self._logprobs([entry for delta in deltas for entry in delta.logprobs]),
        )

    def _response(self, choices: list[CompletionChoice]) -> CompletionResponse:
        return CompletionResponse(id=self._id, created=self._created, model=self._model, choices=choices)

    def _logprobs(self, entries: tuple[TokenLogprobs, ...] | list[TokenLogprobs]) -> CompletionLogprobs | None:
        if not self._with_logprobs:
            return None
        return CompletionLogprobs(
            tokens=[entry.chosen.token for entry in entries],
            token_logprobs=[entry.chosen.logprob for entry in entries],
            top_logprobs=[{chance.token: chance.logprob for chance in entry.top} for entry in entries],
            text_offset=[entry.text_offset for entry in entries],
        )
