"""Several answers to one request: their seeds, and the best of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mlc_nb.engine.stream import StreamDelta

__all__ = ["best_choices", "by_choice", "choice_seed"]


def choice_seed(seed: int | None, index: int) -> int | None:
    """Return the seed of one answer: the first has the request's own, so that it does not depend on how many follow."""
    if seed is None or index == 0:
        return seed
    # Hashed, since the seed of the next request may well be this one plus 1.
    return int(np.random.SeedSequence((seed % 2**64, index)).generate_state(1, np.uint64)[0])


def by_choice(deltas: list[StreamDelta]) -> list[list[StreamDelta]]:
    """Sort the deltas of a request by answer."""
    choices: list[list[StreamDelta]] = [[] for _ in range(max(delta.index for delta in deltas) + 1)]
    for delta in deltas:
        choices[delta.index].append(delta)
    return choices


def best_choices(choices: list[list[StreamDelta]], count: int) -> list[list[StreamDelta]]:
    """Return the ``count`` answers whose tokens were likeliest on average, likeliest first.

    Where there are no more than that they stay in their order, and need no log probabilities.
    """
    if count >= len(choices):
        return choices
    return sorted(choices, key=_mean_logprob, reverse=True)[:count]


def _mean_logprob(deltas: list[StreamDelta]) -> float:
    logprobs = [entry.chosen.logprob for delta in deltas for entry in delta.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf
