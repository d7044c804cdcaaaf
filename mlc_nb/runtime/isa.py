"""Which ISA levels this machine's processor can run. Needs no compiler."""

from __future__ import annotations

import os
import platform
import sys
from functools import cache
from pathlib import Path

from mlc_nb.errors import DeviceUnavailableError

__all__ = ["ISA_VARIABLE", "host_isa", "known_isas", "runnable_isas"]

ISA_VARIABLE = "MLC_NB_ISA"
"""Environment variable that chooses a lower level than the best one, for measurements and for mixed clusters."""

_AVX2 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

# Best first; each with the processor flags, in the words of Linux, that it needs.
_X86_LEVELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("avx512-vnni", frozenset(_AVX512 | {"avx512_vnni"})),
    ("avx512", frozenset(_AVX512)),
    ("avx-vnni", frozenset(_AVX2 | {"avx_vnni"})),
    ("avx2", frozenset(_AVX2)),
    ("x86-64", frozenset()),
)


def host_isa() -> str:
    """The level to use on this machine: the best one, or the one that ``MLC_NB_ISA`` names.

    Raises
    ------
    DeviceUnavailableError
        If the processor has no supported level, or not the one that ``MLC_NB_ISA`` names.
    """
    runnable = runnable_isas()
    wanted = os.environ.get(ISA_VARIABLE)
    if not wanted:
        return runnable[0]
    if wanted not in runnable:
        raise DeviceUnavailableError(
            f"{ISA_VARIABLE} asks for the ISA level {wanted!r}, which this processor cannot run; it can run: "
            f"{', '.join(runnable)}. Unset {ISA_VARIABLE} or choose one of these."
        )
    return wanted


def known_isas() -> tuple[str, ...]:
    """Levels of all processors of this machine's kind, best first: what an image that runs elsewhere may need."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return tuple(name for name, _ in _X86_LEVELS)
    return runnable_isas()


@cache
def runnable_isas() -> tuple[str, ...]:
    """Levels that this machine can run, best first.

    Raises
    ------
    DeviceUnavailableError
        If there is none; the message names the processor.
    """
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        flags = _x86_flags()
        return tuple(name for name, needed in _X86_LEVELS if needed <= flags)
    if machine in ("aarch64", "arm64") and _has_arm_dot_product():
        return ("neon-dot",)
    raise DeviceUnavailableError(
        f"this processor ({machine}) has no supported instruction set; supported are x86-64 and 64-bit ARM with the "
        "dot product extension"
    )


def _x86_flags() -> set[str]:
    if sys.platform == "linux":
        return _cpuinfo_words("flags")
    if sys.platform == "win32":
        import ctypes

        # PF_AVX2_INSTRUCTIONS_AVAILABLE; a processor with AVX2 that runs a supported Windows has the rest of its level.
        if ctypes.windll.kernel32.IsProcessorFeaturePresent(40):
            return set(_AVX2)
    return set()


def _has_arm_dot_product() -> bool:
    if sys.platform == "linux":
        return {"asimddp", "asimdhp"} <= _cpuinfo_words("Features")
    # Every Apple processor that runs macOS has it.
    return sys.platform == "darwin"


def _cpuinfo_words(key: str) -> set[str]:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return set(value.split())
    return set()
