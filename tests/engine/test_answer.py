from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from mlc_nb.engine.answer import Answer
from mlc_nb.engine.token_bytes import TokenBytes
from mlc_nb.runtime.step import SampledToken
from tests.engine.scripted import TOKENIZER, VOCAB_SIZE, encode

if TYPE_CHECKING:
    from mlc_nb.engine.stream import StreamDelta

TOKEN_BYTES = TokenBytes(TOKENIZER)


def run(token_ids: list[int], stops: tuple[str, ...]) -> tuple[list[StreamDelta], bool]:
    answer = Answer(TOKEN_BYTES, stops)
    deltas = []
    for token_id in token_ids:
        deltas.append(answer.add_token(SampledToken(token_id, -1.0, ((token_id, -1.0),))))
        if answer.stopped:
            return deltas, True
    return [*deltas, answer.finalize()], answer.stopped


@settings(deadline=None)
@given(
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30),
    st.lists(st.sampled_from(["the", " ", "e", "ox j", "\ufffd"])),
)
def test_tokens_and_logprobs_come_with_their_text(token_ids: list[int], stops: list[str]) -> None:
    deltas, stopped = run(token_ids, tuple(stops))
    text = "".join(delta.text for delta in deltas)
    given_out = [token_id for delta in deltas for token_id in delta.token_ids]
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry.chosen.token_id for entry in entries] == given_out
    assert given_out == token_ids[: len(given_out)]
    assert all(entry.text_offset <= len(text) for entry in entries)
    if stopped:
        assert not any(stop in text for stop in stops)
        assert TOKENIZER.decode(given_out).startswith(text)
    else:
        assert given_out == token_ids
        assert text == TOKENIZER.decode(token_ids)
    released, ids = "", []
    for delta in deltas[:-1]:
        released += delta.text
        ids += delta.token_ids
        assert len(TOKENIZER.decode(ids).rstrip("\ufffd")) <= len(released), "a token came before its text"


def test_a_token_that_holds_the_stop_keeps_its_first_part() -> None:
    # "stop here" is tokenized in larger pieces than "p h".
    deltas, stopped = run(encode("stop here"), ("p h",))
    assert stopped
    assert "".join(delta.text for delta in deltas) == "sto"


def test_tokens_wholly_in_the_cut_text_are_dropped() -> None:
    token_ids = encode("a") + encode("b") + encode("c")
    deltas, stopped = run(token_ids, ("bc",))
    assert stopped
    assert [token_id for delta in deltas for token_id in delta.token_ids] == token_ids[:1]


def test_text_that_begins_a_stop_is_not_lost_at_the_end() -> None:
    deltas, stopped = run(encode("a sto"), ("stop",))
    assert not stopped
    assert "".join(delta.text for delta in deltas) == "a sto"
