"""Which device a model runs on: ``cpu``, ``cuda``, ``cuda:1``, ``cuda:MIG-...``, or what ``auto`` finds here."""

from __future__ import annotations

import ctypes
import logging
import re
import sys
import uuid
from dataclasses import dataclass
from functools import cache
from typing import Any

from mlc_nb.cuda_wheels import COMPILING, RUNNING, require_packages
from mlc_nb.errors import DeviceUnavailableError
from mlc_nb.runtime.cuda_driver import call, driver

__all__ = ["CudaDevice", "cuda_memory", "find_cuda_device", "resolve_device", "sees_gpu"]

_log = logging.getLogger(__name__)

_NEEDED_CUDA = 13000  # as cuDriverGetVersion counts: 13.0, which driver 580 brought
_NEEDED_CAPABILITY = (7, 5)


@dataclass(frozen=True)
class CudaDevice:
    """A GPU (or a MIG instance) that models can run on.

    Attributes
    ----------
    ordinal
        Its place among those that ``CUDA_VISIBLE_DEVICES`` leaves.
    name
        What NVIDIA calls it.
    capability
        Its compute capability, such as ``(9, 0)``.
    uuid
        Its identity, ``GPU-...`` or, for a MIG instance, the same digits as its ``MIG-...`` name.
    multiprocessors
        How many it has.
    """

    ordinal: int
    name: str
    capability: tuple[int, int]
    uuid: str
    multiprocessors: int

    @property
    def architecture(self) -> str:
        """What to compile for."""
        major, minor = self.capability
        return f"sm_{major}{minor}"

    @property
    def device(self) -> str:
        """The name by which it is asked for."""
        return f"cuda:{self.ordinal}"


def resolve_device(device: str) -> str:
    """Make one name for each device: ``cpu``, or ``cuda:`` and a number.

    ``auto`` takes the first GPU if it can be used, else the CPU; why not, is said once where there is one.

    Raises
    ------
    DeviceUnavailableError
        If the device is unknown or cannot be used; the message says why.
    """
    if device == "cpu":
        return device
    if device == "auto":
        return _automatic()
    return find_cuda_device(device).device


@cache
def _automatic() -> str:
    if not sees_gpu():
        return "cpu"
    try:
        return find_cuda_device("cuda").device
    except DeviceUnavailableError as error:
        _log.warning("There is a GPU here, but models run on the CPU: %s", error)
        return "cpu"


def find_cuda_device(device: str) -> CudaDevice:
    """Check that a GPU can be used.

    Parameters
    ----------
    device
        ``cuda`` (the first), ``cuda:N``, or ``cuda:`` and the beginning of a name that ``nvidia-smi -L`` shows.

    Raises
    ------
    DeviceUnavailableError
        If there is no such GPU, or driver, packages or the GPU itself are too old; the message says which.
    """
    match = re.fullmatch(r"cuda(?::(?P<number>\d{1,4})|:(?P<uuid>(?:GPU|MIG)-[0-9a-fA-F-]+))?", device)
    if match is None:
        raise DeviceUnavailableError(
            f"device {device!r} is not known; use 'auto', 'cpu', 'cuda', 'cuda:N', or 'cuda:' and a name that "
            "nvidia-smi -L shows"
        )
    cu = driver()
    version = int(call(cu.cuDriverGetVersion(), "reading the driver's version"))
    if version < _NEEDED_CUDA:
        raise DeviceUnavailableError(
            f"NVIDIA's driver here supports CUDA {version // 1000}.{version % 1000 // 10}; mlc_nb needs CUDA 13, which "
            "is driver 580 or newer. Update the driver, or use device='cpu'."
        )
    found = [_describe(ordinal) for ordinal in range(call(cu.cuDeviceGetCount(), "counting the devices"))]
    if match["uuid"]:
        wanted = match["uuid"].partition("-")[2].lower()
        chosen = [one for one in found if one.uuid.partition("-")[2].startswith(wanted)]
    else:
        chosen = [one for one in found if one.ordinal == int(match["number"] or 0)]
    if len(chosen) != 1:
        names = "; ".join(f"{one.device} {one.name} ({one.uuid})" for one in found) or "none"
        raise DeviceUnavailableError(
            f"device {device!r} is not here; GPUs that CUDA_VISIBLE_DEVICES and the driver show: {names}"
        )
    (gpu,) = chosen
    if gpu.capability < _NEEDED_CAPABILITY:
        raise DeviceUnavailableError(
            f"{gpu.name} ({gpu.device}) has compute capability {gpu.capability[0]}.{gpu.capability[1]}; CUDA 13 needs "
            "7.5 or newer. Use device='cpu'."
        )
    require_packages((*COMPILING, *RUNNING), f"running on {gpu.name}")
    return gpu


def _describe(ordinal: int) -> CudaDevice:
    cu = driver()
    handle = call(cu.cuDeviceGet(ordinal), "opening a device")
    name = call(cu.cuDeviceGetName(128, handle), "reading a device's name").split(b"\0")[0].decode()
    identity = uuid.UUID(bytes=bytes(call(cu.cuDeviceGetUuid(handle), "reading a device's identity").bytes))
    return CudaDevice(
        ordinal,
        name,
        (_attribute(handle, "COMPUTE_CAPABILITY_MAJOR"), _attribute(handle, "COMPUTE_CAPABILITY_MINOR")),
        f"GPU-{identity}",
        _attribute(handle, "MULTIPROCESSOR_COUNT"),
    )


def _attribute(handle: Any, name: str) -> int:
    attribute = getattr(driver().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call(driver().cuDeviceGetAttribute(attribute, handle), "reading a device's properties"))


def cuda_memory(device: CudaDevice) -> tuple[int, int]:
    """Bytes of the device's memory that are free, and all. On any thread, whose current context stays as it was."""
    cu = driver()
    handle = call(cu.cuDeviceGet(device.ordinal), "opening a device")
    context = call(cu.cuDevicePrimaryCtxRetain(handle), "opening the device")
    try:
        call(cu.cuCtxPushCurrent(context), "opening the device")
        try:
            free, total = call(cu.cuMemGetInfo(), "reading the free memory")
            return int(free), int(total)
        finally:
            cu.cuCtxPopCurrent()
    finally:
        cu.cuDevicePrimaryCtxRelease(handle)


def sees_gpu() -> bool:
    """Whether NVIDIA's driver is here and has a device, whatever else may be missing."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    stub_library, no_device = 34, 100
    status = int(library.cuInit(0))
    if status in (stub_library, no_device):
        return False
    count = ctypes.c_int(0)
    # A driver that does not start is a reason to give, not a machine without a GPU.
    return status != 0 or (library.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0)
