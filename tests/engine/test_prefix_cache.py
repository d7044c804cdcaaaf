"""What is never computed twice, seen from outside; the tree itself is held by the state machine of the scheduler."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mlc_nb.engine.block_manager import BlockManager
from mlc_nb.engine.prefix_cache import PrefixCache
from mlc_nb.engine.sequence import Sequence
from mlc_nb.errors import MLCError
from mlc_nb.runtime.sampler import SamplingState
from tests.engine.scripted import VOCAB_SIZE, ScriptedRunner, mixed
from tests.engine.test_core import expected_ids, ids_of, make_request, wait_for

if TYPE_CHECKING:
    from mlc_nb.engine.core import EngineCore
    from mlc_nb.runtime.step import SampledToken
    from tests.engine.conftest import MakeCore

PAGE = 16
DISABLED = {"prefix_cache_mode": "disable"}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, VOCAB_SIZE) for _ in range(length)]


def ask(core: EngineCore, prompt: list[int], max_tokens: int = 5) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were found in the cache."""
    deltas = list(core.submit(make_request("ask", prompt, max_tokens)))
    usage = deltas[-1].usage
    assert usage is not None
    assert usage.extra is not None
    assert usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens
    assert usage.extra["cached_tokens"] == cached
    assert usage.extra["prefill_tokens"] == len(prompt) - cached
    assert ids_of(deltas) == expected_ids(prompt, max_tokens)
    return ids_of(deltas), cached


def test_a_prompt_that_comes_again_is_there_but_for_its_last_page(make_core: MakeCore) -> None:
    runners: list[ScriptedRunner] = []
    core = make_core(runners=runners)
    prompt = prompt_of(100)
    assert ask(core, prompt)[1] == 0
    runners[0].steps.clear()
    assert ask(core, prompt)[1] == 96
    assert runners[0].steps[0] == [4]
    assert ask(core, prompt[:96])[1] == 80, "one token is left to compute, and pages are shared whole"
    assert ask(core, prompt[:97])[1] == 96
    metrics = core.metrics()
    assert (metrics.prompt_tokens, metrics.cached_prompt_tokens) == (393, 272)
    assert metrics.free_pages == metrics.total_pages
    assert metrics.prefix_cache_pages == 6


def test_the_next_turn_computes_only_what_is_new(make_core: MakeCore) -> None:
    core = make_core()
    history = prompt_of(40)
    known = 0
    for turn in range(4):
        answer, cached = ask(core, history, 30)
        assert cached == known // PAGE * PAGE
        known = len(history) + 29  # the last token of an answer has never been through the model
        history = history + answer + prompt_of(7, seed=turn + 1)


def test_requests_that_come_together_compute_their_common_beginning_once(make_core: MakeCore) -> None:
    core = make_core(mixed, {"max_num_sequence": 8}, num_pages=128)
    system = prompt_of(90)
    prompts = [system + prompt_of(20, seed=i + 1) for i in range(8)]
    streams = [core.submit(make_request(str(i), prompt, 10)) for i, prompt in enumerate(prompts)]
    for prompt, stream in zip(prompts, streams, strict=True):
        assert ids_of(list(stream)) == expected_ids(prompt, 10)
    assert core.metrics().prefill_tokens == 90 + 8 * 20 + 7 * (90 % PAGE)
    assert core.metrics().cached_prompt_tokens == 7 * 80


