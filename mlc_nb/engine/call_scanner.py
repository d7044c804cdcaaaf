"""Reads one call of a function, a JSON object with a name and arguments, as its characters come."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CallScanner"]

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)


class CallScanner:
    """Follows ``{"name": "f", "arguments": {...}}`` from its opening brace to its closing one.

    It finds where keys and values begin and end and takes the arguments over as they were written, so that they can be
    passed on before they are complete.

    Attributes
    ----------
    name
        Once it was read whole.
    is_complete, is_broken
        Whether the object was closed, or can no longer be a call.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_complete = False
        self.is_broken = False
        self.arguments = ""
        self._fragment = ""
        self._state: Callable[[str], None] = self._open
        self._key = ""
        self._value = ""
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, character: str) -> None:
        """Take the next character; nothing after the end."""
        if not (self.is_complete or self.is_broken):
            self._state(character)

    def take_arguments(self) -> str:
        """Return what is new of the arguments' JSON text."""
        fragment, self._fragment = self._fragment, ""
        self.arguments += fragment
        return fragment

    @property
    def has_valid_arguments(self) -> bool:
        """Whether the arguments are a JSON object."""
        try:
            return isinstance(json.loads(self.arguments), dict)
        except (ValueError, RecursionError):
            return False

    def _open(self, character: str) -> None:
        self._expect(character == "{", self._before_key)

    def _before_key(self, character: str) -> None:
        if character in _SPACE:
            return
        self._key = self._value = ""
        if character == "}":
            self._close()
        else:
            self._expect(character == '"', self._in_key)

    def _in_key(self, character: str) -> None:
        if character == '"':
            self._expect(self._key in _KEYS, self._before_colon)
        else:
            self._key += character

    def _before_colon(self, character: str) -> None:
        if character not in _SPACE:
            self._expect(character == ":", self._before_value)

    def _before_value(self, character: str) -> None:
        if character in _SPACE:
            return
        self._depth, self._in_string, self._escaped = 0, False, False
        self._expect(character not in ",}]:", self._in_value)
        self._in_value(character)

    def _in_value(self, character: str) -> None:
        if self._in_string:
            self._add(character)
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                self._end_value_at_top()
        elif character == '"':
            self._in_string = True
            self._add(character)
        elif character in "{[":
            self._depth += 1
            self._add(character)
        elif character in "}]" and self._depth:
            self._depth -= 1
            self._add(character)
            self._end_value_at_top()
        elif not self._depth and character in ",}" + _SPACE:
            self._end_value()
            self._after_value(character)
        else:
            self._add(character)

    def _add(self, character: str) -> None:
        self._value += character
        if self._key in _ARGUMENTS and self._value[0] == "{":
            self._fragment += character

    def _end_value_at_top(self) -> None:
        if not self._depth:
            self._end_value()

    def _end_value(self) -> None:
        self._state = self._after_value
        if self._key == "name":
            name = _parsed(self._value)
            self.name = name if isinstance(name, str) else None
            self.is_broken = self.name is None
        elif self._key in _ARGUMENTS and self._value[0] != "{":
            # Some models write the arguments as a text that holds JSON, or null where there are none.
            value = _parsed(self._value)
            self._fragment += value if isinstance(value, str) else "" if value is None else self._value

    def _after_value(self, character: str) -> None:
        if character in _SPACE:
            return
        if character == "}":
            self._close()
        else:
            self._expect(character == ",", self._before_key)

    def _close(self) -> None:
        self.is_complete = self.name is not None
        self.is_broken = not self.is_complete
        if not self.arguments and not self._fragment:
            self._fragment = "{}"

    def _expect(self, is_met: bool, state: Callable[[str], None]) -> None:
        self.is_broken = not is_met
        self._state = state


def _parsed(value: str) -> object:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None
