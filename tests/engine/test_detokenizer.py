from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from mlc_nb.engine.detokenizer import Detokenizer
from mlc_nb.engine.token_bytes import TokenBytes
from mlc_nb.errors import ModelFormatError
from tests.engine.scripted import TOKENIZER, VOCAB_SIZE, encode

if TYPE_CHECKING:
    from pathlib import Path

FAMILY = "Grüße 👩‍👩‍👧‍👦 你好, мир! 🇫🇷\n\tend"


def pieces_tokenizer(decoder: decoders.Decoder) -> Tokenizer:
    """A vocabulary of SentencePiece pieces: 256 byte pieces and some text."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *[f"<0x{byte:02X}>" for byte in range(256)],
        "▁",
        "▁hello",
        "▁world",
        "a",
        "é",
        "▁▁",
        ".",
    ]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


SENTENCEPIECE = pieces_tokenizer(
    decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
)
METASPACE = pieces_tokenizer(decoders.Metaspace())


def stream(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(TokenBytes(tokenizer))
    segments = []
    for token_id in token_ids:
        segments.append(detokenizer.add_token(token_id))
        assert detokenizer.last_segment == segments[-1]
    segments.append(detokenizer.finalize())
    assert detokenizer.text == "".join(segments)
    assert detokenizer.length == len(detokenizer.text)
    return segments


@settings(deadline=None)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40))
def test_any_byte_level_tokens_stream_to_their_one_shot_decode(token_ids: list[int]) -> None:
    assert "".join(stream(TOKENIZER, token_ids)) == TOKENIZER.decode(token_ids)


@settings(deadline=None)
@given(st.text(max_size=40))
def test_text_comes_in_whole_characters(text: str) -> None:
    segments = stream(TOKENIZER, encode(text))
    assert "".join(segments) == text
    assert all("\ufffd" not in segment for segment in segments) or "\ufffd" in text


def byte_run(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


words = st.lists(
    st.one_of(st.integers(259, 265).map(lambda i: [i]), st.text(min_size=1, max_size=4).map(byte_run), st.just([1]))
)


@settings(deadline=None)
@given(words)
def test_sentencepiece_tokens_stream_to_their_one_shot_decode(parts: list[list[int]]) -> None:
    token_ids = [token_id for part in parts for token_id in part]
    assert "".join(stream(SENTENCEPIECE, token_ids)) == SENTENCEPIECE.decode(token_ids)


@settings(deadline=None)
@given(st.lists(st.sampled_from([1, *range(259, 266)]), max_size=12))
def test_metaspace_tokens_stream_to_their_one_shot_decode(token_ids: list[int]) -> None:
    assert "".join(stream(METASPACE, token_ids)) == METASPACE.decode(token_ids)


def test_an_unfinished_character_is_held_and_then_replaced() -> None:
    first_bytes = encode("🚀")[:2]
    assert stream(TOKENIZER, first_bytes) == ["", "", "\ufffd"]


def test_an_answer_that_continues_text_keeps_its_space() -> None:
    hello = SENTENCEPIECE.token_to_id("▁hello")
    assert Detokenizer(TokenBytes(SENTENCEPIECE), continues_text=True).add_token(hello) == " hello"
    assert Detokenizer(TokenBytes(SENTENCEPIECE)).add_token(hello) == "hello"


def test_reset_begins_anew() -> None:
    detokenizer = Detokenizer(TokenBytes(TOKENIZER))
    detokenizer.add_token(encode("🚀")[0])
    detokenizer.reset()
    assert detokenizer.add_token(encode("a")[0]) == "a"
    assert detokenizer.text == "a"


def test_ids_outside_the_vocabulary_add_nothing() -> None:
    assert stream(TOKENIZER, [VOCAB_SIZE + 5]) == ["", ""]


def test_an_unknown_decoder_is_named() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ModelFormatError, match="WordPiece"):
        TokenBytes(tokenizer)


def test_the_cost_of_a_token_does_not_grow() -> None:
    detokenizer = Detokenizer(TokenBytes(TOKENIZER))
    token_ids = encode(FAMILY * 20)

    def seconds(repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            for token_id in token_ids:
                detokenizer.add_token(token_id)
        return (time.perf_counter() - start) / repeats

    early = min(seconds(1) for _ in range(5))
    seconds(100)
    assert min(seconds(1) for _ in range(5)) < 10 * early


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_default_models_tokens(data: st.DataObject, smollm2_tokenizer: Tokenizer) -> None:
    size = smollm2_tokenizer.get_vocab_size()
    token_ids = data.draw(st.lists(st.integers(0, size - 1), max_size=60))
    assert "".join(stream(smollm2_tokenizer, token_ids)) == smollm2_tokenizer.decode(token_ids)
    text = data.draw(st.text(max_size=30))
    encoded = smollm2_tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(stream(smollm2_tokenizer, encoded)) == smollm2_tokenizer.decode(encoded)


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_path: Path) -> Tokenizer:
    from mlc_nb.weights.gguf_file import GGUFFile
    from mlc_nb.weights.gguf_tokenizer import load_tokenizer

    with GGUFFile.open(smollm2_path) as file:
        return load_tokenizer(file.metadata).tokenizer
