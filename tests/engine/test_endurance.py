"""``make endurance``, smaller: the real model under random requests, and requests together against the same alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.endurance import Soak, compare, prompts_of

if TYPE_CHECKING:
    from pathlib import Path


def test_a_soak_leaves_nothing_behind(warm_model: Path) -> None:
    del warm_model
    report = Soak(requests=100).run()
    assert report["problems"] == []
    assert sum(report["fates"].values()) == 100
    assert (report["pages_held"], report["pages_held_after_reset"]) == (0, 0)
    assert (report["requests_left_in_memory"], report["threads_left"]) == (0, [])
    assert report["cached_prompt_tokens"] > 0


# float32 is several times slower.
@pytest.mark.parametrize(("activation_dtype", "longest", "new_tokens"), [("auto", 100, 10), ("float32", 40, 8)])
def test_32_requests_together_get_the_tokens_that_each_gets_alone(
    warm_model: Path, activation_dtype: str, longest: int, new_tokens: int
) -> None:
    del warm_model
    configs = [
        {"num_threads": 1, "prefix_cache_mode": "radix", "prefill_chunk_size": 32},
        {"num_threads": 2, "prefix_cache_mode": "disable", "prefill_chunk_size": 256},
        {"num_threads": 2, "prefix_cache_mode": "radix", "prefill_chunk_size": 2048},
    ]
    assert compare(prompts_of(32, longest), new_tokens, configs, activation_dtype) == []
