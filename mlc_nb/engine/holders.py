"""Who uses an engine core: it ends with the last of them, once one of them has let go of it."""

from __future__ import annotations

import threading

__all__ = ["Holders"]


class Holders:
    """Counts the live handles of one core.

    A handle that is dropped without a word leaves the core loaded for the next one. One that was released (the end of
    a ``with`` block) wants the memory back: then the core ends as soon as no handle is left.
    """

    def __init__(self) -> None:
        # Reentrant: the garbage collector drops handles on whatever thread it runs, between any two lines.
        self._lock = threading.RLock()
        self._count = 0
        self._released = False
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the last handle is gone and the core, too."""
        return self._ended

    def add(self) -> bool:
        """Count one more handle; False if the core has ended, and another one is to be asked for."""
        with self._lock:
            if self._ended:
                return False
            self._count += 1
            return True

    def remove(self, *, released: bool) -> bool:
        """Count one handle less; True if the core is to be ended now, by the caller."""
        with self._lock:
            self._count -= 1
            self._released |= released
            if self._count or not self._released or self._ended:
                return False
            self._ended = True
            return True
