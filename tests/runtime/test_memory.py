"""What a runner takes from the system it gives back, measured in processes of their own with the default model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PREAMBLE = """
import gc, json, os
import numpy as np
import psutil
from mlc_nb.engine.model import load_model
from mlc_nb.protocol.engine_config import EngineConfig
from mlc_nb.runtime.step import SequenceSlice

def resident():
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20

def opened():
    config = EngineConfig(max_single_sequence_length=1024, num_threads=2)
    return load_model("smollm2", config=config, progress=False).open_runner()

def step(runner, length):
    runner.logits([SequenceSlice([5] * length, 0, list(range(-(-length // 16))), None)])
"""

CYCLES = """
runner = opened()  # the libraries of the process come to stay
step(runner, 40)
weights = runner.weight_bytes / 2**20
runner.close()
del runner
before, opened_at, closed_at = resident(), [], []
for _ in range(12):
    runner = opened()
    step(runner, 100)
    opened_at.append(resident())
    runner.close()
    if _ % 2:
        del runner  # closing is enough; dropping the last reference does no harm
    closed_at.append(resident())
print(json.dumps({"weights": weights, "before": before, "opened": opened_at, "closed": closed_at}))
"""

LENGTHS = """
runner = opened()
lengths = np.random.default_rng(0).integers(1, 129, 60).tolist()
step(runner, 128)
grown = [resident()]
for length in lengths:
    step(runner, length)
    grown.append(resident())
print(json.dumps(grown))
"""


def measured(code: str) -> object:
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.usefixtures("smollm2_path")
def test_closing_gives_the_memory_back_every_time() -> None:
    sizes = measured(CYCLES)
    assert sizes["weights"] > 60
    assert min(sizes["opened"]) > sizes["before"] + sizes["weights"] * 0.9
    # What stays is Python's and malloc's own: a cycle of the tokenizer's many strings leaves a megabyte of holes, and
    # ever less. Anything forgotten of weights or pages would be a hundred.
    assert max(sizes["closed"]) < sizes["before"] + 14, sizes
    assert sizes["closed"][-1] < sizes["closed"][7] + 2, sizes
    assert max(sizes["opened"]) < min(sizes["opened"]) + 10, sizes


@pytest.mark.usefixtures("smollm2_path")
def test_steps_of_any_length_take_no_more_than_the_longest() -> None:
    grown = measured(LENGTHS)
    assert max(grown) < grown[0] + 6, grown
