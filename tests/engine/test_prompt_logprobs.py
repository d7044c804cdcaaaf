"""Log probabilities of a prompt on the real model: chunked, cached and beside others, they are those of its logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from benchmarks.endurance import prompts_of
from mlc_nb import MLCEngine
from tests.quality.runners import load, logits_along, open_runner

if TYPE_CHECKING:
    from pathlib import Path


def test_they_are_the_log_softmax_of_the_logits(warm_model: Path) -> None:
    del warm_model
    prompt = max(prompts_of(8, 300), key=len)
    assert len(prompt) > 130, "several chunks"
    with open_runner(load("auto")) as runner:
        logits = np.concatenate(list(logits_along(runner, prompt))).astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    expected = logprobs[np.arange(len(prompt) - 1), prompt[1:]]
    with MLCEngine("smollm2") as engine:
        engine.completions.create(prompt=prompt, max_tokens=1)
        beside = engine.completions.create(prompt=[1, 2, 3], max_tokens=64, stream=True)
        choice = engine.completions.create(prompt=prompt, max_tokens=1, echo=True, logprobs=3).choices[0]
        beside.close()
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1 : len(prompt)] == pytest.approx(list(expected), abs=1e-4)
    for row, top in zip(logprobs, choice.logprobs.top_logprobs[1:], strict=False):
        assert max((top or {}).values()) == pytest.approx(row.max(), abs=1e-4)
