"""``mlc-nb doctor`` and ``%mlc_doctor``: can models run on this machine, and if not, why."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

from mlc_nb.child import popen
from mlc_nb.errors import MLCError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["examine"]

_PACKAGES = ("apache-tvm", "apache-tvm-ffi", "apache-tvm-ffi-orcjit", "tokenizers", "numpy", "ipython")
_CHILD_SECONDS = 20


def examine() -> int:
    """Print a line for each thing that models need; 0 when all is well, else 1."""
    checks: tuple[tuple[str, Callable[[], str]], ...] = (
        ("Python", _python),
        ("platform", platform.platform),
        ("packages", _packages),
        ("instruction set", _instruction_set),
        ("cores", _cores),
        ("memory", _memory),
        ("GPU", _gpu),
        ("native runtime", _native_runtime),
        ("cache", _cache),
        ("child processes", _child),
    )
    failures = 0
    for name, check in checks:
        try:
            mark, found = "ok  ", check()
        except _CautionError as warning:
            mark, found = "warn", str(warning)
        except Exception as error:  # whatever it is, it is what the user came to learn
            mark, found = "FAIL", str(error) if isinstance(error, MLCError) else f"{type(error).__name__}: {error}"
            failures += 1
        print(f"{mark}  {name:<16}{found}", flush=True)
    print("\nModels can run here." if not failures else f"\n{failures} of {len(checks)} checks failed.")
    return 1 if failures else 0


def _python() -> str:
    return f"{platform.python_version()} ({sys.executable})"


def _packages() -> str:
    versions = {name: _version(name) for name in ("mlc-nb", *_PACKAGES)}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        raise MLCError(f"not installed: {', '.join(missing)}. Install mlc-nb again.")
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _instruction_set() -> str:
    from mlc_nb.runtime.isa import host_isa, runnable_isas

    return f"{host_isa()} (can run {', '.join(runnable_isas())})"


def _cores() -> str:
    import psutil

    from mlc_nb.runtime.cores import usable_cores

    return f"{usable_cores()} usable of {psutil.cpu_count(logical=False) or psutil.cpu_count()}"


def _memory() -> str:
    from mlc_nb.runtime.cpu_memory import free_memory

    return f"{free_memory() / 2**30:.1f} GiB free"


def _gpu() -> str:
    from mlc_nb.runtime.devices import cuda_memory, find_cuda_device, sees_gpu

    if not sees_gpu():
        return "no NVIDIA GPU with a driver; models run on the CPU"
    try:
        gpu = find_cuda_device("cuda")
        free, total = cuda_memory(gpu)
    except MLCError as error:
        raise _CautionError(f"there is one, but models run on the CPU: {error}") from None
    return f"{gpu.name} ({gpu.device}, {gpu.architecture}), {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def _native_runtime() -> str:
    from mlc_nb.runtime.native import load_native

    load_native()
    return "loads"


class _CautionError(MLCError):
    """Something that is worth knowing and keeps no model from running."""


def _cache() -> str:
    from mlc_nb.inventory import cached_libraries, cached_models
    from mlc_nb.weights.cache import cache_root, disk_errors

    root = cache_root()
    models, libraries = len(cached_models()), len(cached_libraries())
    try:
        with disk_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=root).close()
            free = shutil.disk_usage(root).free
    except MLCError:
        if not (models and libraries):
            raise
        raise _CautionError(
            f"{root} is read-only; what is in it can run (models: {models}, compiled libraries: {libraries}), but "
            "nothing can be added. Set MLC_NB_HOME to a writable folder for more."
        ) from None
    return f"{root} is writable, {free / 1e9:.1f} GB free; models: {models}, compiled libraries: {libraries}"


def _child() -> str:
    with popen("platform", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as child:
        try:
            _, errors = child.communicate(timeout=_CHILD_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            raise MLCError(f"a child process did not end within {_CHILD_SECONDS} s; compiling needs one.") from None
    if child.returncode != 0:
        raise MLCError(f"a child process ended with status {child.returncode}; compiling needs one. {errors.strip()}")
    return "start and end"
