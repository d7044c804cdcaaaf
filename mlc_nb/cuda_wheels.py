"""NVIDIA's compiler, headers and libraries, as pip installs them: what is there, where, and what is missing.

The wheels put everything into the namespace package ``nvidia``; nothing is looked for in a CUDA toolkit of the system,
and no environment variable is needed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from mlc_nb.errors import DeviceUnavailableError

__all__ = ["COMPILING", "INSTALL", "RUNNING", "include_directories", "installed_versions", "require_packages"]

INSTALL = 'pip install "mlc-nb[cuda]"'
"""The one line that installs all of them."""

COMPILING = (
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "nvidia-cuda-cccl",
    "nvidia-cuda-crt",
)
"""Packages that compiling for CUDA needs; no GPU and no driver."""

RUNNING = ("cuda-bindings", "nvidia-cublas")
"""Packages that running on CUDA needs, beside NVIDIA's driver."""

# One header of each wheel: a file that is there says more than a folder.
_HEADERS = {
    "nvidia-cuda-runtime": "cuda_fp16.h",
    "nvidia-cuda-crt": "crt/host_defines.h",
    "nvidia-cuda-cccl": "cuda/std/type_traits",
}


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


def include_directories() -> list[Path]:
    """Folders to search for headers, in order.

    Raises
    ------
    DeviceUnavailableError
        If the headers of a wheel are nowhere.
    """
    folders: list[Path] = []
    for package, header in _HEADERS.items():
        found = [folder for folder in _candidates() if (folder / header).is_file()]
        if not found:
            raise DeviceUnavailableError(
                f"the header {header} of {package} is not where its wheel puts it (nvidia/cu13/include in "
                f"site-packages). Run: {INSTALL} --force-reinstall"
            )
        folders += [folder for folder in found[:1] if folder not in folders]
    return folders


def _candidates() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) / "cu13" / "include" for root in (spec.submodule_search_locations or [])] if spec else []
    return [folder for root in roots for folder in (root, root / "cccl")]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
