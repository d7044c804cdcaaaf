"""What ``mlc_nb`` promises to those who import it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

import mlc_nb


@pytest.mark.parametrize("name", mlc_nb.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(mlc_nb, name) is not None
    assert name in dir(mlc_nb)


def test_dir_shows_public_names_only() -> None:
    assert dir(mlc_nb) == sorted(mlc_nb.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        mlc_nb.Engine  # noqa: B018 - the access is the test


def test_the_version_is_the_distribution_s() -> None:
    assert mlc_nb.__version__ == importlib.metadata.version("mlc-nb")


def test_an_engine_built_by_its_public_name_is_registered() -> None:
    code = (
        "import sys, mlc_nb; mlc_nb.MLCEngine; from mlc_nb.engine import provider; "
        "assert provider._provider is not provider.create_core; "
        "assert 'tvm' not in sys.modules and 'tvm_ffi' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
