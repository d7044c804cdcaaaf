"""How the line behind a magic becomes options."""

from __future__ import annotations

import argparse
import builtins
import io
import keyword
import re
import shlex
from typing import TYPE_CHECKING, Any, NoReturn

from IPython.core.error import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["image", "not_empty", "parse_options", "parse_prompt_line", "stop_string", "tool_choice", "variable_name"]

_NAMES_OF_IPYTHON = ("In", "Out", "get_ipython")
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}


def parse_options(magic: Any, line: str) -> argparse.Namespace | None:
    """Parse ``line`` with the options declared on ``magic``; for ``--help``, print them and return None.

    Quotes group words and go away; every other character, backslash included, stands for itself. A semicolon that ends
    the line is no part of it: ``silent`` is True then.

    Raises
    ------
    UsageError
        Shown by IPython as one line: what is wrong with which option.
    """
    line, silent = _silenced(line)
    words = [word for word, _ in _words(line)]
    return _parse(magic, words, silent)


def parse_prompt_line(magic: Any, line: str) -> tuple[argparse.Namespace, str] | None:
    """Parse a line of options with a prompt behind them, which is everything from the first word that is no option's.

    The prompt may stand in quotes, which are needed where it begins with a dash or ends in a semicolon.

    Raises
    ------
    UsageError
        As `parse_options`.
    """
    line, silent = _silenced(line)
    words: list[str] = []
    takes_value = False
    prompt = ""
    for word, start in _words(line, stop_at_broken_quote=True):
        if takes_value or (word.startswith("-") and line[start] == "-" and len(word) > 1):
            words.append(word)
            takes_value = not takes_value and _takes_value(magic.parser, word)
            continue
        prompt = line[start:].strip()
        break
    options = _parse(magic, words, silent)
    if options is None:
        return None
    for quote in ('"', "'"):
        if len(prompt) > 1 and prompt[0] == prompt[-1] == quote and quote not in prompt[1:-1]:
            prompt = prompt[1:-1]
            break
    return options, prompt


def _parse(magic: Any, words: list[str], silent: bool) -> argparse.Namespace | None:
    if "--help" in words or "-h" in words:
        print(magic.parser.format_help())
        return None
    options: argparse.Namespace = magic.parser.parse_args(words)
    options.silent = silent
    return options


def _silenced(line: str) -> tuple[str, bool]:
    stripped = line.rstrip()
    return (stripped[:-1], True) if stripped.endswith(";") else (line, False)


def _words(line: str, *, stop_at_broken_quote: bool = False) -> Iterator[tuple[str, int]]:
    """Yield each word, without its quotes, and where it begins."""
    characters = io.StringIO(line)
    lexer = shlex.shlex(characters, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    lexer.escape = ""
    while True:
        # The lexer reads one character past a word, the white space behind it.
        begin = characters.tell()
        start = begin + len(line[begin:]) - len(line[begin:].lstrip())
        try:
            word = lexer.get_token()
        except ValueError:
            if not stop_at_broken_quote:
                raise UsageError(f"a quote is not closed in the options: {line}") from None
            word = line[start:]
        if word is None:
            return
        yield word, start
        if stop_at_broken_quote and start + len(word) == len(line):
            return


def _takes_value(parser: argparse.ArgumentParser, word: str) -> bool:
    if "=" in word:
        return False
    exact = parser._option_string_actions.get(word)
    near = [action for name, action in parser._option_string_actions.items() if name.startswith(word)]
    action = exact or (near[0] if near else None)
    return action is not None and action.nargs != 0


def not_empty(text: str) -> str:
    """Refuse a value that names nothing."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty")
    return text


def variable_name(text: str) -> str:
    """Check the name of a variable to assign (option ``-o``)."""
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a variable name")
    if hasattr(builtins, text) or text in _NAMES_OF_IPYTHON:
        raise argparse.ArgumentTypeError(f"{text!r} is a name of Python's or IPython's own: choose another")
    return text


def stop_string(text: str) -> str:
    r"""Read a stop string, where ``\n``, ``\t`` and ``\\`` stand for newline, tab and backslash."""
    return re.sub(r"\\[nt\\]", lambda match: _ESCAPES[match[0]], text)


def tool_choice(text: str) -> str | dict[str, Any]:
    """Read ``--tool-choice``: a word of OpenAI's, or the name of a function."""
    return text if text in ("auto", "none", "required") else {"type": "function", "function": {"name": text}}


def image(text: str) -> NoReturn:
    """Refuse an image by name."""
    raise argparse.ArgumentTypeError(
        f"{text!r} cannot be sent: the models that run here read text only. Leave the option out, and say in words "
        "what the image shows"
    )
