"""What one render of a stranger's template may use: processor time, characters, items of lists and mappings."""

from __future__ import annotations

import contextlib
import time
from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "MAX_CHARACTERS",
    "MAX_ITEMS",
    "MAX_SECONDS",
    "Limits",
    "TemplateLimitError",
    "current_limits",
    "limited",
    "written",
]

MAX_SECONDS = 2.0
"""Of the rendering thread's processor time, so that a busy or sleeping machine fails no render."""

MAX_CHARACTERS = 1 << 25
"""Several times the text of the longest context there is."""

MAX_ITEMS = 1 << 20

_COLLECTIONS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


class TemplateLimitError(TemplateError):
    """A render exceeds its limits; the message completes "rendering the template ..."."""


class Limits:
    """What is left for one render."""

    def __init__(self) -> None:
        self._deadline = time.thread_time() + MAX_SECONDS
        self._characters = MAX_CHARACTERS
        self._items = MAX_ITEMS

    def look_at_clock(self) -> None:
        """Raise `TemplateLimitError` once the processor time is used up."""
        if time.thread_time() > self._deadline:
            raise TemplateLimitError(f"takes more than {MAX_SECONDS:g} s of processor time")

    def charge_characters(self, count: int) -> None:
        """Charge for text that is about to be built."""
        self.look_at_clock()
        self._characters -= count
        if self._characters < 0:
            raise TemplateLimitError(f"builds more than {MAX_CHARACTERS} characters")

    def charge_items(self, count: int) -> None:
        """Charge for parts of lists and mappings that are about to be built."""
        self.look_at_clock()
        self._items -= count
        if self._items < 0:
            raise self._too_many_items()

    def _too_many_items(self) -> TemplateLimitError:
        return TemplateLimitError(f"builds more than {MAX_ITEMS} items of lists and mappings")

    def charge_tree(self, value: Any) -> int:
        """Charge for a value and everything in it, once for every time that it would be written.

        Returns
        -------
        int
            About how many characters it takes to write the value.
        """
        self.look_at_clock()
        characters, stack = 0, [value]
        while stack:
            value = stack.pop()
            self._items -= 1
            if self._items < 0:
                raise self._too_many_items()
            if isinstance(value, str):
                characters += len(value) + 4
            elif isinstance(value, Mapping):
                stack.extend(value.keys())
                stack.extend(value.values())
            elif isinstance(value, _COLLECTIONS):
                stack.extend(value)
            elif isinstance(value, Namespace):
                raise SecurityError("a namespace can be neither written nor put into a list or mapping.")
            else:
                characters += 32
        return characters


_current: ContextVar[Limits] = ContextVar("mlc_nb_template_limits")


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Give the render inside the block fresh limits."""
    token = _current.set(Limits())
    try:
        yield
    finally:
        _current.reset(token)


def current_limits() -> Limits:
    """Limits of the render that this thread is in."""
    return _current.get()


def written(value: Any) -> str:
    """Write a value as Jinja does, charged before it is built."""
    limits = current_limits()
    if isinstance(value, str):
        limits.charge_characters(len(value))
        return value
    limits.charge_characters(limits.charge_tree(value))
    return str(value)
