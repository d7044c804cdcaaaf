"""An answer while it grows: one output in a notebook cell, plain text in a terminal."""

from __future__ import annotations

import html
import time
import uuid
from typing import TYPE_CHECKING, Protocol

from mlc_nb.notebook.answer_format import answer_bundle

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell

    from mlc_nb.notebook.answer_format import AnswerFormat

__all__ = ["CellOutput", "StreamView", "in_kernel", "note_bundle", "open_view", "show_note"]

# Control characters, which could command a terminal, as the pictures of themselves.
_HARMLESS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_HARMLESS |= dict.fromkeys(range(0x80, 0xA0), 0x2426)

UPDATE_INTERVAL_S = 0.08
"""Seconds between two updates of a cell: 12 a second look continuous, and a front end renders the whole text each."""


def note_bundle(text: str) -> dict[str, str]:
    """One small grey line, such as the figures below an answer."""
    return {"text/plain": text, "text/html": f"<small style='opacity: 0.65'>{html.escape(text)}</small>"}


class CellOutput:
    """One output of the running cell that can be replaced as often as wanted; the notebook saves its last state."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._transient = {"display_id": uuid.uuid4().hex}
        self._shown = False

    def show(self, bundle: dict[str, str]) -> None:
        """Show ``bundle``, a representation for each MIME type, in place of what was there."""
        self._shell.display_pub.publish(data=bundle, metadata={}, transient=self._transient, update=self._shown)
        self._shown = True

    def clear(self) -> None:
        """Leave nothing to see; where nothing was shown, no output comes to be."""
        if self._shown:
            self.show({"text/plain": ""})


class StreamView(Protocol):
    """Where an answer is shown while it is generated; used by the thread that runs the cell only."""

    def wait_for(self, what: str) -> None:
        """Say what the first token waits for; gone as soon as there is text."""

    def begin(self, model: str, stop: Callable[[], None]) -> None:
        """Say who answers; a Stop button calls ``stop``, from any thread."""

    def add(self, text: str) -> None:
        """Append to the answer."""

    def tick(self) -> None:
        """Show what was added since the last update, if it is time to."""

    def finish(self, note: str) -> None:
        """Show the whole answer and, when not empty, one line below it."""


def open_view(
    shell: InteractiveShell, answer_format: AnswerFormat = "markdown", *, raw: bool = False, silent: bool = False
) -> StreamView:
    """Choose the view that suits ``shell``: a cell under a Jupyter kernel, text elsewhere.

    Parameters
    ----------
    raw
        The answer alone, as text on stdout.
    silent
        Nothing at all.
    """
    if silent:
        return _SilentView()
    if raw:
        return _RawView()
    return _CellView(shell, answer_format) if in_kernel(shell) else _TerminalView()


def show_note(shell: InteractiveShell, text: str) -> None:
    """Show one small line below what the running cell has shown so far."""
    if in_kernel(shell):
        CellOutput(shell).show(note_bundle(text))
    else:
        print(text, flush=True)


def in_kernel(shell: InteractiveShell) -> bool:
    """Whether outputs go to cells; in a terminal they are text that stays."""
    return getattr(shell, "kernel", None) is not None


class _CellView:
    """One output that is updated in place, so that the saved cell holds exactly one copy of the answer."""

    def __init__(self, shell: InteractiveShell, answer_format: AnswerFormat) -> None:
        self._format = answer_format
        self._answer = CellOutput(shell)
        # An output of its own: an answer that ends inside a code fence must not swallow the note.
        self._note = CellOutput(shell)
        self._text = ""
        self._shown = 0
        self._next_update = 0.0

    def wait_for(self, what: str) -> None:
        if not self._text:
            self._answer.show(note_bundle(what))

    def begin(self, model: str, stop: Callable[[], None]) -> None:
        pass  # a cell without widgets has no button; Kernel > Interrupt stops the answer

    def add(self, text: str) -> None:
        self._text += text
        self.tick()

    def tick(self) -> None:
        if self._shown < len(self._text) and time.monotonic() >= self._next_update:
            self._show_answer()

    def finish(self, note: str) -> None:
        if self._shown < len(self._text):
            time.sleep(max(0.0, self._next_update - time.monotonic()))
            self._show_answer()
        elif not self._text:
            self._answer.clear()
        if note:
            self._note.show(note_bundle(note))

    def _show_answer(self) -> None:
        self._answer.show(answer_bundle(self._text, self._format))
        self._shown = len(self._text)
        self._next_update = time.monotonic() + UPDATE_INTERVAL_S


class _SilentView:
    """Shows nothing."""

    def wait_for(self, what: str) -> None:
        pass

    def begin(self, model: str, stop: Callable[[], None]) -> None:
        pass

    def add(self, text: str) -> None:
        pass

    def tick(self) -> None:
        pass

    def finish(self, note: str) -> None:
        pass


class _RawView(_SilentView):
    """The answer on stdout, character by character what the model wrote, at a rate that front ends can take."""

    def __init__(self) -> None:
        self._held = ""
        self._next_update = 0.0

    def add(self, text: str) -> None:
        self._held += text
        self.tick()

    def tick(self) -> None:
        if self._held and time.monotonic() >= self._next_update:
            self._flush()

    def finish(self, note: str) -> None:  # noqa: ARG002 - the answer alone
        self._flush()

    def _flush(self) -> None:
        print(self._held, end="", flush=True)
        self._held = ""
        self._next_update = time.monotonic() + UPDATE_INTERVAL_S


class _TerminalView:
    """Text goes out as it comes: a terminal cannot take lines back."""

    def __init__(self) -> None:
        self._last = "\n"

    def wait_for(self, what: str) -> None:
        print(what, flush=True)

    def begin(self, model: str, stop: Callable[[], None]) -> None:
        pass  # Ctrl-C stops the answer

    def add(self, text: str) -> None:
        if text:
            self._last = text
            print(text.translate(_HARMLESS), end="", flush=True)

    def tick(self) -> None:
        pass

    def finish(self, note: str) -> None:
        if not self._last.endswith("\n"):
            print()
        if note:
            print(note, flush=True)
