"""What all request objects share: strict fields, one readable error, and the refusal of what is not supported yet."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from mlc_nb.errors import BadRequestError

__all__ = [
    "FiniteFloat",
    "LogitBias",
    "Probability",
    "StopStrings",
    "StreamOptions",
    "StrictModel",
    "UnicodeText",
    "as_bad_request",
    "as_plain",
    "not_supported_yet",
    "refused",
    "short_repr",
    "validate",
]

MAX_STOP_STRINGS = 16


class StrictModel(BaseModel):
    """A frozen object that takes no unknown field and converts no value to another type."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


ModelT = TypeVar("ModelT", bound=BaseModel)


def validate(model_type: type[ModelT], fields: Mapping[str, Any], *, subject: str = "request") -> ModelT:
    """Build ``model_type`` from ``fields``.

    Parameters
    ----------
    subject
        What is being checked, for the message.

    Raises
    ------
    BadRequestError
        One sentence that names every bad field, what is wrong with it and what was given.
    """
    try:
        return model_type.model_validate(dict(fields))
    except ValidationError as error:
        refusal = as_bad_request(error, model_type, subject=subject)
    # Raised outside the handler: pydantic's own report of the same problems would only bury the sentence.
    raise refusal


def as_bad_request(error: ValidationError, model_type: type[BaseModel], *, subject: str) -> BadRequestError:
    """Say in one sentence what pydantic found wrong with the fields of ``model_type``."""
    problems = [_problem(dict(detail), model_type) for detail in error.errors(include_url=False)]
    return BadRequestError(f"Invalid {subject}: " + "; ".join(dict.fromkeys(problems)) + ".")


def _problem(detail: dict[str, Any], model_type: type[BaseModel]) -> str:
    place = ""
    for part in detail["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    if detail["type"] == "missing":
        return f"{place} is missing"
    if detail["type"] == "extra_forbidden":
        return _unknown_field(place, model_type if len(detail["loc"]) == 1 else None)
    message = str(detail["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    if detail["type"] == "value_error":
        return f"{place} {message}" if place else message
    return f"{place} {message}, got {short_repr(detail['input'])}"


def _unknown_field(place: str, model_type: type[BaseModel] | None) -> str:
    close = difflib.get_close_matches(place, list(model_type.model_fields), n=3) if model_type else []
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    return f"{place} is not a known field{hint}"


def short_repr(value: object) -> str:
    """Show a value and its type in a bounded number of characters; never fails."""
    limited = reprlib.Repr()
    limited.maxstring = limited.maxother = 60
    return f"{limited.repr(value)} ({type(value).__name__})"


def not_supported_yet(*neutral: object) -> BeforeValidator:
    """Let a field of the OpenAI API pass only with None or one of the ``neutral`` values, which ask for nothing."""
    allowed_values = ", ".join(repr(allowed) for allowed in (None, *neutral))
    return refused(f"is not supported yet: leave it out (only {allowed_values} can be given)", *neutral)


def refused(reason: str, *neutral: object) -> BeforeValidator:
    """Let a field pass only with None or one of the ``neutral`` values; ``reason`` completes "the field ..."."""

    def check(value: object) -> None:
        if value is None or any(type(value) is type(allowed) and value == allowed for allowed in neutral):
            return
        raise ValueError(reason)

    return BeforeValidator(check)


def as_plain(value: object) -> object:
    """Take a pydantic object, such as one of the ``openai`` package or of an earlier response, for its dict."""
    return value.model_dump() if isinstance(value, BaseModel) else value


def _check_unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"holds a lone surrogate at character {error.start}, which no UTF-8 text can hold") from None
    return text


UnicodeText = Annotated[str, AfterValidator(_check_unicode)]

FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]


def _as_stop_strings(value: object) -> object:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(text, str) for text in strings):
        raise ValueError(f"must be a string or a list of strings, got {short_repr(value)}")
    if "" in strings:
        raise ValueError("holds an empty string, which would stop every answer before its first character")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"holds {len(strings)} strings, at most {MAX_STOP_STRINGS} are possible")
    return tuple(strings)


StopStrings = Annotated[tuple[UnicodeText, ...], BeforeValidator(_as_stop_strings)]


def _as_logit_bias(value: object) -> object:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"must map token ids to numbers from -100 to 100, got {short_repr(value)}")
    return {_as_token_id(key): _as_bias(key, bias) for key, bias in value.items()}


def _as_token_id(key: object) -> int:
    # JSON has string keys only, so OpenAI clients write the ids as strings.
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 9:
        return int(key)
    if isinstance(key, int) and not isinstance(key, bool) and key >= 0:
        return key
    raise ValueError(f"has the key {short_repr(key)}, which is not a token id")


def _as_bias(key: object, bias: object) -> float:
    if isinstance(bias, int | float) and not isinstance(bias, bool) and -100 <= bias <= 100:
        return float(bias)
    raise ValueError(f"gives token {key} the bias {short_repr(bias)}, which is not a number from -100 to 100")


LogitBias = Annotated[dict[int, float], BeforeValidator(_as_logit_bias)]


class StreamOptions(StrictModel):
    """What a stream carries besides the answer.

    Attributes
    ----------
    include_usage
        Send one last chunk that has no choices but the usage of the whole request.
    """

    include_usage: bool = False
    include_obfuscation: Annotated[None, not_supported_yet(False)] = None
