"""NVIDIA's driver API: every call checked, every failure one of our errors."""

from __future__ import annotations

from functools import cache
from typing import Any

from mlc_nb.cuda_wheels import INSTALL, require_packages
from mlc_nb.errors import DeviceUnavailableError, OutOfMemoryError

__all__ = ["Context", "call", "driver"]


@cache
def driver() -> Any:
    """The driver's bindings, initialised.

    Raises
    ------
    DeviceUnavailableError
        If the package or the driver is missing, or the driver does not start; the message holds its reason.
    """
    require_packages(("cuda-bindings",), "running on CUDA")
    try:
        from cuda.bindings import driver as bindings

        (status,) = bindings.cuInit(0)
    except Exception as error:  # of several types, by what of the library is missing
        raise DeviceUnavailableError(
            f"NVIDIA's driver cannot be loaded: {' '.join(str(error).split())} Install the driver (580 or newer), or "
            f"the bindings once more: {INSTALL}"
        ) from error
    if status != bindings.CUresult.CUDA_SUCCESS:
        raise DeviceUnavailableError(
            f"NVIDIA's driver does not start: {status.name}. Check that nvidia-smi shows a GPU here."
        )
    return bindings


def call(answer: tuple[Any, ...], doing: str) -> Any:
    """The value of a driver call.

    Parameters
    ----------
    answer
        What the binding returned: a status, then values.
    doing
        What the call was for, for the message: "CUDA failed while <doing>".

    Raises
    ------
    OutOfMemoryError
        If the device or the host had no memory for it.
    DeviceUnavailableError
        If the call failed for any other reason.
    """
    # Not unpacked with a star: this runs for every launch.
    status = answer[0]
    if status:
        _fail(status, doing)
    return answer[1] if len(answer) == 2 else answer[1:]


def _fail(status: Any, doing: str) -> None:
    if status.name == "CUDA_ERROR_OUT_OF_MEMORY":
        raise OutOfMemoryError(
            f"the GPU has no memory left: CUDA failed while {doing}. Free memory or choose a smaller model."
        )
    described = driver().cuGetErrorString(status)
    text = described[1].decode() if not described[0] and described[1] else "no description"
    raise DeviceUnavailableError(f"CUDA failed while {doing}: {text} ({status.name}). Make a new engine.")


class Context:
    """A device's primary context, made current for the thread that makes this object; also its memory and stream.

    Everything that was made through it is freed by `close`, in any state of the device.

    Parameters
    ----------
    ordinal
        The device, as the driver counts the visible ones.
    """

    def __init__(self, ordinal: int) -> None:
        cu = driver()
        self._device = call(cu.cuDeviceGet(ordinal), "opening the device")
        self._allocations: dict[int, int] = {}
        self._host_allocations: list[int] = []
        self._events: list[Any] = []
        self._modules: list[Any] = []
        self._stream: Any = None
        self._context = call(cu.cuDevicePrimaryCtxRetain(self._device), "opening the device")
        try:
            call(cu.cuCtxSetCurrent(self._context), "opening the device")
            flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
            self._stream = call(cu.cuStreamCreate(flags), "making a stream")
        except BaseException:
            self.close()
            raise

    @property
    def stream(self) -> Any:
        """The one stream on which everything of an engine runs, in order."""
        return self._stream

    def free_memory(self) -> int:
        """Bytes of the device that are free."""
        return int(call(driver().cuMemGetInfo(), "reading the free memory")[0])

    def allocate(self, size: int, purpose: str) -> int:
        """Device memory that lasts until `close`; its address, a multiple of 256."""
        pointer = int(call(driver().cuMemAlloc(max(size, 256)), f"allocating {size / 2**20:,.0f} MiB for {purpose}"))
        self._allocations[pointer] = size
        return pointer

    def free(self, pointer: int) -> None:
        """Free device memory before `close` does."""
        del self._allocations[pointer]
        call(driver().cuMemFree(pointer), "freeing memory")

    @property
    def allocated_bytes(self) -> int:
        """Device memory that was allocated and not freed."""
        return sum(self._allocations.values())

    def allocate_host(self, size: int) -> int:
        """Page-locked host memory, from and to which copies run in stream order; its address."""
        address = int(call(driver().cuMemHostAlloc(max(size, 256), 0), "allocating page-locked memory"))
        self._host_allocations.append(address)
        return address

    def event(self) -> Any:
        """A new event without timing."""
        event = call(driver().cuEventCreate(driver().CUevent_flags.CU_EVENT_DISABLE_TIMING), "making an event")
        self._events.append(event)
        return event

    def load_module(self, image: bytes) -> Any:
        """Load a cubin."""
        module = call(driver().cuModuleLoadData(image), "loading the compiled kernels")
        self._modules.append(module)
        return module

    def synchronize(self) -> None:
        """Wait for all work of the stream."""
        call(driver().cuStreamSynchronize(self._stream), "waiting for a step")

    def close(self) -> None:
        """Free everything; a second call does nothing. On any thread; failures of a broken device are passed over."""
        if self._context is None:
            return
        cu = driver()
        cu.cuCtxSetCurrent(self._context)
        if self._stream is not None:
            cu.cuStreamSynchronize(self._stream)
        for event in self._events:
            cu.cuEventDestroy(event)
        for module in self._modules:
            cu.cuModuleUnload(module)
        for pointer in self._allocations:
            cu.cuMemFree(pointer)
        for address in self._host_allocations:
            cu.cuMemFreeHost(address)
        if self._stream is not None:
            cu.cuStreamDestroy(self._stream)
        cu.cuCtxSetCurrent(cu.CUcontext(0))
        cu.cuDevicePrimaryCtxRelease(self._device)
        self._context = self._stream = None
        self._events, self._modules, self._allocations, self._host_allocations = [], [], {}, []
