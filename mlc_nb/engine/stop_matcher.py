"""Finds stop strings in text that comes in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["StopMatcher"]


class StopMatcher:
    """Passes text on up to the first character of a stop string.

    The match that ends first counts; of several that end together, the longest. Only text that may be the beginning
    of a match is held back, so the result does not depend on how the text was cut into pieces.

    Parameters
    ----------
    stop_strings
        None of them empty.
    """

    def __init__(self, stop_strings: Iterable[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in dict.fromkeys(stop_strings)]
        if any(not stop for stop, _ in self._stops):
            raise ValueError("A stop string must not be empty.")
        # How many characters of each stop string the text so far ends with.
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Take the next piece; return what is certain not to be in a stop string. Nothing after a match."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        first_new = len(self._held) - len(text)
        for position in range(first_new, len(self._held)):
            longest = self._advance(self._held[position])
            if longest:
                self.stopped = True
                released, self._held = self._held[: position + 1 - longest], ""
                return released
        keep = max(self._matched)
        released = self._held[: len(self._held) - keep]
        self._held = self._held[len(released) :]
        return released

    def finalize(self) -> str:
        """Return what is still held: the text ended before it became a match."""
        released, self._held = self._held, ""
        return released

    def _advance(self, character: str) -> int:
        """Take one character (Knuth-Morris-Pratt); return the length of the longest stop string that it completes."""
        longest = 0
        for index, (stop, borders) in enumerate(self._stops):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                longest = max(longest, matched)
                matched = borders[matched - 1]
            self._matched[index] = matched
        return longest


def _borders(pattern: str) -> list[int]:
    """For each prefix of the pattern, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    matched = 0
    for position in range(1, len(pattern)):
        while matched and pattern[matched] != pattern[position]:
            matched = borders[matched - 1]
        if pattern[matched] == pattern[position]:
            matched += 1
        borders[position] = matched
    return borders
