"""Conversations as something to look at and as something to keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mlc_nb.errors import MLCError
from mlc_nb.notebook.answer_format import answer_bundle
from mlc_nb.table import one_line, table_bundle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlc_nb.notebook.conversation import Conversation, Message

__all__ = ["chats_bundle", "exported", "history_bundle", "write"]

_NO_CHATS = "There is no conversation yet. %%mlc_chat begins one, with --name under a name of its own."


def chats_bundle(conversations: Sequence[Conversation]) -> dict[str, str]:
    """Return the representations of the table of conversations by MIME type."""
    if not conversations:
        return {"text/plain": _NO_CHATS}
    rows = [
        (
            chat.name,
            chat.model,
            str(len(chat.turns)),
            one_line(chat.system or "-", 40),
            one_line(chat.turns[-1].question) if chat.turns else "-",
        )
        for chat in conversations
    ]
    return table_bundle(("conversation", "model", "turns", "system prompt", "last question"), rows)


def history_bundle(conversation: Conversation) -> dict[str, str]:
    """Return the representations of a conversation by MIME type."""
    if not conversation.turns and conversation.system is None:
        return {"text/plain": f"The conversation {conversation.name} is empty."}
    return answer_bundle(_as_markdown(conversation))


def exported(conversation: Conversation, form: Literal["md", "json", "openai"]) -> str:
    """Return a conversation as text: Markdown, all that is known of it, or a body for OpenAI's API."""
    if form == "md":
        return _as_markdown(conversation)
    messages = conversation.messages()
    content: object = {"messages": messages}
    if form == "json":
        content = {"name": conversation.name, "model": conversation.model, "messages": messages}
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def write(path: str, text: str) -> None:
    """Write an export to a file.

    Raises
    ------
    MLCError
        It cannot be written.
    """
    try:
        Path(path).expanduser().write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise MLCError(f"{path} cannot be written: {error}. Choose another --file.") from None


def _as_markdown(conversation: Conversation) -> str:
    parts = [f"# {conversation.name}"]
    parts += [text for message in conversation.messages() for text in _message_as_markdown(message)]
    return "\n\n".join(parts) + "\n"


def _message_as_markdown(message: Message) -> list[str]:
    headings = {"system": "System", "user": "You", "assistant": "Assistant", "tool": "Result"}
    parts = [f"**{headings[message['role']]}**"]
    if message["content"]:
        parts.append(_closed(message["content"]))
    calls = (call["function"] for call in message.get("tool_calls", ()))
    return parts + [f"calls `{call['name']}({call['arguments']})`" for call in calls]


def _closed(text: str) -> str:
    """Close a block of code that an answer left open, so that it does not swallow what comes after it."""
    fence = ""
    for line in text.split("\n"):
        mark = line.strip()
        opening = next((kind for kind in ("```", "~~~") if mark.startswith(kind)), "")
        if not fence and opening:
            fence = opening[0] * (len(mark) - len(mark.lstrip(opening[0])))
        elif fence and mark.startswith(fence) and not mark.strip(fence[0]):
            fence = ""
    return f"{text}\n{fence}" if fence else text
