"""A request in the engine's own terms, and its state while it is in flight."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from mlc_nb.engine.answer import Answer
from mlc_nb.engine.metrics import RequestTimes
from mlc_nb.engine.prompt_logprobs import prompt_logprobs
from mlc_nb.engine.sequence import Sequence
from mlc_nb.engine.stream import Outbox, StreamDelta
from mlc_nb.runtime.prompt_scorer import PromptScorer

if TYPE_CHECKING:
    from collections.abc import Hashable

    from mlc_nb.engine.stream import PromptLogprobs
    from mlc_nb.engine.token_bytes import TokenBytes
    from mlc_nb.protocol.responses import Usage
    from mlc_nb.runtime.sampler import SamplingState
    from mlc_nb.runtime.step import SampledToken

__all__ = ["ActiveChoice", "ActiveRequest", "GenerationRequest"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What to generate, checked and encoded.

    Attributes
    ----------
    prompt_token_ids
        At least one id, each below the vocabulary size.
    sampling
        Belongs to this request alone.
    more_choices
        Samplings of further answers to the same prompt.
    max_tokens
        Most tokens in the answer; None goes on to the end of the context window.
    stop_strings, stop_token_ids
        End the answer; neither shows in its text.
    shown_token_ids
        Special tokens that show in the text of the answer nevertheless.
    continues_text
        Whether the answer goes on from the prompt's text (a completion) rather than begins a new one (a chat).
    prompt_logprobs
        Give the log probabilities of the prompt's tokens, and of so many likeliest ones in the place of each; None
        gives none.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingState
    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    continues_text: bool = False
    more_choices: tuple[SamplingState, ...] = ()
    shown_token_ids: frozenset[int] = field(default_factory=frozenset)
    prompt_logprobs: int | None = None


class ActiveRequest:
    """A request in flight: its answers so far, and where they go.

    Parameters
    ----------
    max_new_tokens
        Most tokens in each answer, at least 1.
    sharing
        With whom its sequences share pages; see `Sequence`.
    """

    def __init__(
        self, request: GenerationRequest, token_bytes: TokenBytes, max_new_tokens: int, sharing: Hashable = None
    ) -> None:
        self.request = request
        self.outbox = Outbox()
        self.times = RequestTimes()
        self._token_bytes = token_bytes
        self.choices = [
            ActiveChoice(self, index, sampling, token_bytes, max_new_tokens, sharing)
            for index, sampling in enumerate((request.sampling, *request.more_choices))
        ]
        self.num_unfinished = len(self.choices)
        self._scorer: PromptScorer | None = None
        if request.prompt_logprobs is not None:
            # One is enough: the others share its prompt, and come after it in line.
            self._scorer = PromptScorer(request.prompt_token_ids, request.prompt_logprobs)
            self.choices[0].sequence.scorer = self._scorer
            for choice in self.choices[1:]:
                choice.sequence.runs_after = self._scorer

    @functools.cached_property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """The log probabilities of the prompt, once it has been through the model; None where nobody wants them."""
        if self._scorer is None:
            return None
        return prompt_logprobs(self.request.prompt_token_ids, self._scorer.scores, self._token_bytes)

    def usage(self) -> Usage:
        """Return the usage of all answers; they end now."""
        return self.times.usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_tokens=self.choices[0].sequence.num_cached or 0,
            completion_tokens=sum(choice.num_generated for choice in self.choices),
            num_choices=len(self.choices),
        )


class ActiveChoice:
    """One answer in flight: its sequence and its text so far."""

    def __init__(
        self,
        active: ActiveRequest,
        index: int,
        sampling: SamplingState,
        token_bytes: TokenBytes,
        max_new_tokens: int,
        sharing: Hashable,
    ) -> None:
        request = active.request
        self.active = active
        self.index = index
        self.sequence = Sequence(request.request_id, list(request.prompt_token_ids), sampling, sharing)
        self.num_generated = 0
        self._begun = False
        self._stop_token_ids = request.stop_token_ids
        shown = token_bytes.showing(request.shown_token_ids)
        self._answer = Answer(shown, request.stop_strings, continues_text=request.continues_text)
        self._max_new_tokens = max_new_tokens

    def take(self, token: SampledToken) -> StreamDelta:
        """Add the next token to the answer; the delta has a finish reason where the answer ends with it."""
        is_first = not self._begun
        self._begun = True
        delta = self._take(token)
        if is_first:
            delta.prompt_logprobs = self.active.prompt_logprobs
        return delta

    def _take(self, token: SampledToken) -> StreamDelta:
        times = self.active.times
        if times.first_token is None:
            times.first_token = perf_counter()
        if token.token_id in self._stop_token_ids:
            return self._finished(self._answer.finalize(), stopped=True)
        self.num_generated += 1
        delta = self._answer.add_token(token)
        delta.index = self.index
        if self._answer.stopped:
            return self._finished(delta, stopped=True)
        constraint = self.sequence.sampling.constraint
        is_whole = constraint is not None and constraint.is_finished
        if self.num_generated < self._max_new_tokens and not is_whole:
            return delta
        rest = self._answer.finalize()
        whole = StreamDelta(delta.text + rest.text, delta.token_ids + rest.token_ids, delta.logprobs + rest.logprobs)
        return self._finished(whole, stopped=self._answer.stopped or is_whole)

    def _finished(self, delta: StreamDelta, *, stopped: bool) -> StreamDelta:
        delta.index = self.index
        delta.finish_reason = "stop" if stopped else "length"
        self.active.num_unfinished -= 1
        if not self.active.num_unfinished:
            delta.usage = self.active.usage()
        return delta
