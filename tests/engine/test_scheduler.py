from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlc_nb.engine.block_manager import BlockManager
from mlc_nb.engine.prefix_cache import PrefixCache
from mlc_nb.engine.scheduler import ScheduledSlice, Scheduler
from mlc_nb.engine.sequence import Sequence, SequenceStatus
from mlc_nb.runtime.sampler import SamplingState

NUM_PAGES, PAGE_SIZE, MAX_RUNNING = 10, 4, 3
CAPACITY = NUM_PAGES * PAGE_SIZE


def new_sequence(name: object, num_tokens: int, sharing: object = None) -> Sequence:
    return Sequence(str(name), list(range(num_tokens)), SamplingState(temperature=0.0), sharing)


def make_scheduler(num_pages: int, page_size: int, max_running: int) -> Scheduler:
    blocks = BlockManager(num_pages, page_size)
    return Scheduler(blocks, PrefixCache(blocks), max_running)


class SchedulerMachine(RuleBasedStateMachine):
    """Random submits, forks, aborts, failures, steps and finishes on a pool that is too small for all of them.

    The pages hold what a runner would have written into them, so a page that is shared wrongly is found.
    """

    @initialize(max_idle=st.sampled_from([None, 0, 1, 2]))
    def start(self, max_idle: int | None) -> None:
        self.blocks = BlockManager(NUM_PAGES, PAGE_SIZE)
        self.cache = PrefixCache(self.blocks, max_idle)
        self.max_idle = max_idle
        self.scheduler = Scheduler(self.blocks, self.cache, MAX_RUNNING)
        self.live: list[Sequence] = []
        self.lengths: dict[Sequence, int] = {}
        self.names = itertools.count()
        self.content: dict[tuple[int, int], tuple[object, ...]] = {}

    @rule(
        num_tokens=st.integers(1, CAPACITY - 1),
        answer=st.integers(1, 20),
        choices=st.integers(1, 3),
        sharing=st.sampled_from([None, "a", "a", "b"]),
        variant=st.integers(0, 2),
        common=st.integers(0, CAPACITY),
    )
    def submit(
        self, num_tokens: int, answer: int, choices: int, sharing: str | None, variant: int, common: int
    ) -> None:
        for _ in range(choices):
            sequence = new_sequence(next(self.names), num_tokens, sharing)
            for position in range(min(common, num_tokens), num_tokens):
                sequence.token_ids[position] += 1000 * variant
            self.lengths[sequence] = min(num_tokens + answer, CAPACITY)
            self.live.append(sequence)
            self.scheduler.add(sequence)

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 1000), keep=st.booleans())
    def abort(self, choice: int, keep: bool) -> None:
        self.finish(self.live[choice % len(self.live)], keep)

    @precondition(lambda self: self.live)
    @rule(budget=st.integers(1, 50), times=st.integers(1, 10))
    def step(self, budget: int, times: int) -> None:
        for _ in range(times):
            if not self.live:
                return
            self._step(budget)

    def _step(self, budget: int) -> None:
        first = self.live[0]
        before = (first.num_computed, len(first.token_ids))
        scheduled = self.scheduler.schedule(budget)
        assert scheduled, "work, but nothing to run"
        assert len({item.sequence for item in scheduled}) == len(scheduled) <= MAX_RUNNING
        assert sum(item.num_tokens for item in scheduled if item.is_prefill) <= budget
        for item in scheduled:
            self._run(item)
        sampled = [self._next_token(item.sequence) if item.samples else None for item in scheduled]
        self.scheduler.advance(scheduled, sampled)
        assert (first.num_computed, len(first.token_ids)) > before, "the one that came first always goes on"
        for item in scheduled:
            if len(item.sequence.token_ids) >= self.lengths[item.sequence]:
                self.finish(item.sequence)

    def _run(self, item: ScheduledSlice) -> None:
        sequence = item.sequence
        assert sequence.status is SequenceStatus.RUNNING
        part = item.as_step_slice()
        end = part.start_position + len(part.token_ids)
        assert len(part.page_table) * PAGE_SIZE >= end
        assert (part.sampling is None) == (item.num_tokens < sequence.num_pending)
        for position in range(end):
            place = (part.page_table[position // PAGE_SIZE], position % PAGE_SIZE)
            written = (sequence.sharing, *sequence.token_ids[: position + 1])
            if position < part.start_position:
                assert self.content[place] == written, "a page does not hold what the sequence was told"
            else:
                self.content[place] = written

    def _next_token(self, sequence: Sequence) -> int:
        return sum(sequence.token_ids) % 7

    def finish(self, sequence: Sequence, keep: bool = True) -> None:
        self.scheduler.finish(sequence, keep=keep)
        self.scheduler.finish(sequence)
        self.live.remove(sequence)
        assert sequence.pages == []

    @precondition(lambda self: not any(sequence.pages for sequence in self.live))
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert self.cache.num_pages == 0
        assert self.blocks.num_free == NUM_PAGES

    @invariant()
    def every_page_is_counted_once_for_each_holder(self) -> None:
        held = Counter(page for sequence in self.live for page in sequence.pages)
        assert self.blocks.num_free == NUM_PAGES - len(held)
        for page in range(NUM_PAGES):
            assert self.blocks._references[page] == held[page]
        for sequence in self.live:
            assert len(set(sequence.pages)) == len(sequence.pages)
            assert sequence.status is SequenceStatus.RUNNING or not sequence.pages
            # Only pages of the tree are shared, and they are never written again.
            assert all(held[page] == 1 for page in sequence.pages[sequence.num_indexed :])
            assert sequence.num_indexed * PAGE_SIZE <= sequence.num_computed
        assert self.scheduler.has_work == bool(self.live)

    @invariant()
    def the_tree_is_sound(self) -> None:
        assert set(self.blocks._kept) == set(self.cache._nodes)
        for page, node in self.cache._nodes.items():
            assert node.page == page
            assert node.parent.children[node.key] is node
            if node.parent is not self.cache._root and not self.blocks.is_free(page):
                assert not self.blocks.is_free(node.parent.page)
        if self.max_idle == 0:
            assert not any(self.blocks.is_free(page) for page in self.cache._nodes)
        if self.max_idle is not None:
            assert len(self.cache._idle_ends) <= self.max_idle
        assert all(self.cache._nodes.get(node.page) is node for node in self.cache._idle_ends)

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
        self.cache.clear()
        assert len(self.blocks._free) == NUM_PAGES


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_decodes_go_first_and_prefill_is_cut_to_the_budget() -> None:
    scheduler = make_scheduler(64, 16, 8)
    early, late = new_sequence("early", 5), new_sequence("late", 100)
    scheduler.add(early)
    scheduler.advance(scheduler.schedule(64), [7])
    scheduler.add(late)
    scheduled = scheduler.schedule(30)
    assert [(item.sequence, item.num_tokens) for item in scheduled] == [(early, 1), (late, 30)]
    assert [item.samples for item in scheduled] == [True, False]


def test_the_last_to_come_is_preempted_and_computed_again() -> None:
    scheduler = make_scheduler(4, 4, 2)
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
