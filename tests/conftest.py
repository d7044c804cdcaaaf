"""What every room's tests share: the default model and the golden answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlc_nb.weights.source import DEFAULT_MODEL, resolve_model

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden" / "smollm2_135m_greedy.json"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file, from the cache or fetched into it."""
    return resolve_model(DEFAULT_MODEL, progress=False).path


@pytest.fixture(scope="session")
def warm_model(smollm2_path: Path) -> Path:
    """The default model's file, with its compiled library in the cache too: other processes load it silently."""
    from mlc_nb import MLCEngine

    MLCEngine().terminate()
    return smollm2_path


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Greedy answers of the default model in float32; the file lies beside the checkout."""
    return json.loads(GOLDEN.read_text(encoding="utf-8"))
