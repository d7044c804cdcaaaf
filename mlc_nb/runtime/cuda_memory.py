"""A GPU's memory: what is free, and what this process takes of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mlc_nb.errors import DeviceUnavailableError
from mlc_nb.runtime.devices import cuda_memory
from mlc_nb.runtime.memory import MemoryRow

if TYPE_CHECKING:
    from mlc_nb.runtime.devices import CudaDevice

__all__ = ["CudaMemory"]


class CudaMemory:
    """Implements `DeviceMemory`.

    Parameters
    ----------
    device
        The GPU.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    def free_bytes(self) -> int:
        """Bytes that are free."""
        return cuda_memory(self._device)[0]

    def total_bytes(self) -> int:
        """Bytes of the whole GPU or MIG instance."""
        return cuda_memory(self._device)[1]

    def process_bytes(self) -> int:
        """Measure what this process takes, as nvidia-smi shows it.

        Where the driver does not tell processes apart (as in containers), it is what all of them take.
        """
        nvml = _nvml()
        handle = nvml.nvmlDeviceGetHandleByUUID(self._device.uuid)
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).used)

    def process_rows(self, engine_bytes: int) -> list[MemoryRow]:
        """Measure what is not of engines: the CUDA context, and what other libraries took."""
        return [MemoryRow("CUDA itself and other libraries", max(0, self.process_bytes() - engine_bytes))]


def _nvml() -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        raise DeviceUnavailableError(f"NVIDIA's management library cannot be used: {error}") from error
    return pynvml
