"""How a refusal shows what was given, and how pydantic's report of bad fields becomes one sentence."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from mlc_nb.errors import BadRequestError

__all__ = ["as_bad_request", "as_plain", "short_repr", "shortened"]

MAX_SHOWN = 120
MAX_SHOWN_BITS = 256


class _ShortRepr(reprlib.Repr):
    """Shows any value in a bounded number of characters."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 60

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write numbers of thousands of digits.
        return super().repr_int(x, level) if x.bit_length() <= MAX_SHOWN_BITS else f"<number of {x.bit_length()} bits>"


def short_repr(value: object) -> str:
    """Show a value and its type in a bounded number of characters; never fails."""
    return f"{_ShortRepr().repr(value)} ({type(value).__name__})"


def shortened(text: str) -> str:
    """Leave out the middle of a text, such as a name that is to be shown, where it is long."""
    half = MAX_SHOWN // 2
    return text if len(text) <= MAX_SHOWN else f"{text[:half]}...{text[-half:]}"


def as_plain(value: object) -> object:
    """Take a pydantic object, such as one of the ``openai`` package or of an earlier response, for its dict."""
    return value.model_dump() if isinstance(value, BaseModel) else value


def as_bad_request(
    error: ValidationError, model_type: type[BaseModel], fields: Mapping[str, Any], *, subject: str
) -> BadRequestError:
    """Say in one sentence what pydantic found wrong with the ``fields`` that were given for ``model_type``."""
    problems = [_problem(dict(detail), model_type, fields) for detail in error.errors(include_url=False)]
    sentences = [problem.sentence for problem in _without_alternatives(problems)]
    return BadRequestError(f"Invalid {subject}: " + "; ".join(dict.fromkeys(sentences)) + ".")


@dataclass(frozen=True, slots=True)
class _Problem:
    """What is wrong at one place; ``union`` is the place of the field of several types that it was an attempt for."""

    place: str
    reason: str
    given: str = ""
    union: str | None = None
    is_own: bool = False

    @property
    def sentence(self) -> str:
        return f"{self.place} {self.reason}{self.given}".lstrip()


def _problem(detail: dict[str, Any], model_type: type[BaseModel], fields: Mapping[str, Any]) -> _Problem:
    kind = detail["type"]
    place, union = _place(detail["loc"], fields, names_absent=kind in ("missing", "extra_forbidden"))
    if kind == "missing":
        return _Problem(place, "is missing", union=union)
    if kind == "extra_forbidden":
        return _Problem(place, _unknown_field(place, model_type if len(detail["loc"]) == 1 else None), union=union)
    message = str(detail["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    if kind == "value_error":
        return _Problem(place, message, union=union, is_own=True)
    return _Problem(place, message, f", got {short_repr(detail['input'])}", union)


def _place(loc: tuple[int | str, ...], fields: Mapping[str, Any], *, names_absent: bool) -> tuple[str, str | None]:
    """Write where a problem is, and where the last type of several is that was tried for it.

    Pydantic puts its own names of types into the path. They are the parts that what was given does not have.
    """
    place, union = "", None
    value: object = fields
    for index, part in enumerate(loc):
        value = as_plain(value)
        in_mapping = isinstance(value, Mapping) and part in value
        in_list = isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)
        is_name = in_mapping or in_list or index == 0 or (names_absent and index == len(loc) - 1)
        if part == "[key]" and not in_mapping:
            place += " (the key)"
        elif not is_name:
            union = place
        else:
            shown = shortened(str(part))
            place += f"[{shown}]" if isinstance(part, int) else f".{shown}" if place else shown
        if in_mapping or in_list:
            value = value[part]  # type: ignore[index]  # it is in there
    return place, union


def _without_alternatives(problems: list[_Problem]) -> list[_Problem]:
    """Make one problem of those that a field of several types has with each of them."""
    merged: list[_Problem] = []
    for problem in problems:
        if problem.union is None:
            merged.append(problem)
            continue
        if any(earlier.union == problem.union for earlier in merged):
            continue
        attempts = [attempt for attempt in problems if attempt.union == problem.union]
        # The type that it was meant for went deeper, or passed as far as our own check.
        meant = [attempt for attempt in attempts if attempt.is_own or attempt.place != problem.union]
        if meant:
            merged += meant
        else:
            reasons = [attempt.reason.removeprefix("should be ") for attempt in attempts]
            merged.append(_Problem(problem.place, f"should be {' or '.join(reasons)}", problem.given, problem.union))
    return merged


def _unknown_field(place: str, model_type: type[BaseModel] | None) -> str:
    close = difflib.get_close_matches(place, list(model_type.model_fields), n=3) if model_type else []
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    return f"is not a known field{hint}"
