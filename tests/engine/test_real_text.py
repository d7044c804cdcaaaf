"""Text of the real model's tokens: whole characters, cut at stop strings, and in line with log probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlc_nb.engine.answer import Answer
from mlc_nb.engine.detokenizer import Detokenizer
from mlc_nb.engine.engine import MLCEngine
from mlc_nb.engine.token_bytes import TokenBytes
from mlc_nb.runtime.step import SampledToken
from mlc_nb.weights.gguf_file import GGUFFile
from mlc_nb.weights.gguf_tokenizer import load_tokenizer
from mlc_nb.weights.source import DEFAULT_MODEL, resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer

with GGUFFile.open(resolve_model(DEFAULT_MODEL, progress=False).path) as _file:
    TOKENIZER: Tokenizer = load_tokenizer(_file.metadata).tokenizer
TOKEN_BYTES = TokenBytes(TOKENIZER)
VOCAB_SIZE = TOKENIZER.get_vocab_size()
SPECIAL = {token_id for token_id, token in TOKENIZER.get_added_tokens_decoder().items() if token.special}

TEXTS = [
    "👩‍👩‍👧‍👦 and 👨🏽‍🚀, 🇫🇷🏳️‍🌈",
    "你好,世界。今日は!안녕하세요",
    "Grüße, naïve café, Ελλάδα, Привет",
    "עברית العربية हिन्दी ไทย",
    "e\u0301 a\u0308 \u200d \ufe0f",
    "\x00\x01\x7f\u2028\ufeff",
    "def f(x):\n\treturn  x  # two\r\n",
    " leading and trailing ",
    "\U0001d518\U0001d52b\U0001d526 \U0010ffff",
]


def stream(token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(TOKEN_BYTES)
    return [*[detokenizer.add_token(token_id) for token_id in token_ids], detokenizer.finalize()]


@pytest.mark.parametrize("text", TEXTS)
def test_characters_come_whole(text: str) -> None:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    segments = stream(token_ids)
    assert "".join(segments) == text
    assert not any("\ufffd" in segment for segment in segments)
    assert segments[-1] == ""


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1).filter(lambda token_id: token_id not in SPECIAL), max_size=30))
def test_any_tokens_stream_to_their_one_shot_decode(token_ids: list[int]) -> None:
    assert "".join(stream(token_ids)) == TOKENIZER.decode(token_ids)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(TEXTS), st.data())
def test_a_stop_string_cuts_at_its_first_character(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 5))]
    answer = Answer(TOKEN_BYTES, [stop])
    got, given_ids, entries = "", [], []
    for token_id in TOKENIZER.encode(text, add_special_tokens=False).ids:
        delta = answer.add_token(SampledToken(token_id, -1.0, ()))
        got += delta.text
        given_ids += delta.token_ids
        entries += delta.logprobs
        if answer.stopped:
            break
    assert answer.stopped
    assert got == text[: text.index(stop)]
    # The tokens that go out cover the text and begin within it.
    assert TOKENIZER.decode(given_ids).startswith(got)
    assert [entry.chosen.token_id for entry in entries] == given_ids
    assert all(entry.text_offset <= len(got) for entry in entries)


@pytest.fixture(scope="module")
def engine() -> Iterator[MLCEngine]:
    with MLCEngine(engine_config={"max_single_sequence_length": 1024}) as opened:
        yield opened


QUESTIONS = ["Write 'hello' in Chinese, Japanese and with emoji.", "Count to 30.", "Say naïve café 👩‍👩‍👧‍👦 ten times."]


@pytest.mark.parametrize("question", QUESTIONS)
def test_chunks_join_to_the_whole_answer_and_logprobs_to_its_text(engine: MLCEngine, question: str) -> None:
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": question}],
        "seed": 3,
        "max_tokens": 80,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = engine.chat.completions.create(**fields).choices[0]
    chunks = list(engine.chat.completions.create(stream=True, **fields))
    assert whole.message.content
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.message.content
    assert whole.logprobs is not None
    entries = whole.logprobs.content or []
    text = b"".join(bytes(entry.bytes or ()) for entry in entries).decode(errors="replace")
    assert text == whole.message.content
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in entries)
    streamed = [entry for chunk in chunks for entry in (chunk.choices[0].logprobs or whole.logprobs).content or ()]
    assert streamed == entries


def test_a_stop_string_within_a_token_of_a_real_answer(engine: MLCEngine) -> None:
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 40,
    }
    text = engine.chat.completions.create(**fields).choices[0].message.content or ""
    for stop in (text[5:8], text[12:13], text[-1]):
        stopped = engine.chat.completions.create(**fields, stop=stop).choices[0]
        chunks = list(engine.chat.completions.create(**fields, stop=[stop, "never"], stream=True))
        assert (stopped.message.content, stopped.finish_reason) == (text[: text.index(stop)], "stop")
        assert "".join(chunk.choices[0].delta.content for chunk in chunks) == text[: text.index(stop)]
