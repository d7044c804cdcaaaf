"""Logits of the real model, page tables included, for tests that compare distributions."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from mlc_nb.engine.model import load_model
from mlc_nb.protocol.engine_config import EngineConfig
from mlc_nb.runtime.step import SequenceSlice

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from mlc_nb.engine.model import LoadedModel
    from mlc_nb.runtime.step import ModelRunner

MODEL = "smollm2"
CHUNK = 128


def load(activation_dtype: str) -> LoadedModel:
    """The default model with float32 activations ("float32") or as users get it ("auto")."""
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


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Natural logarithms of the probabilities, row by row, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
