"""What a chat cell does: conversation, engine, stream, calls of tools, and where the answer is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlc_nb.errors import BadRequestError
from mlc_nb.notebook.answer import stream_chat, stream_completion
from mlc_nb.notebook.conversation import Turn, conversations_of
from mlc_nb.notebook.functions import Toolbox, call_text, result_text
from mlc_nb.notebook.interrupt import StopRequest
from mlc_nb.notebook.kept import keep
from mlc_nb.notebook.stream_view import open_view, show_note

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from mlc_nb.engine.engine import MLCEngine
    from mlc_nb.notebook.answer import ChatAnswer
    from mlc_nb.notebook.answer_format import AnswerFormat
    from mlc_nb.notebook.cell_engines import CellEngines
    from mlc_nb.notebook.conversation import Conversation, Message
    from mlc_nb.notebook.settings import MLCMagics
    from mlc_nb.notebook.stream_view import StreamView
    from mlc_nb.protocol.tools import ToolCall

__all__ = ["ChatCells", "Presentation", "Question"]

MAX_CALL_ROUNDS = 8
"""Times that one question may lead to calls: a model that calls for ever must end."""


@dataclass(frozen=True, slots=True)
class Presentation:
    """How an answer is shown, and the variable that it is assigned to besides ``_`` and ``Out``."""

    answer_format: AnswerFormat = "markdown"
    raw: bool = False
    silent: bool = False
    output: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """What a chat cell asks.

    Attributes
    ----------
    model
        None goes on with the model of the conversation.
    chat
        Name of the conversation; None takes that of the model.
    system
        System prompt from here on; None keeps that of the conversation.
    begins
        Whether the conversation is forgotten first.
    remembers
        Whether the conversation goes into the question and the question into the conversation.
    fields
        Further fields of `ChatCompletionRequest`.
    """

    prompt: str
    model: str | None = None
    chat: str | None = None
    system: str | None = None
    begins: bool = False
    remembers: bool = True
    fields: dict[str, Any] = field(default_factory=dict)
    toolbox: Toolbox = field(default_factory=Toolbox)


class ChatCells:
    """The chat cells of one shell, and the conversations that they go on with.

    Parameters
    ----------
    shell
        Where answers are shown and kept.
    """

    def __init__(self, shell: InteractiveShell, settings: MLCMagics, engines: CellEngines) -> None:
        self.conversations = conversations_of(shell)
        self._shell = shell
        self._settings = settings
        self._engines = engines

    def ask(self, question: Question, presentation: Presentation) -> None:
        """Ask ``question`` and stream the answer into the running cell.

        Where the model calls functions that the toolbox can run, they are run and it is asked again with the results.

        Raises
        ------
        MLCError
            The model cannot be loaded or refuses the request; the conversation is as it was.
        KeyboardInterrupt
            The user stopped it; the conversation holds what the answer said so far.
        """
        conversation = self.conversations.open(question.chat, question.model, self._settings.model)
        if question.begins:
            conversation.system, conversation.turns = None, []
        model = question.model or conversation.model
        system = next(
            (text for text in (question.system, conversation.system, self._settings.system) if text is not None), None
        )
        before: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        if question.remembers:
            before += [message for turn in conversation.turns for message in turn.messages]
        said: list[Message] = [{"role": "user", "content": question.prompt}]
        fields = dict(question.fields)
        if question.toolbox.tools:
            fields["tools"] = question.toolbox.tools
        for round_number in range(1, MAX_CALL_ROUNDS + 1):
            answer, stop = self._answer(conversation, model, {"messages": [*before, *said], **fields}, presentation)
            calls = answer.choices[0].message.tool_calls or []
            said.append(_message_of(answer, calls))
            runs = bool(calls) and not stop.requested and question.toolbox.can_run(calls)
            if not runs or round_number == MAX_CALL_ROUNDS:
                self._show_calls(calls, presentation)
                break
            said += [self._result(question.toolbox, call, presentation) for call in calls]
            fields["tool_choice"] = "auto"  # forced once; forced again, it would call for ever
        if question.remembers and (answer.text or calls):
            conversation.model, conversation.system = model, system
            conversation.turns.append(Turn(tuple(said)))
            self.conversations.keep(conversation)
        keep(self._shell, answer, presentation.output)
        _raise_where_interrupted(stop, "the answer", answer.interrupted, "; the conversation keeps what it said so far")

    def complete(self, model: str, fields: dict[str, Any], presentation: Presentation) -> None:
        """Go on from a raw prompt and stream the text into the running cell; ``fields`` are of `CompletionRequest`.

        Raises
        ------
        MLCError
            The model cannot be loaded or refuses the request.
        KeyboardInterrupt
            The user stopped it.
        """
        view = self._view(presentation)
        note = ""
        try:
            engine = self._engines.get(model, view)
            with StopRequest() as stop:
                view.begin(model, stop.request)
                answer = stream_completion(engine, fields, view, stop)
                note = answer.note()
        finally:
            view.finish(note)
        answer.shown_as(presentation.answer_format)
        keep(self._shell, answer, presentation.output)
        _raise_where_interrupted(stop, "the text", answer.interrupted)

    def _answer(
        self, conversation: Conversation, model: str, fields: dict[str, Any], presentation: Presentation
    ) -> tuple[ChatAnswer, StopRequest]:
        view = self._view(presentation)
        note = ""
        try:
            engine = self._engines.get(model, view)
            with StopRequest() as stop:
                view.begin(model, stop.request)
                answer = _stream(engine, conversation, fields, view, stop)
                note = answer.note()
        finally:
            view.finish(note)
        answer.shown_as(presentation.answer_format)
        return answer, stop

    def _view(self, presentation: Presentation) -> StreamView:
        return open_view(self._shell, presentation.answer_format, raw=presentation.raw, silent=presentation.silent)

    def _result(self, box: Toolbox, call: ToolCall, presentation: Presentation) -> Message:
        result = box.run(call)
        if not presentation.silent:
            show_note(self._shell, f"{call_text(call)} → {result_text(result)}")
        return {"role": "tool", "tool_call_id": call.id, "content": result}

    def _show_calls(self, calls: list[ToolCall], presentation: Presentation) -> None:
        for call in calls if not presentation.silent else ():
            show_note(self._shell, f"{call_text(call)} (not run)")


def _stream(
    engine: MLCEngine, conversation: Conversation, fields: dict[str, Any], view: StreamView, stop: StopRequest
) -> ChatAnswer:
    try:
        return stream_chat(engine, fields, view, stop)
    except BadRequestError as error:
        if conversation.turns and "the conversation before it" in str(error):
            raise BadRequestError(
                f"{error} `%%mlc_chat --new` begins a new conversation: this one has {len(conversation.turns)} "
                "questions and their answers."
            ) from None
        raise


def _message_of(answer: ChatAnswer, calls: list[ToolCall]) -> Message:
    message: Message = {"role": "assistant", "content": answer.choices[0].message.content}
    if calls:
        message["tool_calls"] = [call.model_dump() for call in calls]
    return message


def _raise_where_interrupted(stop: StopRequest, what: str, was_cut: bool, kept: str = "") -> None:
    # Raised, and not only shown, so that cells in line behind this one do not run either.
    if stop.interrupted:
        raise KeyboardInterrupt(f"{what} was stopped{kept}" if was_cut else f"{what} was complete already")
