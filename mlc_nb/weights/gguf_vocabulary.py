"""The vocabulary in a GGUF file's metadata, with its arrays checked against each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from gguf.constants import Keys, TokenType

from mlc_nb.errors import ModelFormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GGUFVocabulary"]

_MAX_TOKENS = 1 << 21
_MAX_TOKEN_CHARACTERS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class GGUFVocabulary:
    """Tokens by id, and typed access to the tokenizer's other keys.

    Attributes
    ----------
    tokens
        Text of each token in the file's own writing; no two are equal and none is empty.
    types
        int64 ``[len(tokens)]`` of `gguf.TokenType` values.
    ids
        Token to id.
    """

    tokens: list[str]
    types: npt.NDArray[np.int64]
    ids: dict[str, int]
    _metadata: Mapping[str, object]

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> GGUFVocabulary:
        """Check and index the vocabulary; `ModelFormatError` says what is missing or wrong."""
        tokens = _strings(metadata, Keys.Tokenizer.LIST)
        if not 0 < len(tokens) <= _MAX_TOKENS:
            raise ModelFormatError(f"The model's vocabulary has {len(tokens)} tokens; 1 to {_MAX_TOKENS} are possible.")
        ids = {token: index for index, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            index = next(index for index, token in enumerate(tokens) if ids[token] != index)
            raise ModelFormatError(
                f"The model's vocabulary has the token {tokens[index]!r} twice, as {index} and {ids[tokens[index]]}."
            )
        if "" in ids:
            raise ModelFormatError(f"Token {ids['']} of the model's vocabulary is empty.")
        longest = max(tokens, key=len)
        if len(longest) > _MAX_TOKEN_CHARACTERS:
            raise ModelFormatError(
                f"Token {ids[longest]} of the model's vocabulary has {len(longest)} characters; "
                f"at most {_MAX_TOKEN_CHARACTERS} are accepted."
            )
        return cls(tokens, _types(metadata, len(tokens)), ids, metadata)

    def of_type(self, kind: TokenType) -> list[int]:
        """Ids of all tokens of one type, ascending."""
        ids: list[int] = np.flatnonzero(self.types == kind).tolist()
        return ids

    def text(self, key: str) -> str | None:
        """Return the string under ``key``, None without such a key."""
        value = self._metadata.get(key)
        if value is None or isinstance(value, str):
            return value
        raise _wrong_type(key, value, "a string")

    def flag(self, key: str) -> bool | None:
        """Return the truth value under ``key``, None without such a key."""
        value = self._metadata.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise _wrong_type(key, value, "a truth value")

    def token_id(self, key: str) -> int | None:
        """Return the token id under ``key``, None without such a key."""
        value = self._metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise _wrong_type(key, value, "a token id")
        if not 0 <= value < len(self.tokens):
            raise ModelFormatError(f"{key} is {value}, but token ids are 0 to {len(self.tokens) - 1}.")
        return value

    def strings(self, key: str) -> list[str]:
        """Return the list of strings under ``key``."""
        return _strings(self._metadata, key)

    def scores(self) -> npt.NDArray[np.float64]:
        """Return the score of each token, float64 ``[len(tokens)]``."""
        scores = _numbers(self._metadata, Keys.Tokenizer.SCORES, len(self.tokens)).astype(np.float64)
        if not np.isfinite(scores).all():
            raise ModelFormatError(f"{Keys.Tokenizer.SCORES} holds a value that is not finite.")
        return scores


def _types(metadata: Mapping[str, object], count: int) -> npt.NDArray[np.int64]:
    if Keys.Tokenizer.TOKEN_TYPE not in metadata:
        return np.full(count, TokenType.NORMAL, dtype=np.int64)
    return _numbers(metadata, Keys.Tokenizer.TOKEN_TYPE, count).astype(np.int64)


def _numbers(metadata: Mapping[str, object], key: str, count: int) -> npt.NDArray[np.generic]:
    value = metadata.get(key)
    if not isinstance(value, np.ndarray):
        raise _wrong_type(key, value, "a list of numbers")
    if len(value) != count:
        raise ModelFormatError(f"{key} has {len(value)} entries for a vocabulary of {count} tokens.")
    return value


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list):
        raise _wrong_type(key, value, "a list of strings")
    return value


def _wrong_type(key: str, value: object, wanted: str) -> ModelFormatError:
    found = "missing" if value is None else f"of the type {type(value).__name__}"
    return ModelFormatError(f"The model's metadata should have {wanted} under {key!r}; it is {found}.")
