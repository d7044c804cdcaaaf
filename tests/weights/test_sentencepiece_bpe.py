"""SentencePiece-style tokenizers against the sentencepiece package, on models that it trains here."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import sentencepiece
from gguf.constants import TokenType
from hypothesis import given
from hypothesis import strategies as st

from mlc_nb.errors import ModelFormatError
from mlc_nb.weights.gguf_tokenizer import GGUFTokenizer, load_tokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "the cat sat on the mat and the dog sat on the log",
    "banana bandana ananas aaaa aaaaaa abababab mississippi",
    "numbers 1234 567 and (brackets) [more] {even more}  two  spaces",
    "日本語のテキスト 世界",
] * 20
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0▁")) | st.lists(
    st.sampled_from(
        ["the", " cat", "sat", "  ", " ", "aa", "ab", "banana", "ss", "ü", "界", "\n", "😀", "1", ".", "<s>x"]
    ),
    max_size=20,
).map(lambda parts: "".join(parts).replace("<s>x", "x"))


def _train(*, dummy_prefix: bool) -> tuple[sentencepiece.SentencePieceProcessor, dict[str, Any]]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        model_type="bpe",
        vocab_size=480,
        byte_fallback=True,
        add_dummy_prefix=dummy_prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return oracle, _metadata(oracle, dummy_prefix=dummy_prefix)


def _metadata(oracle: sentencepiece.SentencePieceProcessor, *, dummy_prefix: bool) -> dict[str, Any]:
    """The metadata that converters write for such a model."""

    def kind(index: int) -> TokenType:
        if oracle.is_byte(index):
            return TokenType.BYTE
        if oracle.is_unknown(index):
            return TokenType.UNKNOWN
        if oracle.is_control(index):
            return TokenType.CONTROL
        return TokenType.USER_DEFINED if oracle.id_to_piece(index) == "<tool>" else TokenType.NORMAL

    ids = range(oracle.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [oracle.id_to_piece(index) for index in ids],
        "tokenizer.ggml.scores": np.array([oracle.get_score(index) for index in ids], dtype=np.float32),
        "tokenizer.ggml.token_type": np.array([kind(index) for index in ids], dtype=np.int32),
        "tokenizer.ggml.add_space_prefix": dummy_prefix,
        "tokenizer.ggml.bos_token_id": oracle.bos_id(),
        "tokenizer.ggml.eos_token_id": oracle.eos_id(),
        "tokenizer.ggml.unknown_token_id": oracle.unk_id(),
    }


@pytest.fixture(scope="module", params=[True, False], ids=["dummy prefix", "no prefix"])
def trained(
    request: pytest.FixtureRequest,
) -> tuple[sentencepiece.SentencePieceProcessor, dict[str, Any], GGUFTokenizer]:
    oracle, metadata = _train(dummy_prefix=request.param)
    return oracle, metadata, load_tokenizer(metadata)


@given(text=TEXT)
def test_ids_and_text_agree_with_sentencepiece(trained: Any, text: str) -> None:
    oracle, _, loaded = trained
    ids = loaded.tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == oracle.encode(text)
    assert loaded.tokenizer.decode(ids) == oracle.decode(ids)
    assert loaded.tokenizer.decode(ids) == text


def test_special_and_user_defined_tokens(trained: Any) -> None:
    oracle, _, loaded = trained
    ids = loaded.tokenizer.encode("<s>the<tool></s>", add_special_tokens=False).ids
    assert ids[0] == oracle.bos_id()
    assert ids[-2:] == [oracle.piece_to_id("<tool>"), oracle.eos_id()]
    assert loaded.stop_token_ids == {oracle.eos_id()}
    assert loaded.tokenizer.decode(ids) == "the<tool>"
    assert loaded.add_bos is True


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokenizer.ggml.scores": None}, "a list of numbers under 'tokenizer.ggml.scores'; it is missing"),
        ({"tokenizer.ggml.scores": np.array([1.0])}, "has 1 entries"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "removes extra spaces"),
    ],
)
def test_bad_metadata_are_one_clear_error(trained: Any, changes: dict[str, Any], sentence: str) -> None:
    changed = {key: value for key, value in (trained[1] | changes).items() if value is not None}
    with pytest.raises(ModelFormatError, match=sentence):
        load_tokenizer(changed)


def test_a_vocabulary_without_all_bytes_is_refused(trained: Any) -> None:
    tokens = ["<other>" if token == "<0x41>" else token for token in trained[1]["tokenizer.ggml.tokens"]]
    with pytest.raises(ModelFormatError, match="no token for 1 of the 256 bytes, <0x41>"):
        load_tokenizer({**trained[1], "tokenizer.ggml.tokens": tokens})
