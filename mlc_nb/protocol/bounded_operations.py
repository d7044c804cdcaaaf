"""Filters, methods and operators of templates whose result can be much larger than what they are given, bounded."""

from __future__ import annotations

import functools
import json
import re
import string
from typing import TYPE_CHECKING, Any

from jinja2 import filters, pass_environment
from jinja2.exceptions import SecurityError

from mlc_nb.protocol.template_limits import current_limits, written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from jinja2 import Environment

__all__ = ["BOUNDED_FILTERS", "charge_format", "charge_operator", "charge_text_method", "clocked"]

_MAX_NUMBER_BITS = 4096
_MAX_WIDTH = 4096
_WIDE = re.compile(r"[0-9]{5,}")

_LINEAR_METHODS = frozenset(
    {
        "capitalize",
        "casefold",
        "count",
        "endswith",
        "find",
        "index",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "isidentifier",
        "islower",
        "isnumeric",
        "isprintable",
        "isspace",
        "istitle",
        "isupper",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "rfind",
        "rindex",
        "rpartition",
        "rstrip",
        "startswith",
        "strip",
        "swapcase",
        "title",
        "upper",
    }
)


def clocked(function: Callable[..., Any], *, spreads: bool = False) -> Callable[..., Any]:
    """Look at the clock before each call of a filter or test; ``spreads`` if it makes a list of a text's characters."""

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        limits = current_limits()
        limits.look_at_clock()
        if spreads:
            limits.charge_items(sum(len(arg) for arg in args if isinstance(arg, str)))
        return function(*args, **kwargs)

    return bounded


def charge_operator(operator: str, left: Any, right: Any) -> None:
    """Charge for ``left operator right``, or refuse it."""
    limits = current_limits()
    limits.look_at_clock()
    if isinstance(left, int) and isinstance(right, int):
        _check_numbers(operator, left, right)
    elif operator == "%" and isinstance(left, str):
        if "*" in left or _WIDE.search(left):
            raise SecurityError("a width in text % values is too large or computed.")
        limits.charge_characters(len(left) + left.count("%") * (_MAX_WIDTH + len(written(right))))
    elif operator == "+":
        limits.charge_characters(limits.charge_tree(left) + limits.charge_tree(right))
    elif operator == "*":
        repeated, times = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(times, int) and not isinstance(repeated, float):
            times = max(times, 0)
            size = len(repeated) if isinstance(repeated, str) else limits.charge_tree(repeated)
            limits.charge_characters(size * times)
            if not isinstance(repeated, str):
                limits.charge_items(times * (1 + size // 4))


def _check_numbers(operator: str, left: int, right: int) -> None:
    bits = max(left.bit_length(), right.bit_length())
    if operator == "*":
        bits = left.bit_length() + right.bit_length()
    elif operator == "**" and right > 0:
        bits = max(bits, left.bit_length() * right)
    if bits > _MAX_NUMBER_BITS:
        raise SecurityError(f"numbers of more than {_MAX_NUMBER_BITS} bits are not offered.")


def charge_text_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    """Charge for ``text.name(*args)``, or refuse it."""
    limits = current_limits()
    if name in ("split", "rsplit", "splitlines"):
        separators = args[:1] if args and isinstance(args[0], str) and args[0] else (" ", "\n", "\r", "\t")
        limits.charge_items(1 + sum(text.count(separator) for separator in separators))
        limits.charge_characters(len(text))
    elif name in ("center", "ljust", "rjust", "zfill"):
        if not args or not isinstance(args[0], int) or args[0] > _MAX_WIDTH:
            raise SecurityError(f"text.{name} needs a width of at most {_MAX_WIDTH}.")
        limits.charge_characters(max(args[0], len(text)))
    elif name == "replace":
        old, new = [*args[:2], "", ""][:2]
        if isinstance(old, str) and isinstance(new, str):
            limits.charge_characters(len(text) + text.count(old) * len(new))
    elif name in _LINEAR_METHODS:
        limits.charge_characters(len(text))
    elif name != "join":
        raise SecurityError(f"text.{name} is not offered to templates.")


def charge_format(template: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Charge for ``template.format(*args, **kwargs)``, or refuse it."""
    longest = sum(len(written(value)) for value in (*args, *kwargs.values()))
    fields = 0
    for _, field, spec, _ in string.Formatter().parse(template):
        fields += field is not None
        if spec and ("{" in spec or _WIDE.search(spec)):
            raise SecurityError("a width in text.format is too large or computed.")
    current_limits().charge_characters(len(template) + fields * (longest + _MAX_WIDTH))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face's filter: JSON without HTML escapes."""
    if indent is not None and not (isinstance(indent, int) and indent <= 64):
        raise SecurityError("tojson needs an indent of at most 64 spaces.")
    limits = current_limits()
    limits.charge_tree(value)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    chunks = []
    for chunk in encoder.iterencode(value):
        limits.charge_characters(len(chunk))
        chunks.append(chunk)
    return "".join(chunks)


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(filters.make_attrgetter(environment, attribute), value)
    return joined(written(d), value)


def joined(separator: str, values: Iterable[Any]) -> str:
    """Join what a template wants joined, charged part by part."""
    parts = []
    for value in values:
        current_limits().charge_characters(len(separator))
        parts.append(written(value))
    return separator.join(parts)


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = written(s), written(old), written(new)
    charge_text_method(text, "replace", (old, new))
    return text.replace(old, new, -1 if count is None else count)


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = written(s)
    step = len(width) if isinstance(width, str) else width
    if step > _MAX_WIDTH:
        raise SecurityError(f"indent needs a width of at most {_MAX_WIDTH}.")
    current_limits().charge_characters((1 + len(text.splitlines())) * step)
    return filters.do_indent(text, width, first, blank)


_CLOCKED = (
    "abs attr capitalize count d default dictsort e escape first float forceescape int items last length lower map "
    "max min reject rejectattr safe select selectattr striptags title trim truncate upper wordcount"
)
_SPREADING = "groupby list reverse sort unique"

BOUNDED_FILTERS: dict[str, Callable[..., Any]] = {
    **{name: clocked(filters.FILTERS[name]) for name in _CLOCKED.split()},
    **{name: clocked(filters.FILTERS[name], spreads=True) for name in _SPREADING.split()},
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "string": written,
    "tojson": _tojson,
}
"""Every filter that templates may use. The rest of Jinja's can be made to fill the memory or to run for ever."""
