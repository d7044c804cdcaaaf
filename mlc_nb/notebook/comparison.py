"""One question to several models or samplings, with the answers side by side while they grow."""

from __future__ import annotations

import html
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlc_nb.notebook.answer import ChatAnswer, stream_chat
from mlc_nb.notebook.interrupt import StopRequest
from mlc_nb.notebook.kept import keep
from mlc_nb.notebook.stream_view import UPDATE_INTERVAL_S, CellOutput, in_kernel, open_view

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from IPython.core.interactiveshell import InteractiveShell

    from mlc_nb.engine.engine import MLCEngine
    from mlc_nb.notebook.cell_engines import CellEngines

__all__ = ["Comparison", "Variant", "compare"]

_CELL = "text-align: left; vertical-align: top; white-space: pre-wrap; overflow-wrap: anywhere"


@dataclass(frozen=True, slots=True)
class Variant:
    """One column: what it is called, whom it asks and with which fields of `ChatCompletionRequest`."""

    label: str
    model: str
    fields: dict[str, Any]


class Comparison:
    """Answers to one question.

    Attributes
    ----------
    labels
        What each answer comes from.
    answers
        In the same order; None where there was an error.
    """

    def __init__(self, labels: Sequence[str], answers: Sequence[ChatAnswer | None]) -> None:
        self.labels = tuple(labels)
        self.answers = tuple(answers)

    def __repr__(self) -> str:
        return self._repr_mimebundle_()["text/plain"]

    def _repr_mimebundle_(self, **_selection: Any) -> dict[str, str]:
        texts = ["" if answer is None else answer.text for answer in self.answers]
        notes = ["" if answer is None else answer.note() for answer in self.answers]
        return _bundle(self.labels, texts, notes)


@dataclass(slots=True)
class _Column:
    """An answer that grows on its own thread; a view to `stream_chat`."""

    variant: Variant
    pieces: list[str] = field(default_factory=list)
    answer: ChatAnswer | None = None
    error: BaseException | None = None

    def wait_for(self, what: str) -> None:
        pass

    def begin(self, model: str, stop: Callable[[], None]) -> None:
        pass

    def add(self, text: str) -> None:
        self.pieces.append(text)

    def tick(self) -> None:
        pass

    def finish(self, note: str) -> None:
        pass

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def note(self) -> str:
        if self.error is not None:
            return f"{type(self.error).__name__}: {self.error}"
        return "…" if self.answer is None else self.answer.note()

    def run(self, engine: MLCEngine, stop: StopRequest) -> None:
        try:
            self.answer = stream_chat(engine, self.variant.fields, self, stop)
        except BaseException as error:
            self.error = error


def compare(
    shell: InteractiveShell, engines: CellEngines, variants: Sequence[Variant], *, silent: bool, output: str | None
) -> None:
    """Run all variants at once and stream the answers into the running cell; keep the `Comparison`.

    Raises
    ------
    MLCError
        A model cannot be loaded, or one variant failed; the others are shown all the same.
    KeyboardInterrupt
        The user stopped it; the answers hold what they said so far.
    """
    view = open_view(shell, silent=silent)
    try:
        loaded = {variant.model: engines.get(variant.model, view) for variant in variants}
    finally:
        view.finish("")
    columns = [_Column(variant) for variant in variants]
    output_of_cell = CellOutput(shell) if in_kernel(shell) and not silent else None
    with StopRequest() as stop:
        threads = [
            threading.Thread(target=column.run, args=(loaded[column.variant.model], stop), daemon=True)
            for column in columns
        ]
        for thread in threads:
            thread.start()
        try:
            _watch(threads, columns, output_of_cell)
        except BaseException:
            stop.request()
            raise
    labels = [column.variant.label for column in columns]
    bundle = _bundle(labels, [column.text for column in columns], [column.note for column in columns])
    if output_of_cell is not None:
        output_of_cell.show(bundle)
    elif not silent:
        print(bundle["text/plain"])
    keep(shell, Comparison(labels, [column.answer for column in columns]), output)
    error = next((column.error for column in columns if column.error is not None), None)
    if error is not None:
        raise error
    if stop.interrupted:
        raise KeyboardInterrupt("the answers were stopped")


def _watch(threads: Sequence[threading.Thread], columns: Sequence[_Column], output: CellOutput | None) -> None:
    """Show what has come, until all threads have ended."""
    shown: list[str] = []
    labels = [column.variant.label for column in columns]
    while any(thread.is_alive() for thread in threads):
        time.sleep(UPDATE_INTERVAL_S)
        texts = [column.text for column in columns]
        if output is not None and texts != shown:
            output.show(_bundle(labels, texts, [column.note for column in columns]))
            shown = texts


def _bundle(labels: Sequence[str], texts: Sequence[str], notes: Sequence[str]) -> dict[str, str]:
    blocks = [
        f"--- {label} ---\n{text}\n{note}".rstrip() for label, text, note in zip(labels, texts, notes, strict=True)
    ]
    head = "".join(f"<th style='{_CELL}'>{html.escape(label)}</th>" for label in labels)
    body = "".join(f"<td style='{_CELL}'>{html.escape(text)}</td>" for text in texts)
    feet = "".join(f"<td style='{_CELL}'><small>{html.escape(note)}</small></td>" for note in notes)
    table = f"<table style='width: 100%; table-layout: fixed'><tr>{head}</tr><tr>{body}</tr><tr>{feet}</tr></table>"
    return {"text/plain": "\n\n".join(blocks), "text/html": table}
