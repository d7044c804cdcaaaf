"""Byte-level BPE (``tokenizer.ggml.model`` = ``gpt2``): vocabulary, merges and the named pre-tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gguf.constants import Keys
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from mlc_nb.errors import ModelFormatError

if TYPE_CHECKING:
    from mlc_nb.weights.gguf_vocabulary import GGUFVocabulary

__all__ = ["build_byte_level_bpe"]


def _words(digits: str) -> str:
    """Pattern of the pieces of text that merges never cross; ``digits`` is how many digits make a piece."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
        r"|[^\r\n\p{L}\p{N}]?\p{L}+"
        rf"|\p{{N}}{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+"
        r"|\s+(?!\S)"
        r"|\s+"
    )


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """What a pre-tokenizer's name stands for; ``words`` None means GPT-2's own pattern."""

    words: str | None = None
    single_digits: bool = False
    composes: bool = False  # Unicode NFC first
    whole_words_first: bool = False  # a word that is a token needs no merges
    adds_bos: bool = False

    def split(self) -> pre_tokenizers.PreTokenizer:
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.words is None)
        steps: list[pre_tokenizers.PreTokenizer] = [to_bytes]
        if self.words is not None:
            steps.insert(0, pre_tokenizers.Split(Regex(self.words), behavior="isolated", invert=False))
        if self.single_digits:
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
        return pre_tokenizers.Sequence(steps)


_GPT2 = _PreTokenizer()
_SMOLLM = _PreTokenizer(single_digits=True)
_LLAMA3 = _PreTokenizer(words=_words("{1,3}"), whole_words_first=True, adds_bos=True)
_QWEN2 = _PreTokenizer(words=_words(""), composes=True)

_PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def build_byte_level_bpe(vocabulary: GGUFVocabulary) -> tuple[Tokenizer, bool]:
    """Build the tokenizer, without its special tokens.

    Returns
    -------
    tuple
        The tokenizer, and whether prompts begin with BOS when the file does not say.

    Raises
    ------
    ModelFormatError
        The pre-tokenizer is missing or unknown, or the merges do not fit the vocabulary.
    """
    name = vocabulary.text(Keys.Tokenizer.PRE)
    pre_tokenizer = _PRE_TOKENIZERS.get(name or "")
    if pre_tokenizer is None:
        found = "does not name its pre-tokenizer" if name is None else f"needs the pre-tokenizer {name!r}"
        raise ModelFormatError(
            f"The model {found} ({Keys.Tokenizer.PRE}); this version knows {', '.join(sorted(_PRE_TOKENIZERS))}. "
            "Another one would split text in the wrong places, so none is assumed."
        )
    tokenizer = Tokenizer(_bpe(vocabulary, ignore_merges=pre_tokenizer.whole_words_first))
    if pre_tokenizer.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer.split()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre_tokenizer.adds_bos


def _bpe(vocabulary: GGUFVocabulary, *, ignore_merges: bool) -> BPE:
    ids, tokens = vocabulary.ids, vocabulary.tokens
    merges = []
    for rank, merge in enumerate(vocabulary.strings(Keys.Tokenizer.MERGES)):
        # the first character may itself be a space in vocabularies that write spaces plainly
        middle = merge.find(" ", 1)
        left, right = merge[:middle], merge[middle + 1 :]
        if middle < 0 or not right or left not in ids or right not in ids:
            raise ModelFormatError(f"Merge {rank} of the model's tokenizer, {merge!r}, joins no two tokens.")
        if left + right not in ids:
            raise ModelFormatError(f"Merge {rank} of the model's tokenizer makes {left + right!r}, which is no token.")
        # The vocabulary's own strings: as many new ones would leave the process holes that it never fills.
        merges.append((tokens[ids[left]], tokens[ids[right]]))
    return BPE(vocab=vocabulary.ids, merges=merges, fuse_unk=False, ignore_merges=ignore_merges)
