"""How the line behind a magic becomes options."""

from __future__ import annotations

import argparse
import builtins
import keyword
import re
import shlex
from typing import Any

from IPython.core.error import UsageError

__all__ = ["parse_options", "stop_string", "variable_name"]

_NAMES_OF_IPYTHON = ("In", "Out", "get_ipython")
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}


def parse_options(magic: Any, line: str) -> argparse.Namespace | None:
    """Parse ``line`` with the options declared on ``magic``; for ``--help``, print them and return None.

    Quotes group words and go away; every other character, backslash included, stands for itself.

    Raises
    ------
    UsageError
        Shown by IPython as one line: what is wrong with which option.
    """
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    lexer.escape = ""
    try:
        words = list(lexer)
    except ValueError:
        raise UsageError(f"a quote is not closed in the options: {line}") from None
    if "--help" in words or "-h" in words:
        print(magic.parser.format_help())
        return None
    options: argparse.Namespace = magic.parser.parse_args(words)
    return options


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
