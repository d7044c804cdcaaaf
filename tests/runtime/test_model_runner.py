"""The default model in steps of every form: the same tokens give the same bits (design, decision 5)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mlc_nb.engine.model import load_model
from mlc_nb.errors import EngineTerminatedError
from mlc_nb.protocol.engine_config import EngineConfig
from mlc_nb.runtime import model_runner
from mlc_nb.runtime.sampler import SamplingState
from mlc_nb.runtime.step import SequenceSlice

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from mlc_nb.runtime.model_runner import CpuModelRunner

LENGTH = 300
RNG = np.random.default_rng(0)
TOKEN_IDS = RNG.integers(0, 49152, LENGTH).tolist()
OTHERS = [RNG.integers(0, 49152, length).tolist() for length in (1, 40, 270)]


@contextmanager
def opened(activation_dtype: str, num_threads: int) -> Iterator[CpuModelRunner]:
    config = EngineConfig(
        activation_dtype=activation_dtype,
        num_threads=num_threads,
        max_single_sequence_length=512,
        max_total_sequence_length=2048,
    )
    runner = load_model("smollm2", config=config, progress=False).open_runner()
    try:
        yield runner
    finally:
        runner.close()


@pytest.fixture(scope="module", params=["auto", "float32"])
def activation_dtype(request: pytest.FixtureRequest) -> str:
    """The default activations, and those in float32."""
    return str(request.param)


@pytest.fixture(scope="module")
def runner(activation_dtype: str) -> Iterator[CpuModelRunner]:
    with opened(activation_dtype, 2) as runner:
        yield runner


@pytest.fixture(scope="module")
def whole(runner: CpuModelRunner) -> npt.NDArray[np.float32]:
    """Logits after every token, in one step."""
    return runner.logits_all([SequenceSlice(TOKEN_IDS, 0, table(0), None)])


def table(seed: int, first: int = 0, count: int = -(-LENGTH // 16)) -> list[int]:
    """Pages for one sequence, in random order, from a range of its own."""
    return (first + np.random.default_rng(seed).permutation(count)).tolist()


def in_chunks(runner: CpuModelRunner, size: int, pages: Sequence[int]) -> npt.NDArray[np.float32]:
    pieces = [
        runner.logits_all([SequenceSlice(TOKEN_IDS[start : start + size], start, pages, None)])
        for start in range(0, LENGTH, size)
    ]
    return np.concatenate(pieces)


@pytest.mark.parametrize("size", [1, 7, 32, 256])
def test_chunks_of_any_size_give_the_same_bits(
    runner: CpuModelRunner, whole: npt.NDArray[np.float32], size: int
) -> None:
    assert np.array_equal(in_chunks(runner, size, table(size)), whole)


def test_company_changes_nothing(runner: CpuModelRunner, whole: npt.NDArray[np.float32]) -> None:
    """The sequence is decoded and prefilled in steps that others share, on pages among theirs."""
    pages = table(3)
    others = [
        SequenceSlice(token_ids, 0, table(9, first, -(-len(token_ids) // 16)), None)
        for token_ids, first in zip(OTHERS, (20, 24, 30), strict=True)
    ]
    alone = [runner.logits([other])[0] for other in others]
    first = runner.logits([others[2], SequenceSlice(TOKEN_IDS[:259], 0, pages, None), others[0]])
    assert np.array_equal(first, [alone[2], whole[258], alone[0]])
    for position in range(259, 262):
        mixed = runner.logits([others[0], SequenceSlice([TOKEN_IDS[position]], position, pages, None), others[1]])
        assert np.array_equal(mixed, [alone[0], whole[position], alone[1]])
    rest = runner.logits_all([others[1], SequenceSlice(TOKEN_IDS[262:], 262, pages, None), others[0]])
    assert np.array_equal(rest[len(OTHERS[1]) : -1], whole[262:])


def test_a_step_that_is_too_large_for_one_call_is_cut(
    runner: CpuModelRunner, whole: npt.NDArray[np.float32], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the cut falls: within a sequence, between two, in front of a wanted row or behind it."""
    others = [SequenceSlice(ids, 0, table(9, 20 + 3 * place, 3), None) for place, ids in enumerate(OTHERS[:2])]
    alone = [runner.logits([other])[0] for other in others]
    slices = [others[1], SequenceSlice(TOKEN_IDS, 0, table(4), None), others[0]]
    for most in (37, 40, 341):
        monkeypatch.setattr(model_runner, "MAX_STEP_TOKENS", most)
        assert np.array_equal(runner.logits(slices), [alone[1], whole[-1], alone[0]])
    assert np.array_equal(runner.logits_all(slices)[40:-1], whole)


def test_the_number_of_threads_changes_nothing(activation_dtype: str, whole: npt.NDArray[np.float32]) -> None:
    with opened(activation_dtype, 1) as single:
        assert single.num_threads == 1
        assert np.array_equal(single.logits_all([SequenceSlice(TOKEN_IDS, 0, table(5), None)]), whole)
        assert np.array_equal(single.logits([SequenceSlice(TOKEN_IDS[-1:], LENGTH - 1, table(5), None)])[0], whole[-1])


def test_a_repeated_step_gives_the_same_bits(runner: CpuModelRunner, whole: npt.NDArray[np.float32]) -> None:
    for _ in range(3):
        assert np.array_equal(runner.logits([SequenceSlice(TOKEN_IDS, 0, table(1), None)])[0], whole[-1])


def test_steps_sample_where_it_is_wanted(runner: CpuModelRunner, whole: npt.NDArray[np.float32]) -> None:
    greedy = SamplingState(temperature=0.0)
    slices = [
        SequenceSlice(TOKEN_IDS[:100], 0, table(1), None),
        SequenceSlice(TOKEN_IDS[:50], 0, table(2, 20), greedy),
        SequenceSlice(TOKEN_IDS[:33], 0, table(2, 40), None),
    ]
    results = runner.step(slices)
    assert [result is None for result in results] == [True, False, True]
    assert results[1].token_id == int(whole[49].argmax())
    assert runner.step([slices[0], slices[2]]) == [None, None]


def test_more_threads_than_processors_are_allowed(whole: npt.NDArray[np.float32], activation_dtype: str) -> None:
    with opened(activation_dtype, 64) as many:
        assert np.array_equal(many.logits([SequenceSlice(TOKEN_IDS[:40], 0, table(5), None)])[0], whole[39])


def test_a_closed_runner_says_so() -> None:
    with opened("auto", 1) as runner:
        runner.close()
        runner.close()
        with pytest.raises(EngineTerminatedError, match="released; make a new engine"):
            runner.logits([SequenceSlice([1], 0, [0], None)])
