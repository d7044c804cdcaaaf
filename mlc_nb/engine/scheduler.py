"""Continuous batching: which sequences take part in a step, and with how many tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlc_nb.engine.sequence import Sequence, SequenceStatus
from mlc_nb.runtime.step import SequenceSlice

if TYPE_CHECKING:
    from mlc_nb.engine.block_manager import BlockManager
    from mlc_nb.engine.prefix_cache import PrefixCache

__all__ = ["ScheduledSlice", "Scheduler"]

# A row of logits for each token takes memory: 12 MB for so many and a vocabulary of 49,152.
MOST_SCORED_TOKENS = 64


@dataclass(slots=True)
class ScheduledSlice:
    """The next ``num_tokens`` pending tokens of a sequence.

    Attributes
    ----------
    is_prefill
        Whether this is a part of a prompt (or of a sequence that is computed again) rather than a decode.
    samples
        Whether the slice ends at the last known token, so that the next one is picked.
    """

    sequence: Sequence
    num_tokens: int
    is_prefill: bool
    samples: bool

    def as_step_slice(self) -> SequenceSlice:
        """Return what the model runner takes."""
        sequence = self.sequence
        start = sequence.num_computed
        return SequenceSlice(
            sequence.token_ids[start : start + self.num_tokens],
            start,
            sequence.pages,
            sequence.sampling if self.samples else None,
            sequence.scorer if sequence.scorer is not None and sequence.scorer.wants(start) else None,
        )


class Scheduler:
    """Orders sequences first come, first served.

    Every running sequence came before every waiting one. Decodes go into every step; prefill chunks fill what the
    step's budget leaves. When pages run out, the sequence that came last gives its pages back, returns to the front
    of the line and is computed again later; the one that came first can therefore always go on. A sequence is
    admitted when the pages for all its known tokens are free, and for the next decode of all others. It begins with
    the pages that the prefix cache has; while a sequence before it computes the next page of both, it waits for that.

    Parameters
    ----------
    max_running
        Most sequences that hold pages at once, which is also the most slices in a step.
    """

    def __init__(self, block_manager: BlockManager, prefix_cache: PrefixCache, max_running: int) -> None:
        self._blocks = block_manager
        self._cache = prefix_cache
        self._max_running = max_running
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self.reset_counts()

    def use_pool(self, block_manager: BlockManager, prefix_cache: PrefixCache) -> None:
        """Take pages from another pool from now on; there must be no sequence."""
        self._blocks, self._cache = block_manager, prefix_cache

    def reset_counts(self) -> None:
        """Begin to count preemptions, and prompt tokens of sequences that ran and those found in the cache, anew."""
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Sequences in line."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold pages."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._running or self._waiting)

    @property
    def num_decoding(self) -> int:
        """Running sequences whose next step is a decode."""
        return sum(len(sequence.token_ids) - sequence.num_computed == 1 for sequence in self._running)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence at the end of the line; its tokens up to its last must fit in the pool."""
        self._waiting.append(sequence)

    def finish(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Take a sequence out, wherever it is, and return its pages; a second call does nothing.

        Parameters
        ----------
        keep
            Whether the prefix cache may go on sharing them.
        """
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        self._cache.leave(sequence, keep=keep)

    def schedule(self, prefill_budget: int) -> list[ScheduledSlice]:
        """Choose the slices of the next step, at least one where there is any work.

        Parameters
        ----------
        prefill_budget
            Most prompt tokens in the step, at least 1; decodes are not counted.
        """
        scheduled = self._schedule_decodes()
        if self._waiting or len(scheduled) < len(self._running):
            self._schedule_prefills(prefill_budget, scheduled)
        return scheduled

    def advance(self, scheduled: list[ScheduledSlice], sampled: list[int | None]) -> None:
        """Record that a step was run, and append the tokens that it picked."""
        page_size = self._blocks.page_size
        for item, token_id in zip(scheduled, sampled, strict=True):
            sequence = item.sequence
            sequence.num_computed += item.num_tokens
            if sequence.num_computed // page_size > sequence.num_indexed:
                self._cache.insert(sequence)
            if token_id is not None:
                sequence.token_ids.append(token_id)

    def _schedule_decodes(self) -> list[ScheduledSlice]:
        decodes: list[ScheduledSlice] = []
        page_size = self._blocks.page_size
        for sequence in self._running.copy():
            length = len(sequence.token_ids)
            if length - sequence.num_computed != 1 or sequence.status is not SequenceStatus.RUNNING:
                continue
            while len(sequence.pages) * page_size < length and not self._blocks.grow(sequence.pages, length):
                if self._preempt_last() is sequence:
                    break
            else:
                decodes.append(ScheduledSlice(sequence, 1, is_prefill=False, samples=True))
        return decodes

    def _schedule_prefills(self, budget: int, scheduled: list[ScheduledSlice]) -> None:
        for sequence in self._running:
            if budget > 0 and sequence.num_pending > 1:
                budget -= self._prefill(sequence, budget, scheduled)
        while budget > 0 and self._waiting and len(self._running) < self._max_running:
            if not self._admit(self._waiting[0]):
                break
            budget -= self._prefill(self._running[-1], budget, scheduled)

    def _prefill(self, sequence: Sequence, budget: int, scheduled: list[ScheduledSlice]) -> int:
        pending = sequence.num_pending
        num_tokens = min(budget, pending, MOST_SCORED_TOKENS if sequence.scorer is not None else pending)
        scheduled.append(ScheduledSlice(sequence, num_tokens, is_prefill=True, samples=num_tokens == pending))
        return num_tokens

    def _admit(self, sequence: Sequence) -> bool:
        """Let the first in line run, where its pages are free and nobody computes what it could share."""
        if sequence.runs_after is not None and not sequence.runs_after.is_complete:
            return False
        cached = self._cache.match(sequence)
        if self._is_computing_next_page(sequence, len(cached)):
            return False
        # A page to spare for each running sequence: else the next decode would preempt what was just admitted.
        held_by_others = sum(not self._blocks.is_free(page) for page in cached)
        needed = self._blocks.pages_for(len(sequence.token_ids)) - held_by_others + len(self._running)
        if needed > self._blocks.num_free:
            return False
        self._waiting.popleft()
        self._cache.attach(sequence, cached)
        self._blocks.grow(sequence.pages, len(sequence.token_ids))
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
            self.num_prompt_tokens += sequence.num_prompt_tokens
            self.num_cached_tokens += sequence.num_cached
        sequence.status = SequenceStatus.RUNNING
        self._running.append(sequence)
        return True

    def _is_computing_next_page(self, sequence: Sequence, num_pages: int) -> bool:
        """Whether a running prefill will soon have one more page that this sequence can begin with."""
        end = (num_pages + 1) * self._blocks.page_size
        tokens = sequence.token_ids
        if sequence.sharing is None or sequence.scorer is not None or end >= len(tokens):
            return False
        return any(
            other.num_computed < end <= len(other.token_ids)
            and other.sharing == sequence.sharing
            and other.token_ids[:end] == tokens[:end]
            for other in self._running
            if other.num_pending > 1
        )

    def _preempt_last(self) -> Sequence:
        victim = self._running.pop()
        self._cache.leave(victim)
        victim.status = SequenceStatus.WAITING
        self._waiting.appendleft(victim)
        self.num_preemptions += 1
        return victim
