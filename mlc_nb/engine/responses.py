"""From the deltas of an answer to OpenAI-shaped chunks and responses."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from mlc_nb.engine.choices import best_choices, by_choice
from mlc_nb.engine.prompt_logprobs import likeliest_by_text
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
from mlc_nb.protocol.tools import FunctionCall, FunctionDelta, ToolCall, ToolCallDelta

if TYPE_CHECKING:
    from mlc_nb.engine.generation import GenerationRequest
    from mlc_nb.engine.model import LoadedModel
    from mlc_nb.engine.stream import PromptLogprobs, StreamDelta, TokenChance, TokenLogprobs
    from mlc_nb.engine.tool_calls import AnswerPiece
    from mlc_nb.engine.tool_use import ToolUse
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
    """Shapes the answers to a chat request.

    Parameters
    ----------
    tool_use
        How the answers call tools; None where they cannot.
    """

    def __init__(
        self,
        request: ChatCompletionRequest,
        generation: GenerationRequest,
        model: LoadedModel,
        tool_use: ToolUse | None = None,
    ) -> None:
        self._id = generation.request_id
        self._model = request.model or model.model_id
        self._created = int(time.time())
        self._with_logprobs = bool(request.logprobs)
        self._with_usage = request.wants_stream_usage
        self._tool_use = tool_use
        self._readers: dict[int, _AnswerReader] = {}

    def chunks(self, delta: StreamDelta) -> list[ChatCompletionChunk]:
        """Return the elements of the stream for the next delta."""
        reader = self._readers.get(delta.index)
        is_first = reader is None
        if reader is None:
            reader = self._readers[delta.index] = _AnswerReader(self._tool_use)
        pieces = reader.read(delta)
        changes = [_chat_delta(piece) for piece in pieces]
        if not changes and (is_first or delta.finish_reason is not None or (self._with_logprobs and delta.logprobs)):
            changes = [ChatDelta()]
        choices = [ChatChunkChoice(index=delta.index, delta=change) for change in changes]
        if choices:
            choices[0].logprobs = self._logprobs(delta.logprobs)
            choices[-1].finish_reason = reader.finish_reason(delta)
        if is_first:
            choices[0].delta.role = "assistant"
        chunks = [self._chunk([choice]) for choice in choices]
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
        reader = _AnswerReader(self._tool_use)
        pieces = [piece for delta in deltas for piece in reader.read(delta)]
        finish_reason = reader.finish_reason(deltas[-1])
        assert finish_reason is not None  # the engine sets one in the last delta of each answer
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls: list[ToolCall] = []
        for piece in pieces:
            if isinstance(piece, str):
                continue
            if piece.call_id is not None and piece.name is not None:
                calls.append(ToolCall(id=piece.call_id, function=FunctionCall(name=piece.name, arguments="")))
            calls[-1].function.arguments += piece.arguments
        return ChatChoice(
            index=index,
            finish_reason=finish_reason,
            message=ChatResponseMessage(content=None if calls and not content else content, tool_calls=calls or None),
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


class _AnswerReader:
    """Reads one answer: text, or text and calls."""

    def __init__(self, tool_use: ToolUse | None) -> None:
        self._parser = None if tool_use is None else tool_use.parser()

    def read(self, delta: StreamDelta) -> list[AnswerPiece]:
        """Return what the next delta adds."""
        if self._parser is None:
            return [delta.text] if delta.text else []
        pieces = self._parser.feed(delta.text)
        return pieces if delta.finish_reason is None else [*pieces, *self._parser.finish()]

    def finish_reason(self, delta: StreamDelta) -> Literal["stop", "length", "tool_calls"] | None:
        """Why the answer ends with the delta, None where it does not."""
        if delta.finish_reason == "stop" and self._parser is not None and self._parser.calls_are_complete:
            return "tool_calls"
        return delta.finish_reason


def _chat_delta(piece: AnswerPiece) -> ChatDelta:
    if isinstance(piece, str):
        return ChatDelta(content=piece)
    call = ToolCallDelta(
        index=piece.index,
        id=piece.call_id,
        type=None if piece.call_id is None else "function",
        function=FunctionDelta(name=piece.name, arguments=piece.arguments),
    )
    return ChatDelta(tool_calls=[call])


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
            logprobs = self._logprobs([], delta.prompt_logprobs)
            chunks.append(self._response([CompletionChoice(index=delta.index, text=self._prefix, logprobs=logprobs)]))
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
            logprobs=self._logprobs([entry for delta in deltas for entry in delta.logprobs], deltas[0].prompt_logprobs),
        )

    def _response(self, choices: list[CompletionChoice]) -> CompletionResponse:
        return CompletionResponse(id=self._id, created=self._created, model=self._model, choices=choices)

    def _logprobs(
        self, entries: tuple[TokenLogprobs, ...] | list[TokenLogprobs], prompt: PromptLogprobs | None = None
    ) -> CompletionLogprobs | None:
        if not self._with_logprobs:
            return None
        logprobs = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if prompt is not None:
            logprobs.tokens += prompt.tokens
            logprobs.token_logprobs += prompt.logprobs
            logprobs.top_logprobs += prompt.top
            logprobs.text_offset += prompt.text_offsets
        for entry in entries:
            logprobs.tokens.append(entry.chosen.token)
            logprobs.token_logprobs.append(entry.chosen.logprob)
            logprobs.top_logprobs.append(likeliest_by_text((chance.token, chance.logprob) for chance in entry.top))
            logprobs.text_offset.append(len(self._prefix) + entry.text_offset)
        return logprobs
