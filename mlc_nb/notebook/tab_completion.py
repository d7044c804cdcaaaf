"""Tab behind our magics: their options, and the values that an option can have here."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from IPython.core.completer import SimpleCompletion, context_matcher

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Mapping

    from IPython.core.completer import CompletionContext
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["MagicMatcher", "variables_of"]

_MAGIC_LINE = re.compile(r"\s*%{1,2}(?P<name>mlc\w*)[ \t]+(?P<rest>.*)", re.DOTALL)
_LAST_WORD = re.compile(r"[^\s=]*$")
_VARIABLES_OF_IPYTHON = ("In", "Out", "exit", "quit", "get_ipython", "open")


class MagicMatcher:
    """Completes the lines of our magics in one shell.

    Parameters
    ----------
    parsers
        Of the magics, by name.
    values
        By the ``dest`` of an option or argument, what gives its possible values.
    """

    def __init__(
        self,
        shell: InteractiveShell,
        parsers: Mapping[str, argparse.ArgumentParser],
        values: Mapping[str, Callable[[], Iterable[str]]],
    ) -> None:
        self._parsers = parsers
        self._values = values
        completer: Any = shell.Completer
        self._matchers: list[Any] = completer.custom_matchers
        # A function of its own: IPython marks it with attributes, which a bound method does not take.
        self._matcher: Any = context_matcher(identifier="mlc_nb")(lambda context: self._match(context))
        self._matchers.append(self._matcher)

    def detach(self) -> None:
        """Leave the shell as it was."""
        self._matchers.remove(self._matcher)

    def _match(self, context: CompletionContext) -> dict[str, Any]:
        line = _MAGIC_LINE.fullmatch(context.text_until_cursor)
        parser = self._parsers.get(line["name"]) if line is not None else None
        if line is None or parser is None:
            return {"completions": []}
        last = _LAST_WORD.search(line["rest"])
        fragment = last[0] if last is not None else ""
        before = line["rest"][: len(line["rest"]) - len(fragment)].replace("=", " ").split()
        found = [text for text in self._candidates(parser, before, fragment) if text.startswith(fragment)]
        return {
            "completions": [SimpleCompletion(text=text, type="param") for text in found],
            "matched_fragment": fragment,
            "suppress": bool(found),
            "ordered": True,
        }

    def _candidates(self, parser: argparse.ArgumentParser, before: list[str], fragment: str) -> Iterable[str]:
        option = parser._option_string_actions.get(before[-1]) if before else None
        if option is not None and option.nargs != 0:
            return self._values_of(option)
        options = [name for name in parser._option_string_actions if name.startswith("--")]
        if fragment.startswith("-"):
            return sorted(options)
        positional = [action for action in parser._actions if not action.option_strings]
        return [*(value for action in positional for value in self._values_of(action)), *sorted(options)]

    def _values_of(self, action: argparse.Action) -> Iterable[str]:
        if action.choices is not None:
            return list(action.choices)
        give = self._values.get(action.dest)
        return give() if give is not None else ()


def variables_of(shell: InteractiveShell) -> list[str]:
    """Return the names of variables that the user made."""
    hidden = shell.user_ns_hidden
    return [
        name
        for name in shell.user_ns
        if not name.startswith("_") and name not in hidden and name not in _VARIABLES_OF_IPYTHON
    ]
