"""From text to token ids, bounded: a text that cannot fit is refused unread, and a long one can be interrupted."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from mlc_nb.engine.stream import WAIT_SECONDS
from mlc_nb.errors import BadRequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["LONG_TEXT", "encode_text"]

LONG_TEXT = 1 << 15
"""Characters; a text of this length is encoded within about 20 ms."""

# Normal forms can make one character of several, NFKC of up to 18 of them; hardly any text comes near a mean of 4.
_NORMALIZED = 4


def encode_text(tokenizer: Tokenizer, text: str, *, max_tokens: int) -> list[int]:
    """Encode text without automatic special tokens.

    Parameters
    ----------
    max_tokens
        How many tokens can be used at all. A text that is certain to have more is refused before it is encoded.

    Raises
    ------
    BadRequestError
        The text cannot have so few tokens, or is no Unicode text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20) : error.start]
        raise BadRequestError(
            f"Invalid request: the prompt holds a lone surrogate, which no UTF-8 text can hold, after {around!r}: look "
            "in names, tools and calls."
        ) from None
    if len(text) < LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=False).ids
    longest = max(map(len, tokenizer.get_vocab())) * (1 if tokenizer.normalizer is None else _NORMALIZED)
    if len(text) > max_tokens * longest:
        raise BadRequestError(
            f"The prompt has {len(text)} characters, which are more than {len(text) // longest} tokens, but prompt and "
            f"answer together can have at most {max_tokens}: shorten the prompt, or the conversation before it."
        )
    return _encode_interruptibly(tokenizer, text)


def _encode_interruptibly(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode on another thread: Python handles signals only between native calls, and this one may last seconds."""
    ids: list[int] = []
    failures: list[Exception] = []

    def encode() -> None:
        try:
            # Unlike encode, this lets other threads run.
            ids.extend(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=encode, name="mlc_nb encoder", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(WAIT_SECONDS)
    if failures:
        raise failures[0]
    return ids
