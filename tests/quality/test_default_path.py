"""The default path, and int8 activations, stay close to float32 on a text that the repository ships."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tests.quality.runners import Activations, Distributions, load, logits_along, open_runner

TEXT = Path(__file__).resolve().parent.parent / "data" / "quality_text.txt"
LEAST_TOKENS = 4000
# The text is read in pieces of this many tokens, each from position 0: the figures cover short and middle contexts.
PIECE = 512


@dataclass
class Comparison:
    """How one kind of activations fares, and the bounds that it must keep; never loosen them."""

    activations: Activations
    least_agreement: float
    most_mean_kl: float
    agreements: list[bool] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    surprise: float = 0.0

    def add(self, reference: Distributions, found: Distributions, following: list[int]) -> None:
        """Compare with the float32 path; ``following`` are the text's own next tokens."""
        self.agreements.extend(reference.logits.argmax(axis=-1) == found.logits.argmax(axis=-1))
        self.divergences.extend(reference.divergence_of(found))
        self.surprise += found.surprise_at(following)

    @property
    def agreement(self) -> float:
        return float(np.mean(self.agreements))

    @property
    def mean_kl(self) -> float:
        return float(np.mean(self.divergences))


@pytest.mark.timeout(900)
def test_activations_agree_with_float32() -> None:
    # Measured on avx512-vnni and avx2: auto 99.98 to 100 % and 4.2e-7 nat, int8 96.4 to 96.6 % and 2.8e-3 nat.
    comparisons = [Comparison("auto", 0.999, 1e-5), Comparison("int8", 0.96, 0.003)]
    models = [load("float32"), *(load(comparison.activations) for comparison in comparisons)]
    token_ids = models[0].tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False).ids
    assert len(token_ids) >= LEAST_TOKENS

    surprise, predicted = 0.0, 0
    with ExitStack() as stack:
        runners = [stack.enter_context(open_runner(model)) for model in models]
        for start in range(0, len(token_ids), PIECE):
            piece = token_ids[start : start + PIECE]
            position = 0
            for logits, *others in zip(*(logits_along(runner, piece) for runner in runners), strict=True):
                reference = Distributions(logits)
                following = piece[position + 1 : position + 1 + len(logits)]
                surprise += reference.surprise_at(following)
                for comparison, other in zip(comparisons, others, strict=True):
                    comparison.add(reference, Distributions(other), following)
                predicted += len(following)
                position += len(logits)

    print(f"\n{len(token_ids)} tokens; perplexity with float32 {np.exp(surprise / predicted):.3f}")
    for found in comparisons:
        print(
            f"{found.activations}: top-1 agreement {found.agreement:.2%}, KL(float32 || {found.activations}) mean "
            f"{found.mean_kl:.2e} nat, 99th percentile {np.percentile(found.divergences, 99):.2e}, worst "
            f"{max(found.divergences):.2e}; perplexity {np.exp(found.surprise / predicted):.3f}"
        )
    for found in comparisons:
        assert found.agreement >= found.least_agreement, found.activations
        assert found.mean_kl <= found.most_mean_kl, found.activations
