"""The CUDA toolchain: compiles without a GPU, and says what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata

import pytest

from mlc_nb.compiler.toolchain import compile_cubin
from mlc_nb.cuda_wheels import COMPILING, INSTALL, RUNNING, installed_versions, require_packages
from mlc_nb.errors import CompileError, DeviceUnavailableError

SOURCE = """
extern "C" __global__ void twice(float* x) { x[threadIdx.x] += x[threadIdx.x]; }
"""
EM_CUDA = 190  # e_machine of an ELF file with NVIDIA machine code


@pytest.mark.parametrize("architecture", ["sm_75", "sm_90"])
def test_machine_code_without_a_gpu(architecture: str) -> None:
    cubin = compile_cubin(SOURCE, "twice.cu", architecture)
    assert cubin[:4] == b"\x7fELF"
    assert int.from_bytes(cubin[18:20], "little") == EM_CUDA
    assert b"twice" in cubin


def test_a_mistake_in_the_source_is_shown() -> None:
    with pytest.raises(CompileError, match=r"wrong\.cu does not compile for sm_80: (.|\n)*identifier \"missing\""):
        compile_cubin("__global__ void f() { missing(); }", "wrong.cu", "sm_80")


@pytest.mark.parametrize("architecture", ["sm_70", "compute_90", "sm_9", "", "sm_90;rm"])
def test_architectures_that_are_none(architecture: str) -> None:
    with pytest.raises(CompileError, match="must be sm_75 or newer"):
        compile_cubin(SOURCE, "twice.cu", architecture)


def test_missing_packages_are_named_with_the_line_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("nvidia-cuda-nvrtc", "nvidia-cublas"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert installed_versions(("nvidia-cuda-nvrtc",)) == {"nvidia-cuda-nvrtc": None}
    with pytest.raises(DeviceUnavailableError) as caught:
        require_packages((*COMPILING, *RUNNING), "running on a GPU")
    assert "nvidia-cuda-nvrtc, nvidia-cublas" in str(caught.value)
    assert INSTALL in str(caught.value)
    with pytest.raises(DeviceUnavailableError, match="nvidia-cuda-nvrtc"):
        compile_cubin(SOURCE, "twice.cu", "sm_90")
