"""SentencePiece-style BPE (``tokenizer.ggml.model`` = ``llama``): scores instead of merges, bytes as a last resort."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf.constants import Keys, TokenType
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from mlc_nb.errors import ModelFormatError

if TYPE_CHECKING:
    from mlc_nb.weights.gguf_vocabulary import GGUFVocabulary

__all__ = ["build_sentencepiece_bpe"]

_SPACE = "\u2581"
_MAX_PIECE_CHARACTERS = 256


def build_sentencepiece_bpe(vocabulary: GGUFVocabulary) -> Tokenizer:
    """Build the tokenizer, without its special tokens.

    Raises
    ------
    ModelFormatError
        Scores, byte tokens or the token for unknown text are missing or wrong, or the file asks for a text
        normalization that this version does not do.
    """
    if vocabulary.flag(Keys.Tokenizer.REMOVE_EXTRA_WS):
        raise ModelFormatError(
            f"The model's tokenizer removes extra spaces ({Keys.Tokenizer.REMOVE_EXTRA_WS}), which this version does "
            "not do."
        )
    unknown = vocabulary.token_id(Keys.Tokenizer.UNK_ID)
    if unknown is None:
        unknown = next(iter(vocabulary.of_type(TokenType.UNKNOWN)), None)
    if unknown is None:
        raise ModelFormatError(f"The model's tokenizer names no unknown token ({Keys.Tokenizer.UNK_ID}).")
    _check_bytes(vocabulary)
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary.ids,
            merges=_merges(vocabulary),
            unk_token=vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    plain_text: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag(Keys.Tokenizer.ADD_PREFIX) is False:
        tokenizer.normalizer = spaces
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        plain_text.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(plain_text)
    return tokenizer


def _check_bytes(vocabulary: GGUFVocabulary) -> None:
    missing = [name for name in (f"<0x{value:02X}>" for value in range(256)) if name not in vocabulary.ids]
    if missing:
        raise ModelFormatError(
            f"The model's tokenizer has no token for {len(missing)} of the 256 bytes, {missing[0]} among them, so it "
            "could not represent every text."
        )


def _merges(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """Every way to make a piece out of two others, best score first: the order in which SentencePiece joins."""
    scores, normal = vocabulary.scores(), vocabulary.of_type(TokenType.NORMAL)
    pieces = {vocabulary.tokens[index] for index in normal}
    longest = max(pieces, key=len, default="")
    if len(longest) > _MAX_PIECE_CHARACTERS:
        raise ModelFormatError(
            f"The token {vocabulary.ids[longest]} of the model's tokenizer has {len(longest)} characters; at most "
            f"{_MAX_PIECE_CHARACTERS} are accepted in this kind of tokenizer."
        )
    merges: list[tuple[str, str]] = []
    for index in sorted(normal, key=lambda index: -scores[index]):
        piece = vocabulary.tokens[index]
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        merges.extend((left, right) for left, right in halves if left in pieces and right in pieces)
    return merges
