"""What a chat cell does: conversation, engine, stream, and where the answer is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlc_nb import registry
from mlc_nb.errors import BadRequestError
from mlc_nb.notebook.answer import stream_answer
from mlc_nb.notebook.conversation import conversations_of
from mlc_nb.notebook.interrupt import StopRequest
from mlc_nb.notebook.stream_view import open_view

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from mlc_nb.engine.engine import MLCEngine
    from mlc_nb.notebook.answer import ChatAnswer
    from mlc_nb.notebook.conversation import Conversation
    from mlc_nb.notebook.stream_view import StreamView

__all__ = ["ChatCells"]


class ChatCells:
    """The chat cells of one shell, and the conversations that they go on with.

    Parameters
    ----------
    shell
        Where answers are shown and kept.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self.conversations = conversations_of(shell)
        self._shell = shell
        self._engines: dict[str, MLCEngine] = {}  # held, so that no `with` block of a cell ends them

    def load(self, model: str) -> None:
        """Load ``model`` unless it is loaded."""
        view = open_view(self._shell)
        self._engine(model, view)
        view.wait_for(f"{model} is loaded")

    def run(self, model: str, prompt: str, system: str | None, sampling: dict[str, Any], output: str | None) -> None:
        """Ask ``prompt`` and stream the answer into the running cell.

        Parameters
        ----------
        system
            System prompt from here on; None keeps that of the conversation.
        sampling
            Further fields of `ChatCompletionRequest`.
        output
            Variable that the response is assigned to, besides ``_`` and ``Out``.

        Raises
        ------
        MLCError
            The model cannot be loaded or refuses the request; the conversation is as it was.
        KeyboardInterrupt
            The user stopped it; the conversation holds what the answer said so far.
        """
        conversation = self.conversations.of(model)
        if system is None:
            system = conversation.system
        fields = {"messages": conversation.messages(prompt, system), **sampling}
        view = open_view(self._shell)
        note = ""
        try:
            engine = self._engine(model, view)
            with StopRequest() as stop:
                view.begin(model, stop.request)
                answer = self._answer(conversation, engine, fields, view, stop)
                note = answer.note()
                conversation.system = system
                if answer.text:
                    conversation.add(prompt, answer.text)
        finally:
            view.finish(note)
        self._keep(answer, output)
        if stop.interrupted:
            # Raised, and not only shown, so that cells in line behind this one do not run either.
            raise KeyboardInterrupt(
                "the answer was stopped; the conversation keeps what it said so far"
                if answer.interrupted
                else "the answer was complete already"
            )

    def _engine(self, model: str, view: StreamView) -> MLCEngine:
        if not registry.is_loaded(model):
            view.wait_for(f"loading {model} …")
        engine = self._engines[registry.model_key(model)] = registry.get_engine(model)
        return engine

    def _answer(
        self, conversation: Conversation, engine: MLCEngine, fields: dict[str, Any], view: StreamView, stop: StopRequest
    ) -> ChatAnswer:
        try:
            return stream_answer(engine, fields, view, stop)
        except BadRequestError as error:
            if conversation.turns and "the conversation before it" in str(error):
                raise BadRequestError(
                    f"{error} `%%mlc_chat --reset` begins a new conversation: this one has {len(conversation.turns)} "
                    "questions and their answers."
                ) from None
            raise

    def _keep(self, answer: object, name: str | None) -> None:
        # Returned from the magic, the answer would be displayed, and saved, a second time.
        hook: Any = self._shell.displayhook
        hook.check_for_underscore()
        hook.update_user_ns(answer)
        if name is not None:
            self._shell.user_ns[name] = answer
