"""Logits of the real model, page tables included, for tests that compare distributions."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from mlc_nb.engine.model import load_model
from mlc_nb.protocol.engine_config import EngineConfig
from mlc_nb.runtime.step import SequenceSlice

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from mlc_nb.engine.model import LoadedModel
    from mlc_nb.runtime.step import ModelRunner

Activations: TypeAlias = Literal["auto", "float32", "int16", "int8"]

MODEL = "smollm2"
CHUNK = 128


def load(activation_dtype: Activations) -> LoadedModel:
    """The default model with one kind of activations; "auto" is what users get."""
    config = EngineConfig(activation_dtype=activation_dtype)
    return load_model(MODEL, device="cpu", model_lib=None, config=config)


@contextmanager
def open_runner(model: LoadedModel) -> Iterator[ModelRunner]:
    """The model's runner, opened on this thread and closed at the end."""
    runner = model.open_runner()
    try:
        yield runner
    finally:
        runner.close()


def logits_along(runner: ModelRunner, token_ids: Sequence[int]) -> Iterator[npt.NDArray[np.float32]]:
    """Logits after every token of one sequence, from position 0: float32 ``[at most CHUNK, vocab]`` a piece."""
    pages = list(range(-(-len(token_ids) // runner.page_size)))
    for start in range(0, len(token_ids), CHUNK):
        end = min(start + CHUNK, len(token_ids))
        page_table = pages[: -(-end // runner.page_size)]
        yield runner.logits_all([SequenceSlice(token_ids[start:end], start, page_table, None)])


class Distributions:
    """Softmax of rows of logits, kept in the parts that comparisons need; sums are in float64.

    Attributes
    ----------
    logits, weights
        float32 ``[rows, vocab]``; a probability is its weight over ``totals`` of its row.
    totals, log_totals
        float64 ``[rows]``: sums of the weights, and the natural logarithms of the sums of ``exp(logits)``.
    """

    def __init__(self, logits: npt.NDArray[np.float32]) -> None:
        assert np.isfinite(logits).all()
        highest = logits.max(axis=-1, keepdims=True)
        self.logits = logits
        self.weights = np.exp(logits - highest)
        self.totals = self.weights.sum(axis=-1, dtype=np.float64)
        self.log_totals = np.log(self.totals) + highest[:, 0]

    def divergence_of(self, other: Distributions) -> npt.NDArray[np.float64]:
        """KL(self || other) of each row, in nats."""
        shift = (self.weights * (self.logits - other.logits)).sum(axis=-1, dtype=np.float64) / self.totals
        return shift - (self.log_totals - other.log_totals)

    def surprise_at(self, token_ids: Sequence[int]) -> float:
        """Sum of -ln p over the tokens that follow the first ``len(token_ids)`` rows."""
        rows = np.arange(len(token_ids))
        return float((self.log_totals[rows] - self.logits[rows, list(token_ids)]).sum())