@pytest.mark.parametrize("config", [{}, DISABLED])
def test_several_answers_compute_their_prompt_once(make_core: MakeCore, config: dict[str, object]) -> None:
    core = make_core(mixed, {"max_num_sequence": 8, **config})
    request = make_request("many", prompt_of(100), 20)
    more = tuple(SamplingState(temperature=1.0, seed=seed) for seed in range(3))
    deltas = list(core.submit(replace(request, more_choices=more)))
    for index in range(4):
        pieces = [delta for delta in deltas if delta.index == index]
        assert ids_of(pieces) == expected_ids(prompt_of(100), 20)
        assert [delta.finish_reason for delta in pieces if delta.finish_reason] == ["length"]
    assert [delta.usage is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    usage = deltas[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (100, 80, 180)
    metrics = core.metrics()
    assert metrics.prefill_tokens == 100 + 3 * 4
    assert (metrics.finished_requests, metrics.free_pages) == (1, metrics.total_pages)
    assert (metrics.prefix_cache_pages == 0) == (config == DISABLED)


def test_it_can_be_turned_off(make_core: MakeCore) -> None:
    for config in (DISABLED, {"prefix_cache_max_num_recycling_seqs": 0}):
        core = make_core(mixed, config)
        assert [ask(core, prompt_of(100))[1] for _ in range(2)] == [0, 0]
        assert core.metrics().prefix_cache_pages == 0


def test_reset_empties_it(make_core: MakeCore) -> None:
    core = make_core()
    ask(core, prompt_of(100))
    core.reset()
    assert core.metrics().prefix_cache_pages == 0
    assert ask(core, prompt_of(100))[1] == 0


def test_it_gives_way_before_anything_is_preempted_or_waits(make_core: MakeCore) -> None:
    core = make_core(num_pages=16)
    for seed in range(10):
        ask(core, prompt_of(100, seed), 20)
    assert core.metrics().prefix_cache_pages == 15
    streams = [core.submit(make_request(str(i), prompt_of(20, 50 + i), 40)) for i in range(4)]
    for stream in streams:
        list(stream)
    assert core.metrics().preemptions == 0


def test_what_was_used_last_is_kept_longest(make_core: MakeCore) -> None:
    core = make_core(num_pages=32)
    old, used, new = prompt_of(100, 1), prompt_of(100, 2), prompt_of(360, 3)
    ask(core, used)
    ask(core, old)
    assert ask(core, used)[1] == 96
    ask(core, new)
    assert ask(core, used)[1] == 96
    assert ask(core, old)[1] < 96


def test_a_limit_of_ended_sequences(make_core: MakeCore) -> None:
    core = make_core(mixed, {"prefix_cache_max_num_recycling_seqs": 2})
    for seed in range(3):
        ask(core, prompt_of(100, seed))
    assert [ask(core, prompt_of(100, seed))[1] for seed in (2, 1)] == [96, 96]
    assert ask(core, prompt_of(100, 0))[1] == 0


class FailsAt(SamplingState):
    """Fails at its third token."""

    def __init__(self) -> None:
        super().__init__(temperature=0.0)
        self.count = 0

    def sample(self, logits: np.ndarray) -> SampledToken:
        self.count += 1
        if self.count == 3:
            logits = np.full_like(logits, np.nan)
        return super().sample(logits)


def test_a_row_that_cannot_be_sampled_fails_alone_and_leaves_nothing_behind(make_core: MakeCore) -> None:
    core = make_core(step_seconds=0.002)
    prompt = prompt_of(100)
    good = core.submit(make_request("good", prompt_of(50, 1), 30))
    bad = core.submit(replace(make_request("bad", prompt, 30), sampling=FailsAt()))
    with pytest.raises(MLCError, match=r"bad failed.*not finite"):
        list(bad)
    assert ids_of(list(good)) == expected_ids(prompt_of(50, 1), 30)
    assert (core.state, core.metrics().failed_requests) == ("ready", 1)
    assert core.metrics().free_pages == core.metrics().total_pages
    assert ask(core, prompt)[1] == 0


def test_an_answer_that_fails_takes_the_others_of_its_request_along(make_core: MakeCore) -> None:
    core = make_core(step_seconds=0.002)
    request = replace(
        make_request("group", prompt_of(40), 30), more_choices=(SamplingState(temperature=0.0), FailsAt())
    )
    with pytest.raises(MLCError, match="group failed"):
        list(core.submit(request))
    assert core.metrics().free_pages == core.metrics().total_pages
    assert core.metrics().running_requests == core.metrics().waiting_requests == 0


def test_aborting_a_request_ends_all_its_answers(make_core: MakeCore) -> None:
    core = make_core(mixed, {"max_num_sequence": 2}, step_seconds=0.002)
    more = tuple(SamplingState(temperature=0.0) for _ in range(4))
    stream = core.submit(replace(make_request("group", prompt_of(40), None), more_choices=more))
    next(stream)
    stream.close()
    wait_for(lambda: core.metrics().running_requests + core.metrics().waiting_requests == 0)
    assert (core.metrics().aborted_requests, core.metrics().free_pages) == (1, core.metrics().total_pages)


def test_matching_never_leaves_the_sharing() -> None:
    blocks = BlockManager(8, 4)
    cache = PrefixCache(blocks)
    tokens = list(range(9))
    one = Sequence("one", tokens, SamplingState(), "here")
    assert blocks.grow(one.pages, 9)
    one.num_computed = 9
    cache.insert(one)
    assert len(cache.match(Sequence("two", tokens, SamplingState(), "here"))) == 2
    assert cache.match(Sequence("three", tokens, SamplingState(), "there")) == []
    assert cache.match(Sequence("four", tokens, SamplingState())) == []
