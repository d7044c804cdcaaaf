"""What was said so far, kept between cells in conversations that have names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from mlc_nb.errors import BadRequestError
from mlc_nb.registry import model_key
from mlc_nb.weights.source import ALIASES

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["Conversation", "Conversations", "Message", "Turn", "conversations_of"]

Message = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """A question, its answer, and in between what tools were called and what they gave.

    Attributes
    ----------
    messages
        As a chat request takes them: first the user's, last the assistant's.
    """

    messages: tuple[Message, ...]

    @property
    def question(self) -> str:
        """What the user asked."""
        return str(self.messages[0]["content"])

    @property
    def answer(self) -> str:
        """What the model answered in the end; empty where it only called tools."""
        return str(self.messages[-1]["content"] or "")


@dataclass
class Conversation:
    """Turns in order, and the system prompt that goes before them.

    A turn is added whole, after its answer: a cell that failed or was stopped before the first word leaves no trace.

    Attributes
    ----------
    model
        Whom the last turn was with.
    """

    name: str
    model: str
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def messages(self) -> list[Message]:
        """Return all that was said, the system prompt first."""
        messages: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        return messages + [message for turn in self.turns for message in turn.messages]


class Conversations:
    """The conversations of a shell by name.

    A conversation that was given none has the name of its model, which is the same by whatever name the model goes.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Conversation] = {}

    def __iter__(self) -> Any:
        return iter(list(self._by_name.values()))

    def open(self, name: str | None, model: str | None, default_model: str) -> Conversation:
        """Return a conversation, a new one (which nobody remembers yet) where there was none.

        Parameters
        ----------
        name
            None takes the one with the name of the model.
        model
            Who is asked; None goes on with the model of the conversation.
        default_model
            Who is asked where neither says.
        """
        if name is None:
            name = _name_of(model or default_model)
        return self._by_name.get(name) or Conversation(name, model or default_model)

    def keep(self, conversation: Conversation) -> None:
        """Remember a conversation under its name."""
        self._by_name[conversation.name] = conversation

    def named(self, name: str | None, default_model: str) -> Conversation:
        """Return the conversation with this name, None being the one with the default model.

        Raises
        ------
        BadRequestError
            There is none with this name.
        """
        if name is None:
            return self.open(None, None, default_model)
        found = self._by_name.get(name) or self._by_name.get(_name_of(name))
        if found is None:
            known = ", ".join(repr(name) for name in self._by_name) or "none"
            raise BadRequestError(f"There is no conversation {name!r}. Conversations: {known} (%mlc_chats lists them).")
        return found

    def forget(self, conversation: Conversation) -> None:
        """Drop a conversation with its system prompt."""
        self._by_name.pop(conversation.name, None)

    def forget_all(self) -> None:
        """Drop all conversations."""
        self._by_name.clear()


def _name_of(model: str) -> str:
    key = model_key(model)
    return next((alias for alias, target in ALIASES.items() if target == key), key)


_of_shell: WeakKeyDictionary[InteractiveShell, Conversations] = WeakKeyDictionary()


def conversations_of(shell: InteractiveShell) -> Conversations:
    """Return the conversations of a shell; they outlive the extension, which may be loaded again, and the engines."""
    return _of_shell.setdefault(shell, Conversations())
