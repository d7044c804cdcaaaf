"""Sizes prefill chunks by time, from the rates that were measured."""

from __future__ import annotations

__all__ = ["PrefillPacer"]

FIRST_CHUNK = 64
# A signal is handled only between native calls, so a call lasts at most about 0.3 s: aim below it.
ALONE_SECONDS = 0.25
# Twenty tokens a second are faster than anyone reads: a step beside decodes may take so long, however short theirs are.
UNNOTICED_SECONDS = 0.05
# What a prefill may add to a step of decodes, in times of theirs. With what mixing the two costs, a step doubles.
ADDED_SHARE = 0.75
# New measurements count this much against old ones.
WEIGHT = 0.3


class PrefillPacer:
    """Chooses how many prompt tokens the next step takes.

    Alone, a chunk lasts about a quarter of a second. Beside running decodes it may double the time of their step, or
    fill it up to 50 ms, so that a long prompt never stalls them.

    Parameters
    ----------
    largest_chunk
        Most prompt tokens in one step, whatever the rates.
    smallest_chunk
        Prompt tokens that a step may always have: with fewer it would hardly be quicker.
    """

    def __init__(self, largest_chunk: int, smallest_chunk: int) -> None:
        self._largest_chunk = largest_chunk
        self._smallest_chunk = smallest_chunk
        self._seconds_per_token: float | None = None
        self._decode_seconds: float | None = None

    def chunk_size(self, num_decoding: int) -> int:
        """Return the most prompt tokens for a step in which ``num_decoding`` sequences decode."""
        if self._seconds_per_token is None:
            chunk = FIRST_CHUNK
        elif num_decoding and self._decode_seconds is not None:
            seconds = max(ADDED_SHARE * self._decode_seconds, UNNOTICED_SECONDS - self._decode_seconds)
            chunk = int(min(seconds, ALONE_SECONDS) / self._seconds_per_token)
        else:
            chunk = int(ALONE_SECONDS / self._seconds_per_token)
        return max(1, min(max(chunk, self._smallest_chunk), self._largest_chunk))

    def record(self, num_prefill_tokens: int, num_decoding: int, seconds: float) -> None:
        """Learn from a step that took ``seconds``."""
        if not num_prefill_tokens:
            self._decode_seconds = _blend(self._decode_seconds, seconds)
            return
        if num_decoding:
            # At least a tenth is the prefill's: the decode time is an estimate and must not eat all of it.
            seconds = max(seconds - (self._decode_seconds or 0.0), 0.1 * seconds)
        measured = max(seconds, 1e-6) / num_prefill_tokens
        self._seconds_per_token = _blend(self._seconds_per_token, measured)


def _blend(old: float | None, new: float) -> float:
    """Count a measurement in; as at most twice what was known, since one slow step says little of the next."""
    return new if old is None else old + WEIGHT * (min(new, 2 * old) - old)
