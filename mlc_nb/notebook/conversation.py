"""What was said so far to each model, kept between cells."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from mlc_nb.registry import model_key

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["Conversation", "Conversations", "conversations_of"]


@dataclass
class Conversation:
    """Questions and answers in order, and the system prompt that goes before them.

    A turn is added whole, after its answer: a cell that failed or was stopped before the first word leaves no trace.
    """

    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, prompt: str, system: str | None) -> list[dict[str, str]]:
        """Return the messages that ask ``prompt`` in this conversation, with ``system`` as its system prompt."""
        messages = [] if system is None else [{"role": "system", "content": system}]
        for question, answer in self.turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": prompt}]

    def add(self, prompt: str, answer: str) -> None:
        """Remember a turn."""
        self.turns.append((prompt, answer))


class Conversations:
    """One conversation a model, by whatever name the model is asked for."""

    def __init__(self) -> None:
        self._by_model: dict[str, Conversation] = {}

    def of(self, model: str) -> Conversation:
        """Return the conversation with ``model``, a new one where there was none."""
        return self._by_model.setdefault(model_key(model), Conversation())

    def reset(self, model: str | None = None) -> None:
        """Forget the conversation with ``model``, or all of them."""
        if model is None:
            self._by_model.clear()
        else:
            self._by_model.pop(model_key(model), None)


_of_shell: WeakKeyDictionary[InteractiveShell, Conversations] = WeakKeyDictionary()


def conversations_of(shell: InteractiveShell) -> Conversations:
    """Return the conversations of a shell; they outlive the extension, which may be loaded again, and the engines."""
    return _of_shell.setdefault(shell, Conversations())
