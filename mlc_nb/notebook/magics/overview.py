"""``%mlc``: every magic in one place, for those who know none of them yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic import line_magic, magics_class, no_var_expand

from mlc_nb.notebook.magics.common import MagicsOfShell

if TYPE_CHECKING:
    from collections.abc import Iterable

    from IPython.core.magic import Magics

__all__ = ["OverviewMagics", "overview"]

_HEAD = """Run language models inside this kernel.

Each magic explains its options, with examples, behind a question mark: %%mlc_chat?"""

_PYTHON = """
In Python:

  mlc_nb.MLCEngine(), mlc_nb.AsyncMLCEngine()   OpenAI's API: engine.chat.completions.create(...)
  await mlc_nb.batch(prompts)                   many prompts at once, answers in order
  response.show_logprobs()                      an answer of `%%mlc_chat --logprobs 5`, coloured by probability
  mlc_nb.engines(), mlc_nb.unload()             what is loaded, and how to let go of it

Tab completes options, models and names of conversations behind a magic. %config MLCMagics shows its settings."""


def overview(groups: Iterable[type[Magics]]) -> str:
    """Return a line for each magic, taken from its own help."""
    lines = [_HEAD, ""]
    for group in groups:
        lines.append(f"{(group.__doc__ or '').strip()}\n")
        for name, magic in vars(group).items():
            signs = [sign for kind, sign in (("line", "%"), ("cell", "%%")) if name in group.magics[kind]]
            if signs:
                lines.append(f"  {', '.join(sign + name for sign in signs):<32}{_first_sentence(magic)}")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n" + _PYTHON


def _first_sentence(magic: object) -> str:
    parser = getattr(magic, "parser", None)
    text = (parser.description if parser is not None else magic.__doc__) or ""
    return text.strip().splitlines()[0]


@magics_class
class OverviewMagics(MagicsOfShell):
    """Find your way."""

    @no_var_expand
    @line_magic
    def mlc(self, line: str) -> None:
        """Show every magic of mlc_nb."""
        del line
        print(type(self).mlc.__doc__)
