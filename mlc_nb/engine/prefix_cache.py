"""Finds the KV pages that already hold the beginning of a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Hashable

    from mlc_nb.engine.block_manager import BlockManager
    from mlc_nb.engine.sequence import Sequence

__all__ = ["PrefixCache"]


class _Node:
    """A full page, its tokens, and the pages that were seen after it."""

    __slots__ = ("children", "key", "page", "parent")

    def __init__(self, parent: _Node | None, key: _Key, page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.children: dict[_Key, _Node] = {}


_Key: TypeAlias = "tuple[Hashable, ...]"


class PrefixCache:
    """A radix tree over full pages, each edge labelled with the tokens of one page.

    Attention pages can be shared only whole, so an edge is a page: matching and inserting cost one dictionary lookup a
    page and nothing is ever split, and unlike a chain of hashes the tree compares the tokens themselves. What does not
    fill a page is computed again, at most one page of tokens.

    The tree refers to no page: pages that no sequence holds are free, and the block manager hands them out when it has
    no others, in the order of their last use, before anything is preempted or has to wait. A sequence that holds a
    page of the tree holds all pages above it too, so what is handed out is always a leaf.

    Parameters
    ----------
    max_idle_sequences
        Most ended sequences whose pages are kept; None for no limit but the pool.
    """

    def __init__(self, blocks: BlockManager, max_idle_sequences: int | None = None) -> None:
        self._blocks = blocks
        self._max_idle = max_idle_sequences
        self._root = _Node(None, (), -1)
        self._nodes: dict[int, _Node] = {}
        # Where ended sequences end in the tree, the one that ended first in front.
        self._idle_ends: dict[_Node, None] = {}

    @property
    def num_pages(self) -> int:
        """Pages in the tree, in use or not."""
        return len(self._nodes)

    def match(self, sequence: Sequence) -> list[int]:
        """Return the pages that hold the beginning of the sequence; at least one of its tokens is left to compute."""
        if sequence.sharing is None or sequence.scorer is not None:
            return []
        size = self._blocks.page_size
        tokens = sequence.token_ids
        node = self._root
        pages: list[int] = []
        for start in range(0, (len(tokens) - 1) // size * size, size):
            found = node.children.get(self._key(sequence, node, start))
            if found is None:
                break
            pages.append(found.page)
            node = found
        return pages

    def attach(self, sequence: Sequence, pages: list[int]) -> None:
        """Let a sequence begin with pages that `match` found."""
        if not pages:
            return
        self._blocks.share(pages)
        # An ended sequence that is gone on from is no longer idle: this one has taken its place.
        self._idle_ends.pop(self._nodes[pages[-1]], None)
        sequence.pages.extend(pages)
        sequence.num_computed = len(pages) * self._blocks.page_size
        sequence.num_indexed = len(pages)

    def insert(self, sequence: Sequence) -> None:
        """Add the pages of a sequence that have been filled since the last call.

        Where another sequence has computed the same page meanwhile, this one takes the other's and gives its own back:
        both hold the same numbers.
        """
        if sequence.sharing is None:
            return
        blocks, size, pages = self._blocks, self._blocks.page_size, sequence.pages
        node = self._nodes[pages[sequence.num_indexed - 1]] if sequence.num_indexed else self._root
        for index in range(sequence.num_indexed, sequence.num_computed // size):
            key = self._key(sequence, node, index * size)
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = self._nodes[pages[index]] = _Node(node, key, pages[index])
                blocks.keep(child.page, self._drop)
            elif child.page != pages[index]:
                blocks.share([child.page])
                own, pages[index] = pages[index], child.page
                blocks.release([own])
            node = child
            sequence.num_indexed = index + 1

    def leave(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Give the pages of a sequence back; those in the tree can be found until they are needed.

        Parameters
        ----------
        keep
            False takes those that no other sequence needs out of the tree: what they hold is not to be trusted.
        """
        end = self._nodes[sequence.pages[sequence.num_indexed - 1]] if sequence.num_indexed else None
        self._blocks.release(sequence.pages)
        sequence.num_computed = sequence.num_indexed = 0
        if end is None:
            return
        if not keep:
            self._forget_branch(end)
        elif self._max_idle is not None:
            self._idle_ends.pop(end, None)
            self._idle_ends[end] = None
            while len(self._idle_ends) > self._max_idle:
                oldest = next(iter(self._idle_ends))
                del self._idle_ends[oldest]
                self._forget_branch(oldest)

    def clear(self) -> None:
        """Forget everything; no sequence may hold pages."""
        for page in self._nodes:
            self._blocks.unkeep(page)
        self._nodes.clear()
        self._idle_ends.clear()
        self._root.children.clear()

    def _key(self, sequence: Sequence, node: _Node, start: int) -> _Key:
        tokens = tuple(sequence.token_ids[start : start + self._blocks.page_size])
        return (sequence.sharing, *tokens) if node is self._root else tokens

    def _forget_branch(self, node: _Node) -> None:
        """Forget a sequence's pages from its end up to where another one goes on, ends or is running."""
        while not node.children and node not in self._idle_ends and self._blocks.is_free(node.page):
            parent = node.parent
            self._blocks.unkeep(node.page)
            self._drop(node.page)
            if parent is None or parent is self._root:
                return
            node = parent

    def _drop(self, page: int) -> None:
        node = self._nodes.pop(page)
        assert node.parent is not None  # the root has no page
        assert not node.children  # whoever holds a page holds those above it, and gives them back later
        del node.parent.children[node.key]
        self._idle_ends.pop(node, None)
