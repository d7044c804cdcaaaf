"""Picks the next token of one sequence from its logits. Pure numpy, one uniform number a token."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from mlc_nb.errors import MLCError
from mlc_nb.runtime.step import SampledToken

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SamplingState", "TokenConstraint", "not_finite", "with_logprobs"]

# Below this a softmax has all its mass on the largest logit anyway.
GREEDY_TEMPERATURE = 1e-5
# How many of the likeliest tokens top-p sorts at first; a peaked distribution needs no more.
FIRST_CANDIDATES = 256

FloatArray = npt.NDArray[np.float32]


class TokenConstraint(Protocol):
    """Decides which tokens may come next, such as a grammar."""

    @property
    def is_finished(self) -> bool:
        """Whether the answer is whole and nothing can follow."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return which tokens may come next, bool ``[vocab_size]``, at least one."""

    def accept(self, token_id: int) -> None:
        """Go on by a token that was allowed."""


class SamplingState:
    """How one sequence picks its tokens, and what it has picked so far.

    The order is: logit bias, penalties, constraint, temperature, top-k, top-p, min-p, then the inverse of the
    cumulative distribution at one uniform number. A seed therefore gives the same tokens alone and in any batch.

    Parameters
    ----------
    temperature
        0 (or less than 1e-5) is greedy; among equal logits the lowest id wins.
    top_p, top_k, min_p
        1, 0 and 0 keep every token.
    presence_penalty, frequency_penalty, repetition_penalty
        Applied to generated tokens; 0, 0 and 1 change nothing.
    logit_bias
        Token id to what is added to its logit; ids must be below the vocabulary size.
    seed
        None draws one from the system.
    constraint
        Leaves only the tokens that it allows; belongs to this state alone.
    logprobs, top_logprobs
        Whether to give log probabilities, and of how many of the likeliest tokens; they are of the model's own
        distribution: before bias, penalties, constraint and temperature.

    Attributes
    ----------
    bias_ids, bias
        The biased tokens, and what is added to the logit of each.
    has_penalties
        Whether picked tokens change the logits of the next.
    counts
        With penalties, how often each token was picked.
    """

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        seed: int | None = None,
        constraint: TokenConstraint | None = None,
        logprobs: bool = False,
        top_logprobs: int = 0,
    ) -> None:
        self.temperature = temperature
        self.top_p = top_p
        self.top_k = top_k
        self.min_p = min_p
        self.constraint = constraint
        self.presence_penalty = presence_penalty
        self.frequency_penalty = frequency_penalty
        self.repetition_penalty = repetition_penalty
        self.logprobs = logprobs
        self.top_logprobs = top_logprobs
        self.bias_ids = np.fromiter(logit_bias or (), dtype=np.int64)
        self.bias = np.fromiter((logit_bias or {}).values(), dtype=np.float32)
        self.has_penalties = bool(presence_penalty or frequency_penalty or repetition_penalty != 1.0)
        self.counts: Counter[int] = Counter()
        # numpy seeds are not negative; the two's complement keeps negative ones apart from all others.
        self._random = np.random.default_rng(None if seed is None else seed % 2**64)

    @property
    def is_random(self) -> bool:
        """Whether tokens are drawn; else the likeliest is taken."""
        return self.temperature >= GREEDY_TEMPERATURE

    def next_uniform(self) -> float:
        """The number in [0, 1) by which the next token is drawn."""
        return self._random.random()

    def record(self, token_id: int) -> None:
        """Go on by a token that was picked."""
        if self.constraint is not None:
            self.constraint.accept(token_id)
        if self.has_penalties:
            self.counts[token_id] += 1

    def sample(self, logits: FloatArray) -> SampledToken:
        """Pick the next token and count it.

        Parameters
        ----------
        logits
            The model's raw logits, float32 ``[vocab_size]``; left as they are.

        Raises
        ------
        MLCError
            The logits are not numbers, or the constraint cannot go on.
        """
        adjusted = self._adjust(logits)
        token_id = int(np.argmax(adjusted))
        # argmax takes the first NaN where there is one.
        if not np.isfinite(adjusted[token_id]):
            raise not_finite()
        if self.constraint is not None:
            adjusted = np.where(self.constraint.allowed(), adjusted, np.float32(-np.inf))
            token_id = int(np.argmax(adjusted))
        if self.is_random:
            token_id = self._draw(adjusted, adjusted[token_id])
        self.record(token_id)
        if not self.logprobs:
            return SampledToken(token_id)
        return with_logprobs(token_id, logits, self.top_logprobs)

    def _adjust(self, logits: FloatArray) -> FloatArray:
        """Apply bias, then penalties, to a copy; the same array where there is nothing to do."""
        if self.bias_ids.size:
            logits = logits.copy()
            logits[self.bias_ids] += self.bias
        if self.counts:
            seen = np.fromiter(self.counts, dtype=np.int64)
            counts = np.fromiter(self.counts.values(), dtype=np.float32)
            penalized = logits[seen] - (self.presence_penalty + counts * self.frequency_penalty)
            repetition = np.float32(self.repetition_penalty)
            penalized = np.where(penalized > 0, penalized / repetition, penalized * repetition)
            if not self.bias_ids.size:
                logits = logits.copy()
            logits[seen] = penalized
        return logits

    def _draw(self, logits: FloatArray, largest: np.float32) -> int:
        uniform = self.next_uniform()
        with np.errstate(over="ignore"):  # a quotient of minus infinity is a weight of 0, as it should be
            weights = np.exp((logits - largest) / np.float32(self.temperature))
        if not (0 < self.top_k < weights.size or self.top_p < 1.0 or self.min_p > 0.0):
            return _invert_cumulative(weights, uniform)
        ids = self._candidates(weights)
        return int(ids[_invert_cumulative(weights[ids], uniform)])

    def _candidates(self, weights: FloatArray) -> npt.NDArray[np.int64]:
        """Ids that top-k, top-p and min-p leave, likeliest first."""
        size = self.top_k if 0 < self.top_k < weights.size else weights.size
        if self.top_p < 1.0:
            ids = _nucleus(weights, self.top_p, size)
        else:
            ids = _likeliest(weights, size) if size < weights.size else np.arange(weights.size)
        # The largest weight is 1, so min_p is a plain threshold, and one id always passes.
        return ids[weights[ids] >= np.float32(self.min_p)] if self.min_p > 0.0 else ids


