"""Turns tokens into text as they come, in whole characters, at a constant cost a token."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlc_nb.engine.token_bytes import TokenBytes

__all__ = ["Detokenizer"]


class Detokenizer:
    """Decodes one answer.

    The segments joined are the one-shot decode of all tokens. Bytes that are no UTF-8 come out as U+FFFD, as soon as it
    is certain that no further byte can make them a character.

    Parameters
    ----------
    token_bytes
        The vocabulary.
    continues_text
        Whether the answer goes on from a text, so that a space at its beginning is a part of it. At the beginning of a
        text some tokenizers (SentencePiece) write a space that is not meant to be seen.

    Attributes
    ----------
    length
        Characters so far.
    has_partial_character
        Whether the tokens so far end in the middle of a character.
    """

    def __init__(self, token_bytes: TokenBytes, *, continues_text: bool = False) -> None:
        self._token_bytes = token_bytes
        self._continues_text = continues_text
        self.reset()

    def reset(self) -> None:
        """Begin a new text."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._segments: list[str] = []
        self._at_start = not self._continues_text
        self.has_partial_character = False
        self.last_segment = ""
        self.length = 0

    @property
    def text(self) -> str:
        """All segments so far."""
        if len(self._segments) > 1:
            self._segments = ["".join(self._segments)]
        return self._segments[0] if self._segments else ""

    def add_token(self, token_id: int) -> str:
        """Take the next token; return the text that it completes, which is `last_segment` too."""
        text = self._token_bytes.text_of(token_id)
        if text is not None and not self.has_partial_character and not self._at_start:
            return self._append(text)
        data = self._token_bytes.of(token_id)
        if self._at_start and data:
            self._at_start = False
            data = self._without_leading_space(data)
        segment = self._decoder.decode(data)
        self.has_partial_character = bool(self._decoder.getstate()[0])
        return self._append(segment)

    def finalize(self) -> str:
        """Return what is left at the end: U+FFFD for an unfinished character."""
        self.has_partial_character = False
        return self._append(self._decoder.decode(b"", final=True))

    def _append(self, segment: str) -> str:
        self.last_segment = segment
        self.length += len(segment)
        if segment:
            self._segments.append(segment)
        return segment

    def _without_leading_space(self, data: bytes) -> bytes:
        if self._token_bytes.leading_space == "drop_one":
            return data.removeprefix(b" ")
        if self._token_bytes.leading_space == "drop_all_of_first_token":
            return data.replace(b" ", b"")
        return data
