"""Hands out KV pages, counts who refers to them, and remembers which free ones still hold something worth keeping."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["BlockManager"]


class BlockManager:
    """The pages of one KV pool, each with a reference count; a page is free when nobody refers to it.

    A free page may be *kept*: it holds tokens that a later sequence may begin with, and can be shared again instead of
    being computed again. Kept pages are free all the same. They are handed out after all others, the one that was
    released first comes first, and whoever keeps them is told.

    Parameters
    ----------
    num_pages
        Pages in the pool; their indices are 0 to ``num_pages - 1``.
    page_size
        Tokens in a page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"A KV pool needs pages of at least one token, got {num_pages} pages of {page_size}.")
        self.num_pages = num_pages
        self.page_size = page_size
        self._references = [0] * num_pages
        # Free pages in the order in which they are handed out.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._kept: dict[int, Callable[[int], None]] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody refers to, kept ones included."""
        return len(self._free)

    def is_free(self, page: int) -> bool:
        """Whether nobody refers to the page."""
        return self._references[page] == 0

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.page_size)

    def grow(self, pages: list[int], num_tokens: int) -> bool:
        """Append free pages to ``pages`` until they hold ``num_tokens`` tokens; all or none.

        Returns
        -------
        bool
            False when too few pages are free; nothing has changed then.
        """
        missing = -(-num_tokens // self.page_size) - len(pages)
        if missing <= 0:
            return True
        if missing > len(self._free):
            return False
        for _ in range(missing):
            page, _ = self._free.popitem(last=False)
            dropped = self._kept.pop(page, None)
            if dropped is not None:
                dropped(page)
            self._references[page] = 1
            pages.append(page)
        return True

    def keep(self, page: int, dropped: Callable[[int], None]) -> None:
        """Hand this page out late once it is free; ``dropped`` is called with it when that happens."""
        self._kept[page] = dropped

    def unkeep(self, page: int) -> None:
        """Take `keep` back; ``dropped`` is not called."""
        del self._kept[page]
        if page in self._free:
            self._free.move_to_end(page, last=False)

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each page; all must be in use or kept."""
        for page in pages:
            if self._references[page] == 0:
                if page not in self._kept:
                    raise RuntimeError(f"KV page {page} is free and cannot be shared.")
                del self._free[page]
            self._references[page] += 1

    def release(self, pages: list[int]) -> None:
        """Drop one reference to each page and empty the list."""
        # From the last to the first: of a sequence that is kept, the end goes before its beginning.
        while pages:
            page = pages.pop()
            if self._references[page] < 1:
                raise RuntimeError(f"KV page {page} was released more often than it was taken.")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free[page] = None
                if page not in self._kept:
                    # The page that was freed last is taken first: it is the likeliest to be in a cache.
                    self._free.move_to_end(page, last=False)
