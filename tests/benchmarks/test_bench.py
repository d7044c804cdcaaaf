"""The benchmark runs end to end (its speed is nobody's business here) and tells what went wrong when it fails."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks import bench
from mlc_nb.runtime.isa import ISA_VARIABLE, runnable_isas

if TYPE_CHECKING:
    from pathlib import Path

LEVEL = runnable_isas()[0]


def test_table_gives_medians_with_their_span() -> None:
    case = bench.Case("avx2", 2, samples={"decode_tokens_per_s": [81.25, 79.0, 90.0], "import_s": [0.0123]})
    lines = bench.table([case]).splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[2:4]] == ["avx2, 2 threads", "unit"]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert cells == [
        ["decode, 128 tokens after 16", "81.2 (79.0-90.0)", "token/s"],
        ["import mlc_nb", "0.012", "s"],
    ]


def test_a_measurement_that_fails_is_told_in_its_own_words() -> None:
    with pytest.raises(SystemExit, match="no-such-model"):
        bench.first_token(bench.Case(LEVEL, 1), "no-such-model.gguf")


@pytest.mark.timeout(600)
def test_measures_the_real_model_and_writes_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    assert bench.main(["--isa", LEVEL, "--rounds", "1", "--runs", "1", "--no-cold"]) == 0
    assert "token/s" in capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    (case,) = json.loads(path.read_text(encoding="utf-8"))["cases"]
    assert case["isa"] == LEVEL
    assert set(case["samples"]) == set(bench.ROWS) - {"cold_start_s"}
    assert all(value > 0 for values in case["samples"].values() for value in values)
