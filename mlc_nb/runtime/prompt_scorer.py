"""Log probabilities of a prompt's own tokens, gathered while the prompt goes through the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlc_nb.runtime.sampler import with_logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from mlc_nb.runtime.step import SampledToken

__all__ = ["PromptScorer"]


class PromptScorer:
    """Scores each token of one prompt but the first, before which there is nothing.

    Parameters
    ----------
    token_ids
        The prompt.
    top_logprobs
        Of how many of the likeliest tokens in each place to give the log probabilities too.

    Attributes
    ----------
    scores
        One entry a token; None where it has not been scored.
    """

    def __init__(self, token_ids: Sequence[int], top_logprobs: int) -> None:
        self._token_ids = token_ids
        self._top_logprobs = top_logprobs
        self.scores: list[SampledToken | None] = [None] * len(token_ids)

    @property
    def is_complete(self) -> bool:
        """Whether the whole prompt is scored."""
        return None not in self.scores[1:]

    def wants(self, start: int) -> bool:
        """Whether the logits after the token at ``start`` or later ones score any token of the prompt."""
        return start < len(self._token_ids) - 1

    def score(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """Take the logits after the tokens from position ``start`` on, float32 ``[tokens, vocab_size]``."""
        for position, row in enumerate(logits, start + 1):
            if position < len(self._token_ids):
                self.scores[position] = with_logprobs(self._token_ids[position], row, self._top_logprobs)
