"""From the scores of a prompt's tokens to what a response shows of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlc_nb.engine.detokenizer import Detokenizer
from mlc_nb.engine.stream import PromptLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mlc_nb.engine.token_bytes import TokenBytes
    from mlc_nb.runtime.step import SampledToken

__all__ = ["likeliest_by_text", "prompt_logprobs"]


def prompt_logprobs(
    token_ids: Sequence[int], scores: Sequence[SampledToken | None], token_bytes: TokenBytes
) -> PromptLogprobs:
    """Name the tokens and find where the text of each begins; special tokens count as written out."""

    def text(token_id: int) -> str:
        return token_bytes.of_any(token_id).decode(errors="replace")

    detokenizer = Detokenizer(token_bytes.showing(frozenset(token_ids)))
    offsets = []
    for token_id in token_ids:
        offsets.append(detokenizer.length)
        detokenizer.add_token(token_id)
    return PromptLogprobs(
        tuple(map(text, token_ids)),
        tuple(None if score is None else score.logprob for score in scores),
        tuple(
            None if score is None else likeliest_by_text((text(i), value) for i, value in score.top_logprobs)
            for score in scores
        ),
        tuple(offsets),
    )


def likeliest_by_text(chances: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Map texts to log probabilities, likeliest first; of several tokens with one text, the likeliest counts."""
    by_text: dict[str, float] = {}
    for text, logprob in chances:
        by_text.setdefault(text, logprob)
    return by_text
