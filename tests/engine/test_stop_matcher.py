from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlc_nb.engine.stop_matcher import StopMatcher

letters = st.text(alphabet="ab", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3)


def cut(text: str, stops: list[str]) -> str | None:
    """The reference: the match that ends first, and of those the longest."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)]
    return None


@settings(deadline=None)
@given(pieces=st.lists(letters, max_size=8), stops=stop_lists)
def test_text_is_cut_at_the_first_character_of_the_match(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen, given_out = "", ""
    for piece in pieces:
        seen += piece
        given_out += matcher.feed(piece)
        expected = cut(seen, stops)
        if expected is None:
            held = seen[len(given_out) :]
            assert seen.startswith(given_out)
            assert held == "" or any(stop.startswith(held) for stop in stops), "held back without need"
        else:
            assert matcher.stopped
            assert given_out == expected
            assert matcher.feed("more") == ""
            break
    whole = given_out + matcher.finalize()
    assert whole == (seen if not matcher.stopped else cut(seen, stops))


def test_a_stop_inside_a_piece_keeps_what_is_before_it() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("helloENDworld") == "hello"
    assert matcher.stopped
    assert matcher.finalize() == ""


def test_an_unfinished_match_is_given_out_at_the_end() -> None:
    matcher = StopMatcher(["</answer>"])
    assert matcher.feed("x </ans") == "x "
    assert matcher.finalize() == "</ans"
    assert not matcher.stopped


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
