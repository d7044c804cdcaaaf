"""The float32 path against what transformers computed in float32 from the same weights (shared/golden)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mlc_nb import EngineConfig, MLCEngine
from mlc_nb.runtime.step import SequenceSlice
from tests.quality.runners import MODEL, load, logits_along, open_runner

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from mlc_nb.runtime.step import ModelRunner

    Feed = Callable[[ModelRunner, list[int], list[int]], npt.NDArray[np.float32]]

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden" / "smollm2_135m_greedy.json"
MOST_LOGIT_DIFFERENCE = 5e-3
# Where the two best logits are closer than this, rounding may decide between them.
TIE = 0.01


@cache
def golden_prompts() -> list[dict[str, Any]]:
    assert GOLDEN.is_file(), f"the golden file is missing: {GOLDEN} (the folder shared/ lies beside the checkout)"
    prompts: list[dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))["prompts"]
    assert prompts
    return prompts


def test_prompts_render_and_tokenize_exactly() -> None:
    model = load("float32")
    assert model.chat_template is not None
    for prompt in golden_prompts():
        rendered = model.chat_template.render(prompt["messages"], add_generation_prompt=True)
        assert rendered == prompt["rendered"], prompt["name"]
        assert model.tokenizer.encode(rendered, add_special_tokens=False).ids == prompt["prompt_ids"], prompt["name"]


def in_one_prefill(runner: ModelRunner, prompt_ids: list[int], answer_ids: list[int]) -> npt.NDArray[np.float32]:
    logits = np.concatenate(list(logits_along(runner, prompt_ids + answer_ids)))
    return logits[len(prompt_ids) - 1 :]


def step_by_step(runner: ModelRunner, prompt_ids: list[int], answer_ids: list[int]) -> npt.NDArray[np.float32]:
    logits = [list(logits_along(runner, prompt_ids))[-1][-1:]]
    for position, token_id in enumerate(answer_ids, start=len(prompt_ids)):
        page_table = list(range(position // runner.page_size + 1))
        logits.append(runner.logits([SequenceSlice([token_id], position, page_table, None)]))
    return np.concatenate(logits)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("feed", [in_one_prefill, step_by_step])
def test_logits_along_the_golden_ids(feed: Feed) -> None:
    worst_difference, worst_at, steps, ties = 0.0, "", 0, 0
    with open_runner(load("float32")) as runner:
        for prompt in golden_prompts():
            # The last of the generated ids is chosen, but nothing is chosen after it.
            choosing = feed(runner, prompt["prompt_ids"], prompt["generated_ids"][:-1])
            for k, (found, wanted) in enumerate(zip(choosing, prompt["steps"], strict=True)):
                difference = float(np.abs(found[wanted["top_ids"]] - wanted["top_logits"]).max())
                at = f"{prompt['name']} step {k}"
                if difference > worst_difference:
                    worst_difference, worst_at = difference, at
                assert difference <= MOST_LOGIT_DIFFERENCE, at
                steps += 1
                if wanted["gap"] > TIE:
                    assert int(found.argmax()) == wanted["top_ids"][0], at
                else:
                    ties += 1
    print(f"\n{steps} steps ({ties} near ties): worst top-5 logit difference {worst_difference:.2e} at {worst_at}")


@pytest.mark.timeout(600)
def test_free_running_greedy_text() -> None:
    tokenizer = load("float32").tokenizer
    with MLCEngine(MODEL, engine_config=EngineConfig(activation_dtype="float32")) as engine:
        for prompt in golden_prompts():
            answer = engine.chat.completions.create(
                messages=prompt["messages"], temperature=0.0, max_tokens=len(prompt["generated_ids"])
            )
            choice = answer.choices[0]
            assert answer.usage.prompt_tokens == len(prompt["prompt_ids"])
            near_ties = [k for k, step in enumerate(prompt["steps"]) if step["gap"] < TIE]
            if near_ties:
                settled = tokenizer.decode(prompt["generated_ids"][: near_ties[0]], skip_special_tokens=True)
                assert choice.message.content.startswith(settled), prompt["name"]
            else:
                assert choice.message.content == prompt["text"], prompt["name"]
                assert choice.finish_reason == prompt["finish"], prompt["name"]
