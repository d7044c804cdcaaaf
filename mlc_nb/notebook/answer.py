"""The answer of a chat cell: the response object, streamed, and the figures below it."""

from __future__ import annotations

import time
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mlc_nb.engine import prepare
from mlc_nb.errors import RequestAborted
from mlc_nb.notebook.answer_format import answer_bundle
from mlc_nb.protocol.chat import ChatChoice, ChatCompletionResponse, ChatResponseMessage
from mlc_nb.protocol.responses import Usage

if TYPE_CHECKING:
    from mlc_nb.engine.engine import MLCEngine
    from mlc_nb.engine.stream import StreamDelta
    from mlc_nb.notebook.interrupt import StopRequest
    from mlc_nb.notebook.stream_view import StreamView

__all__ = ["ChatAnswer", "stream_answer"]


class ChatAnswer(ChatCompletionResponse):
    """A chat completion that a notebook shows as its text.

    Attributes
    ----------
    interrupted
        Whether the user stopped the answer; ``finish_reason`` is ``"stop"`` then, and the text is what was shown.
    """

    interrupted: bool = False

    @property
    def text(self) -> str:
        """The answer alone."""
        return self.choices[0].message.content or ""

    def note(self) -> str:
        """Return the line below the answer: tokens, tokens/s, time to first token, why it ended."""
        extra = self.usage.extra or {}
        tokens, speed, first = self.usage.completion_tokens, extra.get("decode_tokens_per_s"), extra.get("ttft_s")
        parts = [
            f"{tokens} token{'' if tokens == 1 else 's'}",
            f"{speed:.1f} tokens/s" if speed is not None else "",
            f"first token after {first:.2f} s" if first is not None and tokens else "",
            "stopped by you" if self.interrupted else f"finish: {self.choices[0].finish_reason}",
        ]
        return " · ".join(part for part in parts if part)

    def __str__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_selection: Any) -> dict[str, str]:
        return answer_bundle(self.text)


def stream_answer(engine: MLCEngine, fields: dict[str, Any], view: StreamView, stop: StopRequest) -> ChatAnswer:
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
    model = engine.core.model
    checked = prepare.chat_request(fields, frozenset({model.model_id, engine.model}))
    request = prepare.prepare_chat(model, checked, max_tokens=engine.core.max_sequence_length)
    submitted = perf_counter()
    arrivals: list[float] = []
    deltas = engine._submit(request)
    stop.then(deltas.close)
    read: list[StreamDelta] = []
    try:
        for delta in deltas:
            arrivals.append(perf_counter())
            read.append(delta)
            view.add(delta.text)
            if delta.finish_reason is not None:
                break
    except RequestAborted:
        if not stop.requested:
            raise
    finished = read and read[-1].finish_reason is not None
    usage = read[-1].usage if finished else None
    return ChatAnswer(
        id=request.request_id,
        created=int(time.time()),
        model=model.model_id,
        choices=[
            ChatChoice(
                finish_reason=(read[-1].finish_reason if finished else None) or "stop",
                message=ChatResponseMessage(content="".join(delta.text for delta in read)),
            )
        ],
        usage=usage or _usage_so_far(len(request.prompt_token_ids), read, submitted, arrivals),
        interrupted=not finished,
    )


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
