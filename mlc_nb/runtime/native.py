"""TVM's runtime library without TVM's compiler: what the kernel process loads, and nothing more."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from pathlib import Path
from typing import Any

from mlc_nb.errors import DeviceUnavailableError, ModelFormatError
from mlc_nb.runtime.cores import usable_cores

__all__ = ["load_native", "load_virtual_machine", "return_free_memory", "use_threads"]

_LIBRARY = {"win32": "tvm_runtime.dll", "darwin": "libtvm_runtime.dylib"}.get(sys.platform, "libtvm_runtime.so")

# Yields before a waiting worker of the thread pool sleeps: enough to bridge the gaps within a step (some tens of
# microseconds), too few to keep a core busy between steps.
_SPIN_COUNT = "2000"

_CPU_DEVICE_TYPE = 1
_POOLED_ALLOCATOR = 2

_lock = threading.Lock()
_loaded: Any = None


def load_native() -> Any:
    """Load TVM's runtime library once, with thread settings that suit a shared machine, and return ``tvm_ffi``.

    Workers are not pinned to cores, since two kernels on one machine would be pinned to the same ones. Settings that
    the user made in the environment are kept.

    Raises
    ------
    DeviceUnavailableError
        If the library is missing or cannot be loaded; the message holds the loader's reason.
    """
    global _loaded
    with _lock:
        if _loaded is not None:
            return _loaded
        os.environ.setdefault("TVM_NUM_THREADS", str(os.cpu_count() or 1))
        os.environ.setdefault("TVM_BIND_THREADS", "0")
        os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", _SPIN_COUNT)
        import tvm_ffi

        path = _library_path()
        try:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise DeviceUnavailableError(
                f"TVM's runtime library {path} cannot be loaded: {error}. Reinstall apache-tvm for this platform."
            ) from error
        _loaded = tvm_ffi
        return tvm_ffi


def _library_path() -> Path:
    spec = importlib.util.find_spec("tvm")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "lib" / _LIBRARY
        if path.is_file():
            return path
    raise DeviceUnavailableError(
        f"the package apache-tvm with its runtime library {_LIBRARY} is not installed; run: pip install mlc-nb"
    )


def use_threads(count: int | None) -> int:
    """Set the number of threads of the calling thread's pool; None takes the usable cores. Returns the number."""
    threads = count or usable_cores()
    mode_all_cores = 0
    load_native().get_global_func("runtime.config_threadpool")(mode_all_cores, threads)
    return threads


def load_virtual_machine(executable: Path, objects: Path) -> Any:
    """Link a bundle's object file in memory and return a relax virtual machine that is ready to be called.

    The module must be kept as long as anything that it made.

    Raises
    ------
    ModelFormatError
        If the files cannot be linked or read; the message holds the reason.
    """
    tvm_ffi = load_native()
    import tvm_ffi_orcjit

    try:
        # The objects have a plain C interface: naming no C++ compiler keeps the linker from looking for one's runtime.
        kernels = tvm_ffi_orcjit.default_session().load_module([str(objects)], cxx="no-compiler-is-needed")
        program = tvm_ffi.get_global_func("ffi.Module.load_from_file.relax.VMExecutable")(str(executable))
        program.import_module(kernels)
        machine = program["vm_load_executable"]()
        # A step's buffers are planned as a few blocks, the same for every step. In a pool they stay where they are;
        # malloc would place them anew each time, and the process would grow by what it touches.
        machine["vm_initialization"](_CPU_DEVICE_TYPE, 0, _POOLED_ALLOCATOR)
    except Exception as error:
        raise ModelFormatError(f"the model library {executable.parent} cannot be loaded: {error}") from error
    return machine


def return_free_memory() -> None:
    """Hand what is free in the pool of step buffers, and what glibc keeps for later, back to the system."""
    load_native().get_global_func("vm.builtin.memory_manager.clear")()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
