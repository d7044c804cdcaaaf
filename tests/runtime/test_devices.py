"""Which device a model runs on: names, refusals with their reasons, and what ``auto`` does without a GPU."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from mlc_nb import MLCEngine
from mlc_nb.cuda_wheels import INSTALL
from mlc_nb.errors import DeviceUnavailableError, OutOfMemoryError
from mlc_nb.runtime import devices
from mlc_nb.runtime.cuda_driver import Context
from mlc_nb.runtime.devices import cuda_memory, find_cuda_device, resolve_device, sees_gpu
from tests.runtime.scripted_cuda import Gpu, Result

if TYPE_CHECKING:
    from tests.runtime.scripted_cuda import ScriptedDriver

without_gpu = pytest.mark.skipif(sees_gpu(), reason="this machine has a GPU")


@without_gpu
def test_cuda_without_a_driver_is_one_clear_error() -> None:
    with pytest.raises(DeviceUnavailableError, match=r"NVIDIA's driver cannot be loaded: .*580 or newer") as caught:
        MLCEngine(device="cuda")
    assert INSTALL in str(caught.value)


@without_gpu
def test_auto_without_a_gpu_is_the_cpu_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert resolve_device("auto") == "cpu"
    assert not caplog.records


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda0", "", "rocm", "cuda:GPU-xyz"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(DeviceUnavailableError, match="is not known; use 'auto', 'cpu', 'cuda'"):
        resolve_device(name)


def test_each_gpu_has_one_name(scripted: ScriptedDriver) -> None:
    scripted.gpus = [Gpu(uuid=bytes(range(16))), Gpu(name="Another", capability=(8, 9), uuid=bytes(range(16, 32)))]
    assert resolve_device("cuda") == resolve_device("cuda:0") == "cuda:0"
    assert resolve_device("cuda:GPU-10111213") == resolve_device("cuda:MIG-10111213-1415-1617") == "cuda:1"
    another = find_cuda_device("cuda:1")
    assert (another.name, another.architecture) == ("Another", "sm_89")
    with pytest.raises(DeviceUnavailableError, match=r"device 'cuda:2' is not here; .*cuda:1 Another \(GPU-10111213"):
        resolve_device("cuda:2")


def test_what_is_too_old_is_refused_with_the_reason(scripted: ScriptedDriver) -> None:
    scripted.gpus = [Gpu(name="Old One", capability=(7, 0))]
    with pytest.raises(DeviceUnavailableError, match=r"Old One \(cuda:0\) has compute capability 7\.0; .*7\.5 or"):
        find_cuda_device("cuda")
    scripted.version = 12080
    with pytest.raises(DeviceUnavailableError, match=r"supports CUDA 12\.8; mlc_nb needs CUDA 13, which is driver 580"):
        find_cuda_device("cuda")


def test_auto_says_once_why_a_gpu_is_not_used(
    scripted: ScriptedDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "sees_gpu", lambda: True)
    scripted.version = 12080
    assert [resolve_device("auto") for _ in range(3)] == ["cpu"] * 3
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "There is a GPU here, but models run on the CPU"
    ]


def test_auto_takes_a_gpu_that_can_be_used(scripted: ScriptedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "sees_gpu", lambda: True)
    assert scripted.gpus
    assert resolve_device("auto") == "cuda:0"


def test_reading_the_free_memory_leaves_nothing_behind(scripted: ScriptedDriver) -> None:
    scripted.memory = 1000
    assert cuda_memory(find_cuda_device("cuda")) == (1000, 1000)
    scripted.fails["cuMemGetInfo"] = Result.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DeviceUnavailableError, match=r"reading the free memory: the scripted error 700 \(CUDA_"):
        cuda_memory(find_cuda_device("cuda"))
    assert scripted.alive == []


def test_a_context_frees_everything_and_reports_memory_that_is_not_there(scripted: ScriptedDriver) -> None:
    scripted.memory = 4096
    context = Context(0)
    context.allocate(1024, "the weights")
    context.allocate_host(64)
    context.event()
    context.load_module(b"")
    assert context.allocated_bytes == 1024
    with pytest.raises(OutOfMemoryError, match=r"no memory left: CUDA failed while allocating 1 MiB for the KV cache"):
        context.allocate(2**20, "the KV cache")
    context.close()
    context.close()
    assert (scripted.allocations, scripted.alive) == ({}, [])
