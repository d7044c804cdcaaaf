"""The bytes that each token of a vocabulary stands for, read off the tokenizer's own decoder."""

from __future__ import annotations

import copy
import functools
import json
import re
from typing import TYPE_CHECKING, Any, Literal

from mlc_nb.errors import ModelFormatError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers import Tokenizer

__all__ = ["LeadingSpace", "TokenBytes"]

LeadingSpace = Literal["keep", "drop_one", "drop_all_of_first_token"]

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CHARACTER_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class TokenBytes:
    """Maps token ids to UTF-8 bytes; special tokens and ids that the tokenizer does not know stand for none.

    Two families of decoders are known: byte-level (GPT-2's map of bytes to characters) and pieces with a space mark and
    ``<0xAB>`` byte pieces (SentencePiece).

    Raises
    ------
    ModelFormatError
        The tokenizer's decoder is of another family.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        steps = _decoder_steps(tokenizer)
        self.leading_space = _leading_space(steps)
        self._piece_to_bytes = _piece_decoder(steps)
        self._cache: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}

    def showing(self, token_ids: frozenset[int]) -> TokenBytes:
        """Return the same vocabulary, in which these special tokens show in the text."""
        if not token_ids & self._special:
            return self
        view = copy.copy(self)
        view._special, view._cache, view._texts = self._special - token_ids, {}, {}
        return view

    def of(self, token_id: int) -> bytes:
        """Return what the token adds to the text."""
        known = self._cache.get(token_id)
        if known is None:
            known = b"" if token_id in self._special else self.of_any(token_id)
            self._cache[token_id] = known
        return known

    def text_of(self, token_id: int) -> str | None:
        """Return the token's text where it is whole characters, None where its bytes are a part of some."""
        try:
            return self._texts[token_id]
        except KeyError:
            pass
        try:
            text: str | None = self.of(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self._texts[token_id] = text
        return text

    def of_any(self, token_id: int) -> bytes:
        """Return the token's bytes even where it is a special one, which no text shows."""
        piece = self._tokenizer.id_to_token(token_id)
        return b"" if piece is None else self._piece_to_bytes(piece)


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    decoder = tokenizer.decoder
    state: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps


def _piece_decoder(steps: list[dict[str, Any]]) -> Callable[[str], bytes]:
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        return _byte_level_bytes
    unknown = set(kinds) - _CHARACTER_DECODERS
    if unknown:
        raise ModelFormatError(
            f"The tokenizer decodes with {', '.join(sorted(unknown))}, which cannot be streamed yet; byte-level and "
            "SentencePiece tokenizers can."
        )
    replacements = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
    replacements += [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    has_byte_pieces = "ByteFallback" in kinds

    def piece_to_bytes(piece: str) -> bytes:
        byte = _BYTE_PIECE.fullmatch(piece) if has_byte_pieces else None
        if byte:
            return bytes.fromhex(byte[1])
        for mark, text in replacements:
            piece = piece.replace(mark, text)
        return piece.encode()

    return piece_to_bytes


def _leading_space(steps: list[dict[str, Any]]) -> LeadingSpace:
    for step in steps:
        if step["type"] == "Strip" and step["content"] == " " and step["start"] == 1:
            return "drop_one"
        if step["type"] == "Metaspace" and step["prepend_scheme"] != "never":
            return "drop_all_of_first_token"
    return "keep"


def _byte_level_bytes(piece: str) -> bytes:
    table = _byte_level_table()
    if all(character in table for character in piece):
        return bytes(table[character] for character in piece)
    return piece.encode()  # an added token, which is written as it is


@functools.cache
def _byte_level_table() -> dict[str, int]:
    """GPT-2's map: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table
