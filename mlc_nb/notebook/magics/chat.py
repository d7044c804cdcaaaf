"""Talking to a model: ``%%mlc_chat``, its conversations, and raw completions."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import cell_magic, line_cell_magic, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, argument_group, magic_arguments

from mlc_nb.notebook.magics.common import MagicsOfShell
from mlc_nb.notebook.option_groups import (
    format_option,
    interpolation_options,
    model_option,
    output_option,
    sampling_fields,
    sampling_options,
    system_option,
)
from mlc_nb.notebook.options import image, not_empty, parse_options, parse_prompt_line, tool_choice, variable_name

if TYPE_CHECKING:
    import argparse

    from mlc_nb.notebook.answer_format import AnswerFormat

__all__ = ["ChatMagics"]


@magics_class
class ChatMagics(MagicsOfShell):
    """Talk to a model that runs in this kernel."""

    @no_var_expand
    @magic_arguments("%mlc_chat")
    @argument_group("conversation")
    @model_option
    @argument(
        "--name",
        type=not_empty,
        metavar="CHAT",
        help="Go on with the conversation of this name. Default: one for each model",
    )
    @argument("--new", action="store_true", help="Begin the conversation anew, without its system prompt")
    @argument("--no-history", action="store_true", help="Ask this alone: nothing is sent before it, nothing remembered")
    @system_option
    @sampling_options()
    @argument_group("answer")
    @format_option
    @argument(
        "--json-schema",
        type=not_empty,
        metavar="NAME_OR_FILE",
        help="Hold the answer to this schema: a variable (dict, JSON text, pydantic model) or a .json file",
    )
    @argument(
        "--tools",
        metavar="NAME",
        help="Functions that the model may call, a variable with a function or a list: they are run, and the model "
        "answers with what they return. Tools as OpenAI writes them are shown, not run",
    )
    @argument(
        "--tool-choice", type=tool_choice, metavar="CHOICE", help="auto, none, required or the name of the one to call"
    )
    @argument("--logprobs", type=int, metavar="N", help="Keep log probabilities and N alternatives a token, 0 to 20")
    @argument("--image", type=image, metavar="FILE", help="Refused: no model here reads images yet")
    @output_option
    @argument("--raw", action="store_true", help="Print the answer alone to stdout, as plain text")
    @interpolation_options
    @cell_magic
    def mlc_chat(self, line: str, cell: str) -> None:
        """Stream the answer to the text of the cell, going on with the conversation.

        Everything below the first line is the prompt, byte for byte: braces, dollars, backslashes and space included.
        Kernel > Interrupt ends the answer; what it said so far stays in the conversation. The response object is in
        ``_`` and ``Out`` afterwards. A semicolon at the end of the first line shows nothing.

        Examples::

            %%mlc_chat --temperature 0 --max-tokens 100
            What is the capital of France?

            %%mlc_chat --name pirate --system "You are a pirate." -o answer
            And of Spain?

            %%mlc_chat --no-history -i --json-schema schema
            Extract the name and the age from: {text}
        """
        with self._state.working():
            options = parse_options(self.mlc_chat, line)
            if options is None:
                return
            variables = self._state.variables()
            prompt = self._prompt("mlc_chat", self._state.cells.prompt(cell), options, variables)
            if options.system is not None:
                options.system = _interpolated(options.system, options, variables, warns=False)
            self._ask(prompt, options, variables)

    def _ask(self, prompt: str, options: argparse.Namespace, variables: dict[str, Any]) -> None:
        from mlc_nb.notebook.chat_cell import Presentation, Question
        from mlc_nb.notebook.functions import Toolbox, toolbox

        answer_format = _format(options, self._state.settings.format)
        fields = sampling_fields(options, self._state.settings)
        if options.json_schema is not None:
            from mlc_nb.notebook.json_schema import json_schema_format

            fields["response_format"] = json_schema_format(options.json_schema, variables)
        elif options.format == "json":
            fields["response_format"] = {"type": "json_object"}
        if options.logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": options.logprobs}
        if options.tool_choice is not None:
            fields["tool_choice"] = options.tool_choice
        self._state.chats.ask(
            Question(
                prompt,
                model=options.model,
                chat=options.name,
                system=options.system,
                begins=options.new,
                remembers=not options.no_history,
                fields=fields,
                toolbox=Toolbox() if options.tools is None else toolbox(options.tools, variables),
            ),
            Presentation(answer_format, options.raw, options.silent, options.output),
        )

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @model_option
    @argument("--echo", action="store_true", help="Show the prompt in front of the text")
    @sampling_options()
    @argument_group("text")
    @argument("--format", choices=("text", "markdown", "code"), help="How the text is shown. Default: text")
    @argument("--logprobs", type=int, metavar="N", help="Keep log probabilities and N alternatives a token, 0 to 5")
    @output_option
    @argument("--raw", action="store_true", help="Print the text alone to stdout")
    @interpolation_options
    @line_cell_magic
    def mlc_complete(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> None:
        r"""Go on from a raw prompt, without a chat template: the rest of the line, or the text of the cell.

        The model sees the prompt exactly as it stands. Special tokens such as ``<|im_end|>`` are read as such. A prompt
        on the line that begins with a dash or ends in a semicolon needs quotes.

        Examples::

            %mlc_complete --max-tokens 30 Once upon a time

            %%mlc_complete --temperature 0 --stop "\n\n" -o continuation
            def fibonacci(n):
        """
        with self._state.working():
            if cell is None:
                parsed = parse_prompt_line(self.mlc_complete, line)
                if parsed is None:
                    return
                options, prompt = parsed
            else:
                cell_options = parse_options(self.mlc_complete, line)
                if cell_options is None:
                    return
                options, prompt = cell_options, self._state.cells.prompt(cell)
            variables = self._state.variables(local_ns)
            prompt = self._prompt("mlc_complete", prompt, options, variables, in_line=cell is None)
            fields = {"prompt": prompt, "echo": options.echo, **sampling_fields(options, self._state.settings)}
            if options.logprobs is not None:
                fields["logprobs"] = options.logprobs
            self._complete(fields, options)

    def _complete(self, fields: dict[str, Any], options: argparse.Namespace) -> None:
        from mlc_nb.notebook.chat_cell import Presentation

        presentation = Presentation(_format(options, "text"), options.raw, options.silent, options.output)
        self._state.chats.complete(options.model or self._state.settings.model, fields, presentation)

    @no_var_expand
    @magic_arguments()
    @line_magic
    def mlc_chats(self, line: str) -> None:
        """List the conversations: name, model, number of turns, system prompt, last question.

        Examples::

            %mlc_chats
        """
        with self._state.working():
            if parse_options(self.mlc_chats, line) is None:
                return
            from mlc_nb.notebook.history import chats_bundle

            self._state.show(chats_bundle(list(self._state.chats.conversations)))

    @no_var_expand
    @magic_arguments()
    @argument("chat", nargs="?", help="Name of a conversation or of a model. Default: the one with the default model")
    @argument("--all", action="store_true", help="All conversations")
    @line_magic
    def mlc_reset(self, line: str) -> None:
        """Forget a conversation, system prompt included.

        Examples::

            %mlc_reset
            %mlc_reset pirate
            %mlc_reset --all
        """
        with self._state.working():
            options = parse_options(self.mlc_reset, line)
            if options is None:
                return
            conversations = self._state.chats.conversations
            if options.all and options.chat is not None:
                raise UsageError("%mlc_reset takes the name of a conversation or --all, not both")
            if options.all:
                conversations.forget_all()
            else:
                conversations.forget(conversations.named(options.chat, self._state.settings.model))

    @no_var_expand
    @magic_arguments()
    @argument("chat", nargs="?", help="Name of a conversation or of a model. Default: the one with the default model")
    @argument(
        "--export",
        choices=("md", "json", "openai"),
        help="Text to keep: Markdown, all that is known as JSON, or the messages as OpenAI's API takes them",
    )
    @argument("--file", metavar="PATH", help="Write the export to this file instead of showing it")
    @argument(
        "-o",
        "--output",
        type=variable_name,
        metavar="NAME",
        help="Assign the export, or else the list of messages, to this variable",
    )
    @line_magic
    def mlc_history(self, line: str) -> None:
        """Show a conversation, or export it.

        Examples::

            %mlc_history
            %mlc_history pirate --export md --file pirate.md
            %mlc_history --export openai -o messages_json
        """
        with self._state.working():
            options = parse_options(self.mlc_history, line)
            if options is None:
                return
            self._show_history(options)

    def _show_history(self, options: argparse.Namespace) -> None:
        from mlc_nb.notebook.history import exported, history_bundle, write

        conversation = self._state.chats.conversations.named(options.chat, self._state.settings.model)
        if options.file is not None and options.export is None:
            raise UsageError("%mlc_history --file needs --export md, json or openai")
        text = None if options.export is None else exported(conversation, options.export)
        if options.output is not None:
            self._state.shell.user_ns[options.output] = conversation.messages() if text is None else text
        if options.file is not None and text is not None:
            write(options.file, text)
            print(f"wrote {options.file}")
        elif options.output is None:
            self._state.show(history_bundle(conversation) if text is None else {"text/plain": text})

    def _prompt(
        self, magic: str, prompt: str, options: argparse.Namespace, variables: dict[str, Any], *, in_line: bool = False
    ) -> str:
        if not prompt.strip():
            where = (
                "the line has no prompt behind its options"
                if in_line
                else "the cell has no prompt below its first line"
            )
            raise UsageError(f"{magic}: {where}.")
        return _interpolated(prompt, options, variables, warns=True)


def _interpolated(text: str, options: argparse.Namespace, variables: dict[str, Any], *, warns: bool) -> str:
    if not options.interpolate and not options.variables:
        return text
    from mlc_nb.notebook.interpolation import interpolate

    text, missed = interpolate(text, variables, None if options.interpolate else options.variables)
    if missed and warns:
        why = "stay as they are, there are no such variables" if options.interpolate else "are not in the prompt"
        print(f"mlc_nb: {', '.join(f'{{{name}}}' for name in missed)} {why}", file=sys.stderr)
    return text


def _format(options: argparse.Namespace, default: AnswerFormat) -> AnswerFormat:
    if options.raw and options.format is not None:
        raise UsageError("--raw and --format exclude each other: --raw prints plain text")
    if options.format is not None:
        return options.format  # type: ignore[no-any-return]  # one of the choices
    return "json" if getattr(options, "json_schema", None) is not None else default
