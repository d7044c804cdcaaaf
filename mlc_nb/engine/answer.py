"""Builds the text of one answer from its tokens: detokenizer, stop strings, and log probabilities kept in line."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlc_nb.engine.detokenizer import Detokenizer
from mlc_nb.engine.stop_matcher import StopMatcher
from mlc_nb.engine.stream import StreamDelta, TokenChance, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlc_nb.engine.token_bytes import TokenBytes
    from mlc_nb.runtime.step import SampledToken

__all__ = ["Answer"]


@dataclass(slots=True)
class _PendingToken:
    """A token whose text has not been released; it covers characters ``start`` to ``end`` of the whole text."""

    token_id: int
    start: int
    end: int
    logprobs: TokenLogprobs | None


class Answer:
    """The text of an answer up to a stop string, with each token given out together with its text.

    Parameters
    ----------
    stop_strings
        End the text at their first character.
    continues_text
        See `Detokenizer`.
    """

    def __init__(
        self, token_bytes: TokenBytes, stop_strings: Sequence[str] = (), *, continues_text: bool = False
    ) -> None:
        self._token_bytes = token_bytes
        self._detokenizer = Detokenizer(token_bytes, continues_text=continues_text)
        self._matcher = StopMatcher(stop_strings)
        self._has_stop_strings = bool(stop_strings)
        self._pending: deque[_PendingToken] = deque()
        self._released = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._matcher.stopped

    def add_token(self, token: SampledToken) -> StreamDelta:
        """Take the next token; return what can be given out now."""
        segment = self._detokenizer.add_token(token.token_id)
        end = self._detokenizer.length
        has_partial_character = self._detokenizer.has_partial_character
        if not (has_partial_character or self._pending or self._has_stop_strings or token.logprob is not None):
            # Nearly every token: there is nothing to wait for.
            self._released = end
            return StreamDelta(segment, (token.token_id,))
        start = end - len(segment)
        # The bytes of an unfinished character belong to the character that is still to come.
        end += has_partial_character
        self._pending.append(_PendingToken(token.token_id, start, end, self._logprobs(token, start)))
        return self._release(self._matcher.feed(segment))

    def finalize(self) -> StreamDelta:
        """Return what was held back: the answer ends here."""
        text = self._matcher.feed(self._detokenizer.finalize())
        return self._release(text + self._matcher.finalize(), at_end=True)

    def _release(self, text: str, *, at_end: bool = False) -> StreamDelta:
        self._released += len(text)
        tokens: list[_PendingToken] = []
        while self._pending and (at_end or self.stopped or self._pending[0].end <= self._released):
            token = self._pending.popleft()
            # After a stop string, the tokens that lie wholly in the cut text are dropped with it.
            if not self.stopped or token.start < self._released or token.end <= self._released:
                tokens.append(token)
        return StreamDelta(
            text,
            tuple(token.token_id for token in tokens),
            tuple(token.logprobs for token in tokens if token.logprobs is not None),
        )

    def _logprobs(self, token: SampledToken, text_offset: int) -> TokenLogprobs | None:
        if token.logprob is None:
            return None
        chosen = self._chance(token.token_id, token.logprob)
        return TokenLogprobs(chosen, tuple(self._chance(*top) for top in token.top_logprobs), text_offset)

    def _chance(self, token_id: int, logprob: float) -> TokenChance:
        data = self._token_bytes.of_any(token_id)
        return TokenChance(token_id, data.decode(errors="replace"), data, logprob)
