"""What all request objects share: strict fields, one readable error, and the refusal of what is not supported yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from mlc_nb.protocol.refusals import as_bad_request, short_repr

__all__ = [
    "MAX_INTEGER",
    "LogitBias",
    "Probability",
    "StopStrings",
    "StreamOptions",
    "StrictModel",
    "TokenCount",
    "UnicodeText",
    "as_bad_request",
    "not_supported_yet",
    "refused",
    "short_repr",
    "validate",
]

MAX_STOP_STRINGS = 16
MAX_INTEGER = 2**31
"""Of any number of tokens; no model has so many."""


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
        refusal = as_bad_request(error, model_type, fields, subject=subject)
    # Raised outside the handler: pydantic's own report of the same problems would only bury the sentence.
    raise refusal


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


def _check_unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"holds a lone surrogate at character {error.start}, which no UTF-8 text can hold") from None
    return text


UnicodeText = Annotated[str, AfterValidator(_check_unicode)]

TokenCount = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
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
    if isinstance(key, int) and not isinstance(key, bool) and 0 <= key <= MAX_INTEGER:
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
