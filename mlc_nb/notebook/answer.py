"""Answers as a notebook keeps and shows them, and how one is read while the view shows it."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr

from mlc_nb.engine.stream import StreamDelta
from mlc_nb.errors import RequestAborted
from mlc_nb.notebook.answer_format import AnswerFormat, answer_bundle
from mlc_nb.protocol.chat import ChatCompletionChunk, ChatCompletionResponse
from mlc_nb.protocol.completions import CompletionResponse
from mlc_nb.protocol.responses import ResponseModel, Usage

if TYPE_CHECKING:
    from mlc_nb.engine.engine import MLCEngine
    from mlc_nb.engine.handle import PreparedRequest
    from mlc_nb.notebook.interrupt import StopRequest
    from mlc_nb.notebook.stream_view import StreamView

__all__ = ["ChatAnswer", "CompletionAnswer", "stream_chat", "stream_completion"]


class _Answer(ResponseModel):
    """What the answers of both kinds of requests have in common.

    Attributes
    ----------
    interrupted
        Whether the user stopped the answer; ``finish_reason`` is ``"stop"`` then, and the text is what was shown.
    """

    interrupted: bool = False
    _format: AnswerFormat = PrivateAttr("markdown")

    @property
    def text(self) -> str:
        """The answer alone."""
        raise NotImplementedError

    def shown_as(self, answer_format: AnswerFormat) -> None:
        """Set the format in which a notebook shows this object."""
        self._format = answer_format

    def __str__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_selection: Any) -> dict[str, str]:
        return answer_bundle(self.text, self._format)


class ChatAnswer(_Answer, ChatCompletionResponse):
    """A chat completion that a notebook shows as its text.

    Attributes
    ----------
    interrupted
        Whether the user stopped the answer; ``finish_reason`` is ``"stop"`` then, and the text is what was shown.
    """

    @property
    def text(self) -> str:
        """The answer alone."""
        return self.choices[0].message.content or ""

    def show_logprobs(self) -> None:
        """Show the text with each token coloured by its probability, and the alternatives on hover.

        Raises
        ------
        BadRequestError
            The answer was not asked for with ``--logprobs``.
        """
        from mlc_nb.notebook.logprob_view import show_logprobs

        show_logprobs(self)

    def note(self) -> str:
        """Return the line below the answer: tokens, tokens/s, time to first token, why it ended."""
        return _note(self.usage, self.choices[0].finish_reason, self.interrupted)


class CompletionAnswer(_Answer, CompletionResponse):
    """A completion of a raw prompt that a notebook shows as its text.

    Attributes
    ----------
    interrupted
        Whether the user stopped it; ``finish_reason`` is ``"stop"`` then, and the text is what was shown.
    """

    @property
    def text(self) -> str:
        """The text that was added, after the prompt where it was echoed."""
        return self.choices[0].text

    def show_logprobs(self) -> None:
        """Show the text with each token coloured by its probability, and the alternatives on hover.

        Raises
        ------
        BadRequestError
            It was not asked for with ``--logprobs``.
        """
        from mlc_nb.notebook.logprob_view import show_logprobs

        show_logprobs(self)

    def note(self) -> str:
        """Return the line below the text: tokens, tokens/s, time to first token, why it ended."""
        assert self.usage is not None  # a whole answer has one
        return _note(self.usage, self.choices[0].finish_reason, self.interrupted)


def stream_chat(engine: MLCEngine, fields: dict[str, Any], view: StreamView, stop: StopRequest) -> ChatAnswer:
    """Run a chat request and show its answer while it grows.

    Parameters
    ----------
    fields
        Fields of `ChatCompletionRequest`.
    view
        Where to show the answer; the caller finishes it.
    stop
        Ends the answer early, which is then marked as interrupted and holds the text so far.

    Raises
    ------
    MLCError
        The request is invalid, or the engine ended in the meantime.
    """
    prepared = engine._prepare_chat(engine._check_chat(fields, None), None)
    deltas, interrupted = _read(engine, prepared, view, stop)
    return ChatAnswer(**dict(prepared.responder.response(deltas)), interrupted=interrupted)


def stream_completion(
    engine: MLCEngine, fields: dict[str, Any], view: StreamView, stop: StopRequest
) -> CompletionAnswer:
    """Run a completion request as `stream_chat` runs a chat request; ``fields`` are those of `CompletionRequest`."""
    prepared = engine._prepare_completion(engine._check_completion(fields, None), None)
    deltas, interrupted = _read(engine, prepared, view, stop)
    return CompletionAnswer(**dict(prepared.responder.response(deltas)), interrupted=interrupted)


def _read(
    engine: MLCEngine, prepared: PreparedRequest[Any, Any], view: StreamView, stop: StopRequest
) -> tuple[list[StreamDelta], bool]:
    """Return all deltas, and whether they were cut short; the last one has finish reason and usage in any case."""
    submitted = perf_counter()
    stream = engine._submit(prepared.generation)
    stop.then(stream.close)
    read: list[StreamDelta] = []
    arrivals: list[float] = []
    try:
        for delta in stream:
            arrivals.append(perf_counter())
            # What stands for bytes that are no character, such as half of one where an answer reaches its last token.
            delta.text = delta.text.replace("\ufffd", "")
            read.append(delta)
            for chunk in prepared.responder.chunks(delta):
                view.add(_text_of(chunk))
            if delta.finish_reason is not None:
                return read, False
    except RequestAborted:
        if not stop.requested:
            raise
    usage = _usage_so_far(len(prepared.generation.prompt_token_ids), read, submitted, arrivals)
    end = StreamDelta("", finish_reason="stop", usage=usage)
    for chunk in prepared.responder.chunks(end):
        view.add(_text_of(chunk))
    return [*read, end], True


def _text_of(chunk: ChatCompletionChunk | CompletionResponse) -> str:
    if isinstance(chunk, ChatCompletionChunk):
        return "".join(choice.delta.content for choice in chunk.choices)
    return "".join(choice.text for choice in chunk.choices)


def _note(usage: Usage, finish_reason: str | None, interrupted: bool) -> str:
    extra = usage.extra or {}
    tokens, speed, first = usage.completion_tokens, extra.get("decode_tokens_per_s"), extra.get("ttft_s")
    parts = [
        f"{tokens} token{'' if tokens == 1 else 's'}",
        f"{speed:.1f} tokens/s" if speed is not None else "",
        f"first token after {first:.2f} s" if first is not None and tokens else "",
        "stopped by you" if interrupted else f"finish: {finish_reason}",
    ]
    return " · ".join(part for part in parts if part)


def _usage_so_far(prompt_tokens: int, read: list[StreamDelta], submitted: float, arrivals: list[float]) -> Usage:
    """Return what can be measured here of an answer that the engine did not finish."""
    tokens = sum(len(delta.token_ids) for delta in read)
    extra: dict[str, float] = {}
    if arrivals:
        extra["ttft_s"] = arrivals[0] - submitted
        seconds, later_tokens = arrivals[-1] - arrivals[0], tokens - len(read[0].token_ids)
        if seconds > 0 and later_tokens > 0:
            extra["decode_tokens_per_s"] = later_tokens / seconds
    total = prompt_tokens + tokens
    return Usage(prompt_tokens=prompt_tokens, completion_tokens=tokens, total_tokens=total, extra=extra)
