"""NVIDIA's libraries from pip: which packages CUDA needs, which are missing, and the line that installs them.

The kernels include no headers, so neither a toolkit nor the wheels with its headers are needed.
"""

from __future__ import annotations

import importlib.metadata

from mlc_nb.errors import DeviceUnavailableError

__all__ = ["COMPILING", "INSTALL", "RUNNING", "installed_versions", "require_packages"]

INSTALL = 'pip install "mlc-nb[cuda]"'
"""The one line that installs all of them."""

COMPILING = ("cuda-bindings", "nvidia-cuda-nvrtc")
"""Packages that compiling for CUDA needs; no GPU and no driver."""

RUNNING = ("cuda-bindings", "nvidia-cublas", "nvidia-ml-py")
"""Packages that running on CUDA needs, beside NVIDIA's driver."""


def installed_versions(packages: tuple[str, ...]) -> dict[str, str | None]:
    """Version of each package; None where it is not installed."""
    return {name: _version(name) for name in packages}


def require_packages(packages: tuple[str, ...], purpose: str) -> None:
    """Check that packages are installed.

    Raises
    ------
    DeviceUnavailableError
        If any is missing; the message names each and the command that installs them.
    """
    missing = [name for name, version in installed_versions(packages).items() if version is None]
    if missing:
        raise DeviceUnavailableError(f"{purpose} needs {', '.join(missing)}, not installed here. Run: {INSTALL}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
