from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mlc_nb.engine.block_manager import BlockManager


class BlockManagerMachine(RuleBasedStateMachine):
    """Page tables that grow, are shared and are released at random; a plain count is the model."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(num_pages=12, page_size=4)
        self.held: list[list[int]] = []

    @rule(target=tables, num_tokens=st.integers(0, 30))
    def take(self, num_tokens: int) -> list[int]:
        return self._grow([], num_tokens)

    @rule(table=tables, num_tokens=st.integers(0, 60))
    def grow(self, table: list[int], num_tokens: int) -> None:
        self._grow(table, num_tokens)

    def _grow(self, table: list[int], num_tokens: int) -> list[int]:
        before, free = list(table), self.blocks.num_free
        grown = self.blocks.grow(table, num_tokens)
        missing = max(0, self.blocks.pages_for(num_tokens) - len(before))
        assert grown == (missing <= free)
        assert table[: len(before)] == before
        assert len(table) == len(before) + (missing if grown else 0)
        if not any(table is other for other in self.held):
            self.held.append(table)
        return table

    @rule(target=tables, table=tables)
    def share(self, table: list[int]) -> list[int]:
        copy = list(table)
        self.blocks.share(copy)
        self.held.append(copy)
        return copy

    @rule(table=consumes(tables))
    def release(self, table: list[int]) -> None:
        self.blocks.release(table)
        assert table == []
        self.held = [other for other in self.held if other is not table]

    @invariant()
    def no_page_is_lost_or_given_twice(self) -> None:
        in_use = {page for table in self.held for page in table}
        assert self.blocks.num_free == 12 - len(in_use)
        for table in self.held:
            assert len(set(table)) == len(table)


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_double_release_is_found() -> None:
    blocks = BlockManager(2, 16)
    pages: list[int] = []
    assert blocks.grow(pages, 1)
    copy = list(pages)
    blocks.release(pages)
    with pytest.raises(RuntimeError, match="released more often"):
        blocks.release(copy)


def test_a_free_page_cannot_be_shared() -> None:
    with pytest.raises(RuntimeError, match="is free"):
        BlockManager(2, 16).share([0])


def test_a_pool_needs_pages() -> None:
    with pytest.raises(ValueError, match="0 pages"):
        BlockManager(0, 16)
