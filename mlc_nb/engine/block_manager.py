"""Hands out KV pages and counts who refers to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["BlockManager"]


class BlockManager:
    """The pages of one KV pool, each with a reference count; a page is free when nobody refers to it.

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
        # The page that was freed last is taken first: it is the likeliest to be in a cache.
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody refers to."""
        return len(self._free)

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
        missing = self.pages_for(num_tokens) - len(pages)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            page = self._free.pop()
            self._references[page] = 1
            pages.append(page)
        return True

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each page; all must be in use."""
        for page in pages:
            if self._references[page] < 1:
                raise RuntimeError(f"KV page {page} is free and cannot be shared.")
            self._references[page] += 1

    def release(self, pages: list[int]) -> None:
        """Drop one reference to each page and empty the list."""
        while pages:
            page = pages.pop()
            if self._references[page] < 1:
                raise RuntimeError(f"KV page {page} was released more often than it was taken.")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)
