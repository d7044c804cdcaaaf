"""What one engine step takes and gives: plain data between the engine and a model runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from mlc_nb.runtime.memory import MemoryUse
    from mlc_nb.runtime.prompt_scorer import PromptScorer
    from mlc_nb.runtime.sampler import SamplingState

__all__ = ["ModelRunner", "SampledToken", "SequenceSlice", "StepResult"]


# Not frozen, here and below: a step makes one for each sequence, and frozen ones take three times as long to make.
@dataclass(slots=True)
class SequenceSlice:
    """The part of one sequence that a step processes.

    Attributes
    ----------
    token_ids
        The new tokens, in order: one for a decode, up to a chunk for a prefill.
    start_position
        The position of ``token_ids[0]`` in its sequence; everything before it is in the KV pages already.
    page_table
        Page indices that cover positions 0 to ``start_position + len(token_ids) - 1``, ``page_size`` tokens each.
    sampling
        How to pick the next token after the last one of the slice; None when no token is wanted (a prefill chunk
        that is not the last).
    scorer
        Takes the logits after every token of the slice; None where they are not wanted.
    """

    token_ids: Sequence[int]
    start_position: int
    page_table: Sequence[int]
    sampling: SamplingState | None
    scorer: PromptScorer | None = None


@dataclass(slots=True)
class SampledToken:
    """A sampled token; log probabilities (natural logarithm) only when the request asked for them."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


StepResult: TypeAlias = "SampledToken | Exception | None"
"""What a step gives for a slice: a token, what went wrong with picking one (for this sequence alone), or nothing."""


class ModelRunner(Protocol):
    """Runs steps of one model. Made, used and closed on the engine thread only."""

    @property
    def page_size(self) -> int:
        """Tokens in a page."""

    @property
    def num_pages(self) -> int:
        """Pages in the KV pool; page indices are 0 to ``num_pages - 1``."""

    @property
    def least_prefill_chunk(self) -> int:
        """Prompt tokens in a step below which it gets hardly quicker."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of memory that the weights take."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of memory that the KV pool takes."""

    def memory(self) -> MemoryUse:
        """Measure what the runner holds on its device now; from any thread."""

    def logits(self, slices: Sequence[SequenceSlice]) -> npt.NDArray[np.float32]:
        """Run one step; logits after the last token of each slice, float32 ``[len(slices), vocab_size]``."""

    def step(self, slices: Sequence[SequenceSlice], meanwhile: Callable[[], None] | None = None) -> list[StepResult]:
        """Run one step and sample; one entry a slice, None where its ``sampling`` is None.

        ``meanwhile`` is called once, when nothing is left to do for this thread but to wait, or to be in one long
        native call: whoever it wakes runs beside that.

        What sampling raises is the entry of its slice, so that a sequence fails alone; a failure of the model itself
        is raised.
        """

    def resize_kv_cache(self, num_pages: int) -> None:
        """Replace the KV pool by an empty one of so many pages.

        Raises
        ------
        OutOfMemoryError
            There is no memory for it; the old pool stays.
        """

    def close(self) -> None:
        """Release weights, KV pages and the library; a second call does nothing."""
