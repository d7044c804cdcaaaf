"""A CUDA driver whose device is a part of this process's memory: copies happen at once, launches are only recorded."""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


@dataclass
class Gpu:
    name: str = "Scripted GPU"
    capability: tuple[int, int] = (9, 0)
    uuid: bytes = bytes(range(16))


@dataclass
class Launched:
    """A launch: the kernel's name, the grid, and the words at the addresses of its arguments, 8 bytes each."""

    entry: str
    grid: tuple[int, int, int]
    arguments: int


@dataclass
class ScriptedDriver:
    """Implements what the runtime calls of ``cuda.bindings.driver``.

    ``memory`` is what is free. ``fails`` maps the name of a call to the result that it gives from then on.
    """

    version: int = 13000
    gpus: list[Gpu] = field(default_factory=lambda: [Gpu()])
    memory: int = 2**34
    fails: dict[str, Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.allocations: dict[int, Any] = {}
        self.alive: list[tuple[str, int]] = []
        self.launches: list[Launched] = []
        self.graph_launches: list[int] = []
        self.captures = 0
        self.CUresult = Result
        self.CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
        self.CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
        self.CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_HOST=1, CU_MEMORYTYPE_DEVICE=2)
        self.CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
        self.CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
        self.CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6)
        self.CUdevice_attribute = SimpleNamespace(
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="multiprocessors",
        )
        self._next = 1

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name.startswith("cu") and name in object.__getattribute__(self, "fails"):
            return lambda *_: (object.__getattribute__(self, "fails")[name],)
        return value

    def _new(self, kind: str) -> int:
        self._next += 1
        self.alive.append((kind, self._next))
        return self._next

    def _gone(self, kind: str, handle: int) -> tuple[Result]:
        self.alive.remove((kind, int(handle)))
        return (Result.CUDA_SUCCESS,)

    def cuInit(self, _flags: int) -> tuple[Result]:
        return (Result.CUDA_SUCCESS,)

    def cuDriverGetVersion(self) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, self.version

    def cuDeviceGetCount(self) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, len(self.gpus)

    def cuDeviceGet(self, ordinal: int) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, ordinal

    def cuDeviceGetName(self, length: int, device: int) -> tuple[Result, bytes]:
        return Result.CUDA_SUCCESS, self.gpus[device].name.encode().ljust(length, b"\0")

    def cuDeviceGetUuid(self, device: int) -> tuple[Result, Any]:
        return Result.CUDA_SUCCESS, SimpleNamespace(bytes=self.gpus[device].uuid)

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> tuple[Result, int]:
        major, minor = self.gpus[device].capability
        return Result.CUDA_SUCCESS, {"major": major, "minor": minor, "multiprocessors": 132}[attribute]

    def cuGetErrorString(self, status: Result) -> tuple[Result, bytes]:
        return Result.CUDA_SUCCESS, f"the scripted error {int(status)}".encode()

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Result, int]:
        self.alive.append(("context", device))
        return Result.CUDA_SUCCESS, 1000 + device

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[Result]:
        return self._gone("context", device)

    def cuCtxSetCurrent(self, _context: Any) -> tuple[Result]:
        return (Result.CUDA_SUCCESS,)

    cuCtxPushCurrent = cuCtxSetCurrent

    def cuCtxPopCurrent(self) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, 0

    def CUcontext(self, value: int) -> int:
        return value

    def cuMemGetInfo(self) -> tuple[Result, int, int]:
        taken = sum(len(one) for one in self.allocations.values())
        return Result.CUDA_SUCCESS, self.memory - taken, self.memory

    def cuMemAlloc(self, size: int) -> tuple[Result, int]:
        if size > self.cuMemGetInfo()[1]:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, 0
        block = ctypes.create_string_buffer(size)
        self.allocations[ctypes.addressof(block)] = block
        return Result.CUDA_SUCCESS, ctypes.addressof(block)

    def cuMemHostAlloc(self, size: int, _flags: int) -> tuple[Result, int]:
        block = ctypes.create_string_buffer(size)
        address = ctypes.addressof(block)
        self.alive.append(("host memory", address))
        self._host = [*getattr(self, "_host", []), block]
        return Result.CUDA_SUCCESS, address

    def cuMemFree(self, address: int) -> tuple[Result]:
        del self.allocations[int(address)]
        return (Result.CUDA_SUCCESS,)

    def cuMemFreeHost(self, address: int) -> tuple[Result]:
        return self._gone("host memory", address)

    def cuMemsetD8(self, address: int, value: int, size: int) -> tuple[Result]:
        ctypes.memset(address, value, size)
        return (Result.CUDA_SUCCESS,)

    def cuMemcpyHtoD(self, target: int, source: int, size: int) -> tuple[Result]:
        ctypes.memmove(target, source, size)
        return (Result.CUDA_SUCCESS,)

    def cuMemcpyDtoH(self, target: int, source: int, size: int) -> tuple[Result]:
        return self.cuMemcpyHtoD(target, source, size)

    def cuMemcpyHtoDAsync(self, target: int, source: int, size: int, _stream: int) -> tuple[Result]:
        return self.cuMemcpyHtoD(target, source, size)

    cuMemcpyDtoHAsync = cuMemcpyHtoDAsync

    def CUDA_MEMCPY2D(self) -> Any:
        return SimpleNamespace()

    def cuMemcpy2DAsync(self, copy: Any, _stream: int) -> tuple[Result]:
        for row in range(copy.Height):
            ctypes.memmove(copy.dstDevice + row * copy.dstPitch, copy.srcHost + row * copy.srcPitch, copy.WidthInBytes)
        return (Result.CUDA_SUCCESS,)

    def cuStreamCreate(self, _flags: int) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, self._new("stream")

    def cuStreamSynchronize(self, _stream: int) -> tuple[Result]:
        return (Result.CUDA_SUCCESS,)

    def cuStreamDestroy(self, stream: int) -> tuple[Result]:
        return self._gone("stream", stream)

    def cuEventCreate(self, _flags: int) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, self._new("event")

    def cuEventDestroy(self, event: int) -> tuple[Result]:
        return self._gone("event", event)

    def cuEventRecord(self, _event: int, _stream: int) -> tuple[Result]:
        return (Result.CUDA_SUCCESS,)

    def cuEventSynchronize(self, _event: int) -> tuple[Result]:
        return (Result.CUDA_SUCCESS,)

    def cuModuleLoadData(self, _image: bytes) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, self._new("module")

    def cuModuleUnload(self, module: int) -> tuple[Result]:
        return self._gone("module", module)

    def cuModuleGetFunction(self, _module: int, entry: bytes) -> tuple[Result, str]:
        return Result.CUDA_SUCCESS, entry.decode()

    def cuFuncSetAttribute(self, *_: Any) -> tuple[Result]:
        return (Result.CUDA_SUCCESS,)

    def cuLaunchKernel(self, function: str, x: int, y: int, z: int, *rest: Any) -> tuple[Result]:
        self.launches.append(Launched(function, (x, y, z), rest[5]))
        return (Result.CUDA_SUCCESS,)

    def CUlaunchAttribute(self) -> Any:
        return SimpleNamespace(value=SimpleNamespace())

    def CUlaunchConfig(self) -> Any:
        return SimpleNamespace()

    def cuLaunchKernelEx(self, config: Any, function: str, arguments: int, _extra: int) -> tuple[Result]:
        self.launches.append(Launched(function, (config.gridDimX, config.gridDimY, config.gridDimZ), arguments))
        return (Result.CUDA_SUCCESS,)

    def cuStreamBeginCapture(self, _stream: int, _mode: int) -> tuple[Result]:
        self.captures += 1
        return (Result.CUDA_SUCCESS,)

    def cuStreamEndCapture(self, _stream: int) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, self._new("captured")

    def cuGraphInstantiate(self, _captured: int, _flags: int) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, self._new("graph")

    def cuGraphDestroy(self, captured: int) -> tuple[Result]:
        return self._gone("captured", captured)

    def cuGraphExecDestroy(self, graph: int) -> tuple[Result]:
        return self._gone("graph", graph)

    def cuGraphLaunch(self, graph: int, _stream: int) -> tuple[Result]:
        self.graph_launches.append(graph)
        return (Result.CUDA_SUCCESS,)
