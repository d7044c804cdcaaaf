"""Which ISA levels a machine runs, by what its operating system says of the processor."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING

import pytest

from mlc_nb.compiler.kernels.cpu.isa import ISA_LEVELS
from mlc_nb.errors import DeviceUnavailableError
from mlc_nb.runtime import isa
from mlc_nb.runtime.isa import ISA_VARIABLE, host_isa, runnable_isas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

V3 = "avx2 fma f16c bmi1 bmi2 abm movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Pretend to run on Linux with another processor."""

    def pretend(machine: str, words: str) -> None:
        monkeypatch.setattr(platform, "machine", lambda: machine)
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setattr(isa, "_cpuinfo_words", lambda _: set(words.split()))
        runnable_isas.cache_clear()

    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    yield pretend
    monkeypatch.undo()
    runnable_isas.cache_clear()


@pytest.mark.parametrize(
    ("machine", "words", "levels"),
    [
        ("x86_64", "sse2 fpu", ("x86-64",)),
        ("AMD64", V3, ("avx2", "x86-64")),
        ("x86_64", V3.replace(" fma", ""), ("x86-64",)),
        ("x86_64", f"{V3} avx_vnni", ("avx-vnni", "avx2", "x86-64")),
        ("x86_64", V4, ("avx512", "avx2", "x86-64")),
        ("x86_64", V4.replace(" avx512vl", ""), ("avx2", "x86-64")),
        ("x86_64", f"{V4} avx512_vnni", ("avx512-vnni", "avx512", "avx2", "x86-64")),
        ("x86_64", f"{V4} avx512_vnni avx_vnni", ("avx512-vnni", "avx512", "avx-vnni", "avx2", "x86-64")),
        ("aarch64", "fp asimd asimdhp asimddp", ("neon-dot",)),
    ],
)
def test_levels(processor: Callable[[str, str], None], machine: str, words: str, levels: tuple[str, ...]) -> None:
    processor(machine, words)
    assert runnable_isas() == levels
    assert host_isa() == levels[0]
    assert set(levels) <= set(ISA_LEVELS)


@pytest.mark.parametrize(("machine", "words"), [("aarch64", "fp asimd"), ("riscv64", "rv64imafdc"), ("ppc64le", "")])
def test_other_processors_are_named(processor: Callable[[str, str], None], machine: str, words: str) -> None:
    processor(machine, words)
    with pytest.raises(DeviceUnavailableError, match=rf"this processor \({machine}\) has no supported instruction set"):
        host_isa()


def test_a_lower_level_can_be_chosen(processor: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    processor("x86_64", V4)
    monkeypatch.setenv(ISA_VARIABLE, "avx2")
    assert host_isa() == "avx2"
    monkeypatch.setenv(ISA_VARIABLE, "")
    assert host_isa() == "avx512"
    monkeypatch.setenv(ISA_VARIABLE, "avx512-vnni")
    with pytest.raises(
        DeviceUnavailableError,
        match=r"MLC_NB_ISA asks for .*'avx512-vnni', .* it can run: avx512, avx2, x86-64\. Unset",
    ):
        host_isa()


def test_this_machine_runs_something() -> None:
    assert runnable_isas()
    assert set(runnable_isas()) <= set(isa.known_isas())
