"""One sequence as the scheduler sees it: its tokens, how many are in KV pages, and which pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from mlc_nb.runtime.prompt_scorer import PromptScorer
    from mlc_nb.runtime.sampler import SamplingState

__all__ = ["Sequence", "SequenceStatus"]


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and what was generated after it.

    Attributes
    ----------
    token_ids
        Prompt and answer so far.
    num_prompt_tokens
        How many of ``token_ids`` are the prompt.
    sampling
        Picks its next tokens.
    pages
        The KV pages that it holds, in order.
    sharing
        Sequences whose values are equal share pages that hold the same tokens; one with None shares with nobody.
    scorer
        Wants the logits after every token of the prompt, which is therefore computed even where it is cached.
    runs_after
        Belongs to a sequence earlier in line: this one waits until it has scored its whole prompt.
    num_computed
        How many of its tokens are in the pages; 0 again after a preemption.
    num_indexed
        How many of its pages are in the prefix cache.
    num_cached
        Prompt tokens that were there already when it first ran.
    """

    request_id: str
    token_ids: list[int]
    sampling: SamplingState
    num_prompt_tokens: int = field(init=False)
    sharing: Hashable = None
    scorer: PromptScorer | None = None
    runs_after: PromptScorer | None = None
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_indexed: int = 0
    num_cached: int | None = None
    status: SequenceStatus = SequenceStatus.WAITING

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Tokens that are not in the pages yet: 1 in a decode, more in a prefill."""
        return len(self.token_ids) - self.num_computed
