"""The tokenizer of a GGUF file, rebuilt from its metadata as a `tokenizers.Tokenizer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from gguf.constants import Keys, TokenType
from tokenizers import AddedToken

from mlc_nb.errors import ModelFormatError
from mlc_nb.weights.byte_level_bpe import build_byte_level_bpe
from mlc_nb.weights.gguf_vocabulary import GGUFVocabulary
from mlc_nb.weights.sentencepiece_bpe import build_sentencepiece_bpe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenizers import Tokenizer

__all__ = ["GGUFTokenizer", "load_tokenizer"]

# How the families of models write "the answer ends here".
_END_TOKENS = frozenset(
    {
        "</s>",
        "<EOT>",
        "<end_of_turn>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|end|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|im_end|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)

_SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """A tokenizer and what its file says about how to use it.

    Attributes
    ----------
    tokenizer
        Encodes without automatic special tokens; the text of a special token in a prompt becomes that token. Bytes
        that the vocabulary has no token for are left out, as by the model's own tokenizer.
    bos_token_id, eos_token_id
        None where the file names none.
    stop_token_ids
        Ids that end an answer: end of sequence, end of turn, and the special tokens known to mean so by name.
    add_bos
        Whether a prompt begins with ``bos_token_id``; false where there is none.
    bos_token, eos_token
        Their text, for chat templates; empty where the file names none.
    chat_template
        Source of the model's own Jinja template, None for a base model.
    """

    tokenizer: Tokenizer
    bos_token_id: int | None
    eos_token_id: int | None
    stop_token_ids: frozenset[int]
    add_bos: bool
    bos_token: str
    eos_token: str
    chat_template: str | None


def load_tokenizer(metadata: Mapping[str, object]) -> GGUFTokenizer:
    """Rebuild the tokenizer from the metadata of a GGUF file.

    Parameters
    ----------
    metadata
        `GGUFFile.metadata`.

    Raises
    ------
    ModelFormatError
        The metadata are incomplete or contradict themselves, or the tokenizer model or its pre-tokenizer is one
        that this version does not know (it is named).
    """
    vocabulary = GGUFVocabulary.from_metadata(metadata)
    add_bos = vocabulary.flag(Keys.Tokenizer.ADD_BOS)
    model = vocabulary.text(Keys.Tokenizer.MODEL)
    if model == "gpt2":
        tokenizer, adds_bos_by_default = build_byte_level_bpe(vocabulary)
    elif model == "llama":
        tokenizer, adds_bos_by_default = build_sentencepiece_bpe(vocabulary), True
    else:
        raise ModelFormatError(
            f"The model's tokenizer is of the kind {model!r} ({Keys.Tokenizer.MODEL}); this version knows 'gpt2' "
            "(byte-level BPE) and 'llama' (SentencePiece)."
        )
    _add_special_tokens(tokenizer, vocabulary)
    bos, eos = vocabulary.token_id(Keys.Tokenizer.BOS_ID), vocabulary.token_id(Keys.Tokenizer.EOS_ID)
    return GGUFTokenizer(
        tokenizer=tokenizer,
        bos_token_id=bos,
        eos_token_id=eos,
        stop_token_ids=_stop_token_ids(vocabulary),
        add_bos=bos is not None and (adds_bos_by_default if add_bos is None else add_bos),
        bos_token="" if bos is None else vocabulary.tokens[bos],
        eos_token="" if eos is None else vocabulary.tokens[eos],
        chat_template=vocabulary.text(Keys.Tokenizer.CHAT_TEMPLATE),
    )


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: GGUFVocabulary) -> None:
    ids = np.flatnonzero(np.isin(vocabulary.types, (*_SPECIAL, TokenType.USER_DEFINED))).tolist()
    added = [
        AddedToken(vocabulary.tokens[index], normalized=False, special=vocabulary.types[index] in _SPECIAL)
        for index in ids
    ]
    tokenizer.add_tokens(added)
    for index in ids:
        if tokenizer.token_to_id(vocabulary.tokens[index]) != index:
            raise ModelFormatError(f"The special token {vocabulary.tokens[index]!r} cannot be given its id {index}.")


def _stop_token_ids(vocabulary: GGUFVocabulary) -> frozenset[int]:
    by_key = (vocabulary.token_id(key) for key in (Keys.Tokenizer.EOS_ID, Keys.Tokenizer.EOT_ID, Keys.Tokenizer.EOM_ID))
    special = np.flatnonzero(np.isin(vocabulary.types, (TokenType.CONTROL, TokenType.USER_DEFINED))).tolist()
    by_name = (index for index in special if vocabulary.tokens[index] in _END_TOKENS)
    return frozenset({*(index for index in by_key if index is not None), *by_name})
