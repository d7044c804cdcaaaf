"""A request in the engine's own terms, and its state while it is in flight."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING

from mlc_nb.engine.answer import Answer
from mlc_nb.engine.metrics import RequestTimes
from mlc_nb.engine.sequence import Sequence
from mlc_nb.engine.stream import Outbox, StreamDelta

if TYPE_CHECKING:
    from mlc_nb.engine.token_bytes import TokenBytes
    from mlc_nb.runtime.sampler import SamplingState
    from mlc_nb.runtime.step import SampledToken

__all__ = ["ActiveRequest", "GenerationRequest"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What to generate, checked and encoded.

    Attributes
    ----------
    prompt_token_ids
        At least one id, each below the vocabulary size.
    sampling
        Belongs to this request alone.
    max_tokens
        Most tokens in the answer; None goes on to the end of the context window.
    stop_strings, stop_token_ids
        End the answer; neither shows in its text.
    continues_text
        Whether the answer goes on from the prompt's text (a completion) rather than begins a new one (a chat).
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingState
    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    continues_text: bool = False


class ActiveRequest:
    """A request in flight: its sequence, its answer so far, and where the answer goes.

    Parameters
    ----------
    max_new_tokens
        Most tokens in the answer, at least 1.
    """

    def __init__(self, request: GenerationRequest, token_bytes: TokenBytes, max_new_tokens: int) -> None:
        self.request = request
        self.sequence = Sequence(request.request_id, list(request.prompt_token_ids), request.sampling)
        self.outbox = Outbox()
        self.times = RequestTimes()
        self._answer = Answer(token_bytes, request.stop_strings, continues_text=request.continues_text)
        self._max_new_tokens = max_new_tokens
        self._num_generated = 0

    def take(self, token: SampledToken) -> StreamDelta:
        """Add the next token to the answer; the delta has a finish reason where the answer ends with it."""
        if self.times.first_token is None:
            self.times.first_token = perf_counter()
        if token.token_id in self.request.stop_token_ids:
            return self._finished(self._answer.finalize(), stopped=True)
        self._num_generated += 1
        delta = self._answer.add_token(token)
        if self._answer.stopped:
            return self._finished(delta, stopped=True)
        if self._num_generated < self._max_new_tokens:
            return delta
        rest = self._answer.finalize()
        whole = StreamDelta(delta.text + rest.text, delta.token_ids + rest.token_ids, delta.logprobs + rest.logprobs)
        return self._finished(whole, stopped=self._answer.stopped)

    def _finished(self, delta: StreamDelta, *, stopped: bool) -> StreamDelta:
        usage = self.times.usage(len(self.request.prompt_token_ids), self._num_generated)
        return replace(delta, finish_reason="stop" if stopped else "length", usage=usage)
