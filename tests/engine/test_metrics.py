from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING

from mlc_nb.engine.metrics import EngineMetrics
from tests.engine.test_core import make_request

if TYPE_CHECKING:
    from tests.engine.conftest import MakeCore

SAMPLE = re.compile(r'mlc_nb_[a-z_]+\{model="((?:[^"\\]|\\.)*)"\} [0-9.e+-]+')


def test_prometheus_text_has_every_number_once(make_core: MakeCore) -> None:
    core = make_core()
    list(core.submit(make_request("one", [5, 6, 7])))
    text = core.metrics().prometheus()
    lines = text.splitlines()
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    samples = [line for line in lines if not line.startswith("#")]
    assert all(SAMPLE.fullmatch(sample) for sample in samples)
    assert [sample.split("{")[0] for sample in samples] == names
    assert len(set(names)) == len(names) == len(fields(EngineMetrics)) - 2
    assert 'mlc_nb_prefill_tokens_total{model="scripted"} 3' in lines
    assert "# TYPE mlc_nb_prefill_seconds_total counter" in lines
    assert "# TYPE mlc_nb_free_pages gauge" in lines
    assert text.endswith("\n")


def test_labels_are_escaped() -> None:
    text = EngineMetrics(model='a"b\\c\nd').prometheus()
    assert 'model="a\\"b\\\\c\\nd"' in text
