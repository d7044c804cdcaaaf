from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mlc_nb.errors import MLCError
from mlc_nb.runtime.sampler import FloatArray, SamplingState

VOCAB = 1000

logit_arrays = arrays(np.float32, st.integers(1, 50), elements=st.floats(-50, 50, width=32))


def logits_of(seed: int = 0, spread: float = 3.0) -> FloatArray:
    return (np.random.default_rng(seed).standard_normal(VOCAB) * spread).astype(np.float32)


def draw(state: SamplingState, logits: FloatArray, count: int) -> list[int]:
    return [state.sample(logits).token_id for _ in range(count)]


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = np.array([0, 5, 1, 5], dtype=np.float32)
    assert SamplingState(temperature=0.0).sample(logits).token_id == 1
    assert SamplingState(temperature=1e-9).sample(logits).token_id == 1


def test_a_seed_gives_the_same_tokens_alone_and_among_others() -> None:
    logits = logits_of()
    alone = draw(SamplingState(seed=7), logits, 50)
    first, second = SamplingState(seed=7), SamplingState(seed=8)
    together = [(first.sample(logits).token_id, second.sample(logits).token_id) for _ in range(50)]
    assert [token for token, _ in together] == alone
    assert [token for _, token in together] != alone
    assert draw(SamplingState(seed=-1), logits, 5) != draw(SamplingState(seed=1), logits, 5)
    assert draw(SamplingState(), logits, 20) != draw(SamplingState(), logits, 20)


def test_the_frequencies_are_those_of_the_softmax() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    for temperature in (0.5, 1.0, 2.0):
        weights = np.exp(logits / temperature)
        expected = weights / weights.sum()
        counts = np.bincount(draw(SamplingState(seed=3, temperature=temperature), logits, 20_000), minlength=4)
        np.testing.assert_allclose(counts / 20_000, expected, atol=0.015)


@settings(deadline=None)
@given(logit_arrays, st.floats(0.01, 1.0), st.integers(0, 60), st.floats(0.0, 1.0), st.floats(0.1, 5.0))
def test_filters_keep_what_a_plain_sort_keeps(
    logits: FloatArray, top_p: float, top_k: int, min_p: float, temperature: float
) -> None:
    weights = np.exp((logits - logits.max()) / np.float32(temperature))
    order = sorted(range(logits.size), key=lambda i: (-weights[i], i))[: top_k or None]
    total = sum(float(weights[i]) for i in order)
    kept, mass = [], 0.0
    for i in order:
        kept.append(i)
        mass += float(weights[i])
        if mass >= top_p * total * (1 - 1e-9):
            break
    allowed = {i for i in kept if weights[i] >= np.float32(min_p)}
    # Rounding may put the edge one token further on.
    edge = set(order[: len(kept) + 1]) if top_p < 1.0 else set()
    state = SamplingState(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=0)
    assert set(draw(state, logits, 30)) <= allowed | edge


def test_top_p_on_a_flat_distribution_grows_its_candidates() -> None:
    flat = np.zeros(20_000, dtype=np.float32)
    tokens = draw(SamplingState(top_p=0.9, seed=1), flat, 300)
    assert 10_000 < max(tokens) < 18_001
    assert draw(SamplingState(top_p=0.0, seed=1), logits_of(), 5) == [int(logits_of().argmax())] * 5
    assert draw(SamplingState(top_k=1, seed=1), logits_of(), 5) == [int(logits_of().argmax())] * 5


def test_penalties_count_generated_tokens() -> None:
    logits = np.array([3.0, 2.5, -1.0], dtype=np.float32)
    assert draw(SamplingState(temperature=0.0, presence_penalty=1.0), logits, 4) == [0, 1, 0, 0]
    assert draw(SamplingState(temperature=0.0, frequency_penalty=0.4), logits, 5) == [0, 0, 1, 0, 1]
    assert draw(SamplingState(temperature=0.0, repetition_penalty=1.5), logits, 3) == [0, 1, 0]
    negative = np.array([-1.0, -1.5], dtype=np.float32)
    assert draw(SamplingState(temperature=0.0, repetition_penalty=2.0), negative, 2) == [0, 1]
    assert logits.tolist() == [3.0, 2.5, -1.0]


def test_logit_bias_moves_the_choice_but_not_the_logprobs() -> None:
    logits = logits_of()
    banned = int(logits.argmax())
    state = SamplingState(temperature=0.0, logit_bias={banned: -100, 5: 100}, logprobs=True, top_logprobs=2)
    token = state.sample(logits)
    assert token.token_id == 5
    reference = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert token.logprob == pytest.approx(reference[5], abs=1e-4)
    assert [i for i, _ in token.top_logprobs] == np.argsort(-logits)[:2].tolist()
    np.testing.assert_allclose([p for _, p in token.top_logprobs], np.sort(reference)[::-1][:2], atol=1e-4)


def test_logprobs_only_where_asked_for() -> None:
    logits = logits_of()
    assert SamplingState(temperature=0.0).sample(logits).logprob is None
    plain = SamplingState(temperature=0.0, logprobs=True).sample(logits)
    assert plain.logprob is not None
    assert plain.top_logprobs == ()
    assert len(SamplingState(logprobs=True, top_logprobs=20).sample(logits[:4]).top_logprobs) == 4


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_an_error(bad: float) -> None:
    logits = logits_of()
    logits[3] = bad
    with pytest.raises(MLCError, match="not finite"):
        SamplingState().sample(logits)
    with pytest.raises(MLCError, match="not finite"):
        SamplingState().sample(np.full(4, -np.inf, dtype=np.float32))


def test_extreme_settings_stay_in_the_vocabulary() -> None:
    logits = np.array([1e30, -1e30, 0, -np.inf], dtype=np.float32)
    assert draw(SamplingState(temperature=2e-5, seed=0), logits, 3) == [0, 0, 0]
    flat = draw(SamplingState(temperature=1e30, seed=0), np.array([1, 2, -np.inf], dtype=np.float32), 200)
    assert set(flat) == {0, 1}


class OnlySome:
    """Allows some ids, each once."""

    def __init__(self, *ids: int) -> None:
        self.left = set(ids)

    @property
    def is_finished(self) -> bool:
        return not self.left

    def allowed(self) -> npt.NDArray[np.bool_]:
        if not self.left:
            raise MLCError("nothing is left")
        mask = np.zeros(VOCAB, dtype=np.bool_)
        mask[list(self.left)] = True
        return mask

    def accept(self, token_id: int) -> None:
        self.left.remove(token_id)


@pytest.mark.parametrize(
    "settings_",
    [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.1}, {"min_p": 0.5}, {"logit_bias": {5: 100.0}}],
    ids=str,
)
def test_a_constraint_leaves_only_what_it_allows(settings_: dict[str, Any]) -> None:
    ids = (3, 400, 999)
    state = SamplingState(seed=1, logprobs=True, top_logprobs=1, constraint=OnlySome(*ids), **settings_)
    logits = logits_of()
    before = logits.copy()
    tokens = [state.sample(logits) for _ in ids]
    assert {token.token_id for token in tokens} == set(ids)
    assert (logits == before).all()
    # Of the model's own distribution, which knows nothing of the constraint.
    log_softmax = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    assert tokens[0].top_logprobs[0][0] == int(np.argmax(logits))
    assert tokens[0].logprob == pytest.approx(log_softmax[tokens[0].token_id], abs=1e-4)
    with pytest.raises(MLCError, match="nothing is left"):
        state.sample(logits)
