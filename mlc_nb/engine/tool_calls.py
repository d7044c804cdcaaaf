"""Finds calls of functions in the text of an answer, as it comes."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from mlc_nb.engine.call_scanner import CallScanner

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from mlc_nb.engine.tool_formats import ToolFormat

__all__ = ["AnswerPiece", "CallPiece", "ToolCallParser"]


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What is new of a call: id and name in its first piece, then pieces of its arguments."""

    index: int
    arguments: str = ""
    call_id: str | None = None
    name: str | None = None


AnswerPiece: TypeAlias = str | CallPiece
"""A piece of plain text or of a call."""


class ToolCallParser:
    """Splits one answer into plain text and calls.

    A call is passed on from the moment that its name is known to be one of ``names``; whatever does not become a call
    is plain text, so nothing that a model writes is lost. White space between text and calls is dropped.

    Parameters
    ----------
    tool_format
        How the model writes calls.
    names
        The functions that were offered.
    parallel
        Whether to pass on more than one call; later ones are dropped otherwise.
    """

    def __init__(self, tool_format: ToolFormat, names: Collection[str], *, parallel: bool = True) -> None:
        self._format = tool_format
        self._names = names
        self._parallel = parallel
        self._state: Callable[[str], None] = self._in_text
        self._pieces: list[AnswerPiece] = []
        self._space = ""  # white space that is passed on once other text follows
        self._held = ""  # the beginning of what may be the opener or the closer
        self._raw = ""  # what becomes plain text if it turns out to be no call
        self._has_text = False
        self._scanner = CallScanner()
        self._started = self._dropped = False
        self.num_calls = 0
        self._num_complete = 0

    @property
    def calls_are_complete(self) -> bool:
        """Whether there was a call, and all of them were written to their end with valid JSON."""
        return 0 < self.num_calls == self._num_complete

    def feed(self, text: str) -> list[AnswerPiece]:
        """Take the next piece of the answer; return what is certain of it."""
        for character in text:
            self._state(character)
        return self._take()

    def finish(self) -> list[AnswerPiece]:
        """Return what was held back: the answer ends here."""
        if self._state == self._in_text:
            self._say(self._held)
        elif not (self._started or self._dropped):
            self._say(self._raw)
        self._held = self._raw = ""
        if self._space and not self.num_calls:
            self._pieces.append(self._space)
        return self._take()

    def _take(self) -> list[AnswerPiece]:
        pieces, self._pieces = self._pieces, []
        merged: list[AnswerPiece] = []
        for piece in pieces:
            last = merged[-1] if merged else None
            if isinstance(piece, str) and isinstance(last, str):
                merged[-1] = last + piece
            elif isinstance(piece, CallPiece) and isinstance(last, CallPiece) and piece.index == last.index:
                merged[-1] = CallPiece(last.index, last.arguments + piece.arguments, last.call_id, last.name)
            else:
                merged.append(piece)
        return merged

    def _say(self, text: str) -> None:
        for character in text:
            if character.isspace():
                self._space += character
            else:
                self._pieces.append(self._space + character)
                self._space = ""
                self._has_text = True

    def _in_text(self, character: str) -> None:
        if self._format.may_be_bare and character == "{" and not (self._has_text or self._held):
            self._begin_call("{")
            return
        self._held += character
        while not self._format.opener.startswith(self._held):
            self._say(self._held[0])
            self._held = self._held[1:]
        if self._held == self._format.opener:
            self._raw, self._held = self._held, ""
            self._started = False
            self._state = self._around_calls

    def _around_calls(self, character: str) -> None:
        """Take what stands in front of, between and after calls: white space, separators, the closer."""
        self._raw += character
        closer = self._format.closer
        if character == "{" and not self._held:
            self._begin_call(self._raw)
        elif closer and closer.startswith(self._held + character):
            self._held += character
            if self._held == closer:
                self._end_calls(self._raw if not self._started else "")
        elif self._held or not (character.isspace() or character in self._format.separators):
            self._end_calls(self._raw)

    def _begin_call(self, raw: str) -> None:
        self._raw = raw
        self._scanner = CallScanner()
        self._scanner.feed("{")
        self._started = self._dropped = False
        self._state = self._in_call

    def _end_calls(self, text: str) -> None:
        if self._started:
            self._space = ""
        self._held = self._raw = ""
        self._state = self._in_text
        self._say(text)

    def _in_call(self, character: str) -> None:
        self._raw += character
        scanner = self._scanner
        scanner.feed(character)
        if scanner.name is not None and not (self._started or self._dropped or scanner.is_broken):
            self._begin_piece(scanner.name)
            if self._state != self._in_call:
                return
        if self._started:
            self._pass_on(scanner.take_arguments())
        if scanner.is_broken:
            self._end_calls(character if self._started else "" if self._dropped else self._raw)
        elif scanner.is_complete:
            self._num_complete += self._started and scanner.has_valid_arguments
            self._started = True  # what follows is no longer a part of a call that never began
            self._raw = self._held = ""
            self._state = self._around_calls

    def _begin_piece(self, name: str) -> None:
        if name not in self._names:
            self._end_calls(self._raw)
        elif self.num_calls and not self._parallel:
            self._dropped = True
        else:
            self._started = True
            self._pieces.append(CallPiece(self.num_calls, call_id=f"call_{uuid.uuid4().hex[:24]}", name=name))
            self.num_calls += 1

    def _pass_on(self, arguments: str) -> None:
        if arguments:
            self._pieces.append(CallPiece(self.num_calls - 1, arguments))
