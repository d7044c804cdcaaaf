from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlc_nb.engine.block_manager import BlockManager
from mlc_nb.engine.scheduler import Scheduler
from mlc_nb.engine.sequence import Sequence, SequenceStatus
from mlc_nb.runtime.sampler import SamplingState

NUM_PAGES, PAGE_SIZE, MAX_RUNNING = 10, 4, 3
CAPACITY = NUM_PAGES * PAGE_SIZE


def new_sequence(name: object, num_tokens: int) -> Sequence:
    return Sequence(str(name), list(range(num_tokens)), SamplingState(temperature=0.0))


class SchedulerMachine(RuleBasedStateMachine):
    """Random submits, aborts, steps and finishes on a pool that is too small for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_PAGES, PAGE_SIZE)
        self.scheduler = Scheduler(self.blocks, MAX_RUNNING)
        self.live: list[Sequence] = []
        self.lengths: dict[Sequence, int] = {}
        self.names = itertools.count()

    @rule(num_tokens=st.integers(1, CAPACITY - 1), answer=st.integers(1, 20))
    def submit(self, num_tokens: int, answer: int) -> None:
        sequence = new_sequence(next(self.names), num_tokens)
        self.lengths[sequence] = min(num_tokens + answer, CAPACITY)
        self.live.append(sequence)
        self.scheduler.add(sequence)

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        self.finish(self.live[choice % len(self.live)])

    @precondition(lambda self: self.live)
    @rule(budget=st.integers(1, 50), times=st.integers(1, 10))
    def step(self, budget: int, times: int) -> None:
        for _ in range(times):
            if not self.live:
                return
            self._step(budget)

    def _step(self, budget: int) -> None:
        first = self.live[0]
        computed = first.num_computed
        scheduled = self.scheduler.schedule(budget)
        assert scheduled, "work, but nothing to run"
        assert len({item.sequence for item in scheduled}) == len(scheduled) <= MAX_RUNNING
        assert sum(item.num_tokens for item in scheduled if item.is_prefill) <= budget
        for item in scheduled:
            assert item.sequence.status is SequenceStatus.RUNNING
            part = item.as_step_slice()
            assert len(part.page_table) * PAGE_SIZE >= part.start_position + len(part.token_ids)
            assert (part.sampling is None) == (item.num_tokens < item.sequence.num_pending)
        sampled = [0 if item.samples else None for item in scheduled]
        self.scheduler.advance(scheduled, sampled)
        assert first.num_computed > computed, "the one that came first always goes on"
        for item in scheduled:
            if len(item.sequence.token_ids) >= self.lengths[item.sequence]:
                self.finish(item.sequence)

    def finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.scheduler.finish(sequence)
        self.live.remove(sequence)
        assert sequence.pages == []

    @invariant()
    def pages_are_held_by_running_sequences_alone(self) -> None:
        held = [page for sequence in self.live for page in sequence.pages]
        assert len(set(held)) == len(held)
        assert self.blocks.num_free == NUM_PAGES - len(held)
        for sequence in self.live:
            assert sequence.status is SequenceStatus.RUNNING or not sequence.pages
        assert self.scheduler.has_work == bool(self.live)

    @invariant()
    def running_came_before_waiting(self) -> None:
        running = [sequence.status is SequenceStatus.RUNNING for sequence in self.live]
        assert running == sorted(running, reverse=True)

    def teardown(self) -> None:
        for _ in range(5000):
            if not self.live:
                break
            self._step(7)
        assert not self.live, "some request never ends"
        assert self.blocks.num_free == NUM_PAGES


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_decodes_go_first_and_prefill_is_cut_to_the_budget() -> None:
    scheduler = Scheduler(BlockManager(64, 16), max_running=8)
    early, late = new_sequence("early", 5), new_sequence("late", 100)
    scheduler.add(early)
    scheduler.advance(scheduler.schedule(64), [7])
    scheduler.add(late)
    scheduled = scheduler.schedule(30)
    assert [(item.sequence, item.num_tokens) for item in scheduled] == [(early, 1), (late, 30)]
    assert [item.samples for item in scheduled] == [True, False]


def test_the_last_to_come_is_preempted_and_computed_again() -> None:
    scheduler = Scheduler(BlockManager(4, 4), max_running=2)
    first, second = new_sequence("first", 4), new_sequence("second", 3)
    scheduler.add(first)
    scheduler.advance(scheduler.schedule(100), [0])
    scheduler.add(second)
    scheduler.advance(scheduler.schedule(100), [0, 0])
    for _ in range(4):
        scheduled = scheduler.schedule(100)
        scheduler.advance(scheduled, [0] * len(scheduled))
    assert scheduler.num_preemptions == 1
    assert second.status is SequenceStatus.WAITING
    assert second.num_computed == 0
    assert second.num_generated > 0
    scheduler.finish(first)
    (item,) = scheduler.schedule(100)
    assert (item.sequence, item.num_tokens) == (second, len(second.token_ids))
