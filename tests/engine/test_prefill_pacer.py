from __future__ import annotations

from mlc_nb.engine.prefill_pacer import ALONE_SECONDS, FIRST_CHUNK, UNNOTICED_SECONDS, PrefillPacer


def drive(pacer: PrefillPacer, *, num_decoding: int, token_seconds: float, decode_seconds: float, steps: int) -> float:
    seconds = 0.0
    for _ in range(steps):
        chunk = pacer.chunk_size(num_decoding)
        seconds = chunk * token_seconds + (decode_seconds if num_decoding else 0.0)
        pacer.record(chunk, num_decoding, seconds)
    return seconds


def test_it_begins_modestly_and_then_fills_a_quarter_of_a_second() -> None:
    pacer = PrefillPacer(4096, 8)
    assert pacer.chunk_size(0) == FIRST_CHUNK
    for token_seconds in (1e-2, 1e-3, 1e-4):
        last = drive(pacer, num_decoding=0, token_seconds=token_seconds, decode_seconds=0, steps=40)
        assert 0.5 * ALONE_SECONDS < last <= 1.05 * ALONE_SECONDS


def test_beside_decodes_a_step_takes_about_twice_a_decode() -> None:
    pacer = PrefillPacer(4096, 8)
    for _ in range(10):
        pacer.record(0, 4, 0.04)
    last = drive(pacer, num_decoding=4, token_seconds=1e-3, decode_seconds=0.04, steps=40)
    assert 0.06 < last < 0.1


def test_beside_quick_decodes_a_step_takes_up_to_what_nobody_notices() -> None:
    pacer = PrefillPacer(4096, 8)
    for _ in range(10):
        pacer.record(0, 1, 0.005)
    last = drive(pacer, num_decoding=1, token_seconds=1e-3, decode_seconds=0.005, steps=40)
    assert 0.04 < last <= UNNOTICED_SECONDS


def test_one_slow_step_changes_little() -> None:
    pacer = PrefillPacer(4096, 8)
    drive(pacer, num_decoding=4, token_seconds=1e-3, decode_seconds=0.04, steps=40)
    before = pacer.chunk_size(4)
    pacer.record(before, 4, 5.0)
    assert 0.7 * before < pacer.chunk_size(4) <= before


def test_it_never_goes_below_the_smallest_chunk_nor_above_the_largest() -> None:
    slow = PrefillPacer(4096, 8)
    drive(slow, num_decoding=0, token_seconds=10.0, decode_seconds=0, steps=3)
    assert slow.chunk_size(0) == 8
    fast = PrefillPacer(100, 8)
    drive(fast, num_decoding=0, token_seconds=1e-9, decode_seconds=0, steps=3)
    assert fast.chunk_size(0) == 100
    assert PrefillPacer(3, 8).chunk_size(0) == 3


def test_where_small_chunks_are_no_quicker_it_takes_no_small_chunks() -> None:
    pacer = PrefillPacer(4096, 500)
    for _ in range(10):
        pacer.record(0, 4, 0.005)
    for _ in range(20):
        chunk = pacer.chunk_size(4)
        assert chunk >= 500
        pacer.record(chunk, 4, 0.005 + 0.2 + chunk * 1e-5)
    assert pacer.chunk_size(4) == 500
