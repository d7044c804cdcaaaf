"""Continuous batching: which sequences take part in a step, and with how many tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlc_nb.engine.sequence import Sequence, SequenceStatus
from mlc_nb.runtime.step import SequenceSlice

if TYPE_CHECKING:
    from mlc_nb.engine.block_manager import BlockManager

__all__ = ["ScheduledSlice", "Scheduler"]


@dataclass(frozen=True, slots=True)
class ScheduledSlice:
    """The next ``num_tokens`` pending tokens of a sequence."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_prefill(self) -> bool:
        """Whether this is a part of a prompt (or of a sequence that is computed again) rather than a decode."""
        return self.sequence.num_pending > 1

    @property
    def samples(self) -> bool:
        """Whether the slice ends at the last known token, so that the next one is picked."""
        return self.num_tokens == self.sequence.num_pending

    def as_step_slice(self) -> SequenceSlice:
        """Return what the model runner takes."""
        sequence = self.sequence
        start = sequence.num_computed
        return SequenceSlice(
            token_ids=sequence.token_ids[start : start + self.num_tokens],
            start_position=start,
            page_table=sequence.pages,
            sampling=sequence.sampling if self.samples else None,
        )


class Scheduler:
    """Orders sequences first come, first served.

    Every running sequence came before every waiting one. Decodes go into every step; prefill chunks fill what the
    step's budget leaves. When pages run out, the sequence that came last gives its pages back, returns to the front
    of the line and is computed again later; the one that came first can therefore always go on. A sequence is
    admitted when the pages for all its known tokens are free, and for the next decode of all others.

    Parameters
    ----------
    max_running
        Most sequences that hold pages at once, which is also the most slices in a step.
    """

    def __init__(self, block_manager: BlockManager, max_running: int) -> None:
        self._blocks = block_manager
        self._max_running = max_running
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self.num_preemptions = 0

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
        return sum(sequence.num_pending == 1 for sequence in self._running)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence at the end of the line; its tokens up to its last must fit in the pool."""
        self._waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and return its pages; a second call does nothing."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        self._blocks.release(sequence.pages)

    def schedule(self, prefill_budget: int) -> list[ScheduledSlice]:
        """Choose the slices of the next step, at least one where there is any work.

        Parameters
        ----------
        prefill_budget
            Most prompt tokens in the step, at least 1; decodes are not counted.
        """
        decodes = self._schedule_decodes()
        return decodes + self._schedule_prefills(prefill_budget)

    def advance(self, scheduled: list[ScheduledSlice], sampled: list[int | None]) -> None:
        """Record that a step was run, and append the tokens that it picked."""
        for item, token_id in zip(scheduled, sampled, strict=True):
            item.sequence.num_computed += item.num_tokens
            if token_id is not None:
                item.sequence.token_ids.append(token_id)

    def _schedule_decodes(self) -> list[ScheduledSlice]:
        decodes: list[ScheduledSlice] = []
        for sequence in self._running.copy():
            if sequence.status is not SequenceStatus.RUNNING or sequence.num_pending != 1:
                continue
            while not self._blocks.grow(sequence.pages, len(sequence.token_ids)):
                if self._preempt_last() is sequence:
                    break
            else:
                decodes.append(ScheduledSlice(sequence, 1))
        return decodes

    def _schedule_prefills(self, budget: int) -> list[ScheduledSlice]:
        prefills: list[ScheduledSlice] = []
        for sequence in self._running:
            if budget > 0 and sequence.num_pending > 1:
                prefills.append(ScheduledSlice(sequence, min(budget, sequence.num_pending)))
                budget -= prefills[-1].num_tokens
        while budget > 0 and self._waiting and len(self._running) < self._max_running:
            sequence = self._waiting[0]
            # A page to spare for each running sequence: else the next decode would preempt what was just admitted.
            needed = self._blocks.pages_for(len(sequence.token_ids)) + len(self._running)
            if needed > self._blocks.num_free or not self._blocks.grow(sequence.pages, len(sequence.token_ids)):
                break
            self._waiting.popleft()
            sequence.status = SequenceStatus.RUNNING
            self._running.append(sequence)
            prefills.append(ScheduledSlice(sequence, min(budget, sequence.num_pending)))
            budget -= prefills[-1].num_tokens
        return prefills

    def _preempt_last(self) -> Sequence:
        victim = self._running.pop()
        self._blocks.release(victim.pages)
        victim.num_computed = 0
        victim.status = SequenceStatus.WAITING
        self._waiting.appendleft(victim)
        self.num_preemptions += 1
        return victim
