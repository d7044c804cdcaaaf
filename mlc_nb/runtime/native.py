"""TVM's runtime library without TVM's compiler: what the kernel process loads, and nothing more."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc_nb.errors import DeviceUnavailableError, ModelFormatError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["load_native", "load_virtual_machine", "return_free_memory"]

_LIBRARY = {"win32": "tvm_runtime.dll", "darwin": "libtvm_runtime.dylib"}.get(sys.platform, "libtvm_runtime.so")

_CPU_DEVICE_TYPE = 1
_POOLED_ALLOCATOR = 2

_lock = threading.Lock()
_loaded: Any = None


def load_native() -> Any:
    """Load TVM's runtime library once and return ``tvm_ffi``.

    Raises
    ------
    DeviceUnavailableError
        If the library is missing or cannot be loaded; the message holds the loader's reason.
    """
    global _loaded
    with _lock:
        if _loaded is not None:
            return _loaded
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


def load_virtual_machine(executable: Path, objects: Iterable[Path]) -> tuple[Any, Any]:
    """Link a bundle's object files in memory.

    Returns the linked kernels, and a relax virtual machine that calls them. Both must be kept as long as anything that
    they made.

    Raises
    ------
    ModelFormatError
        If the files cannot be linked or read; the message holds the reason.
    """
    tvm_ffi = load_native()
    import tvm_ffi_orcjit

    try:
        # The objects have a plain C interface: naming no C++ compiler keeps the linker from looking for one's runtime.
        kernels = tvm_ffi_orcjit.default_session().load_module(
            [str(path) for path in objects], cxx="no-compiler-is-needed"
        )
        program = tvm_ffi.get_global_func("ffi.Module.load_from_file.relax.VMExecutable")(str(executable))
        program.import_module(kernels)
        machine = program["vm_load_executable"]()
        # A step's buffers are planned as a few blocks, the same for every step. In a pool they stay where they are;
        # malloc would place them anew each time, and the process would grow by what it touches.
        machine["vm_initialization"](_CPU_DEVICE_TYPE, 0, _POOLED_ALLOCATOR)
    except Exception as error:
        raise ModelFormatError(f"the model library {executable.parent} cannot be loaded: {error}") from error
    return kernels, machine


def return_free_memory() -> None:
    """Hand what is free in the pool of step buffers, and what glibc keeps for later, back to the system."""
    load_native().get_global_func("vm.builtin.memory_manager.clear")()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
