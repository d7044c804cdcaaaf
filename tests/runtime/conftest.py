"""A CUDA driver without a GPU."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from mlc_nb.runtime import cuda_driver, devices
from tests.runtime.scripted_cuda import ScriptedDriver

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedDriver]:
    """The driver that the runtime finds, with the packages for running on CUDA."""
    import cuda.bindings

    driver = ScriptedDriver()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    monkeypatch.setattr(cuda.bindings, "driver", driver, raising=False)
    monkeypatch.setattr(devices, "require_packages", lambda *_: None)
    caches = (cuda_driver.driver, devices._automatic)
    for cached in caches:
        cached.cache_clear()
    yield driver
    for cached in caches:
        cached.cache_clear()
