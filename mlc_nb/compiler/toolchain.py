"""CUDA source to machine code with NVRTC from NVIDIA's wheels: no CUDA toolkit, no compiler, no GPU."""

from __future__ import annotations

import re
from typing import Any

from mlc_nb.cuda_wheels import COMPILING, INSTALL, require_packages
from mlc_nb.errors import CompileError, DeviceUnavailableError

__all__ = ["OLDEST_ARCHITECTURE", "check_architecture", "compile_cubin"]

OLDEST_ARCHITECTURE = 75
"""Turing, compute capability 7.5: the oldest that CUDA 13 compiles for."""

_MOST_LOG_LINES = 20


def check_architecture(architecture: str) -> None:
    """Check that an architecture can be compiled for.

    Raises
    ------
    CompileError
        If it is none, or too old.
    """
    number = re.fullmatch(r"sm_(\d{2,3})", architecture)
    if number is None or int(number[1]) < OLDEST_ARCHITECTURE:
        raise CompileError(
            f"cannot compile for the CUDA architecture {architecture!r}; it must be sm_{OLDEST_ARCHITECTURE} or newer, "
            "such as sm_90"
        )


def compile_cubin(source: str, name: str, architecture: str) -> bytes:
    """Compile one translation unit for one architecture.

    Parameters
    ----------
    source
        CUDA C++ that includes nothing.
    name
        What messages call it.
    architecture
        Such as ``sm_90``.

    Returns
    -------
    bytes
        A cubin, which runs on this architecture and later ones of the same major version.

    Raises
    ------
    CompileError
        If the source does not compile (with the compiler's first messages), or the architecture cannot be compiled for.
    DeviceUnavailableError
        If a package is missing.
    """
    check_architecture(architecture)
    require_packages(COMPILING, "compiling for CUDA")
    options = ["-std=c++17", f"-arch={architecture}"]
    nvrtc = _nvrtc()
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{name} does not compile for {architecture}: {_log(nvrtc, program)}")
        cubin = bytearray(_checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc() -> Any:
    """The bindings, once their library is known to load: they raise one error or another where it does not."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:
        raise DeviceUnavailableError(f"NVIDIA's compiler NVRTC cannot be loaded: {error}. Run: {INSTALL}") from error
    return nvrtc


def _checked(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC failed: {status.name}")
    return values[0] if values else None


def _log(nvrtc: Any, program: Any) -> str:
    text = bytearray(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
    _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, text))
    lines = text.decode(errors="replace").strip("\0\n ").splitlines()
    return "\n".join(lines[:_MOST_LOG_LINES]) or "the compiler said nothing"