def not_finite() -> MLCError:
    """The error for logits of which none is the largest."""
    return MLCError(
        "The model gave logits that are not finite numbers: its weights or its compiled library are damaged. "
        "Delete the cached library, verify the weights and load the model again."
    )


def with_logprobs(token_id: int, logits: FloatArray, top_logprobs: int) -> SampledToken:
    """Return a token with its log probability by the raw logits, and those of so many of the likeliest tokens."""
    largest = logits.max()
    log_total = float(largest) + float(np.log(np.exp(logits - largest).sum(dtype=np.float64)))
    top = _likeliest(logits, min(top_logprobs, logits.size)) if top_logprobs else ()
    return SampledToken(
        token_id,
        float(logits[token_id]) - log_total,
        tuple((int(i), float(logits[i]) - log_total) for i in top),
    )


def _likeliest(weights: FloatArray, count: int) -> npt.NDArray[np.int64]:
    """Ids of the ``count`` largest weights, largest first, equal ones by id."""
    if count < weights.size:
        smallest_kept = np.partition(weights, weights.size - count)[weights.size - count]
        ids = np.flatnonzero(weights >= smallest_kept)
    else:
        ids = np.arange(weights.size)
    return ids[np.argsort(-weights[ids], kind="stable")][:count]


def _nucleus(weights: FloatArray, top_p: float, size: int) -> npt.NDArray[np.int64]:
    """Ids of the fewest likeliest among the ``size`` likeliest whose mass is at least ``top_p`` of theirs."""
    if size < weights.size:
        ids = _likeliest(weights, size)
        total = float(weights[ids].sum(dtype=np.float64))
    else:
        ids = _likeliest(weights, min(FIRST_CANDIDATES, size))
        total = float(weights.sum(dtype=np.float64))
    cumulative = np.cumsum(weights[ids], dtype=np.float64)
    while cumulative[-1] < top_p * total and ids.size < size:
        ids = _likeliest(weights, min(8 * ids.size, size))
        cumulative = np.cumsum(weights[ids], dtype=np.float64)
    return ids[: int(np.searchsorted(cumulative, top_p * total)) + 1]


def _invert_cumulative(weights: FloatArray, uniform: float) -> int:
    """Index that ``uniform`` in [0, 1) falls on when each index takes a share as large as its weight."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    if index < weights.size:
        return index
    # Rounding put the product on the total itself: take the last index that has any weight.
    return int(np.searchsorted(cumulative, cumulative[-1]))
