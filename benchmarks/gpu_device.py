"""Compiles kernels, launches them beside torch and times them, on the machine with the GPU. For ``gpu_kernels.py``."""

from __future__ import annotations

import ctypes
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

from mlc_nb.compiler.kernels.cuda.kernel import module_source
from mlc_nb.compiler.toolchain import compile_cubin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mlc_nb.compiler.kernels.cuda.kernel import CudaKernel

__all__ = ["Device", "Launch", "compile_kernels", "time_calls"]

_SCALARS = {"int32": ctypes.c_int, "float32": ctypes.c_float}

Launch = "Callable[[], None]"
"""Enqueues one kernel on torch's current stream."""


def compile_kernels(kernels: Iterable[CudaKernel], architecture: str) -> dict[str, bytes]:
    """Machine code by entry name; in processes, so call it before anything touches CUDA."""
    unique = list({kernel.entry: kernel for kernel in kernels}.values())
    sources = [module_source([kernel]) for kernel in unique]
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(mp_context=context) as pool:
        cubins = pool.map(compile_cubin, sources, [k.entry for k in unique], [architecture] * len(unique))
        return {kernel.entry: cubin for kernel, cubin in zip(unique, cubins, strict=True)}


class Device:
    """The GPU with the compiled kernels loaded.

    ``overlaps`` says whether a kernel may start while the one before it ends (programmatic stream serialization).
    """

    def __init__(self, cubins: dict[str, bytes]) -> None:
        import torch
        from cuda.bindings import driver

        torch.zeros(1, device="cuda")
        self.torch = torch
        self.driver = driver
        self.overlaps = False
        self._functions: dict[str, Any] = {}
        for entry, cubin in cubins.items():
            module = self._checked(driver.cuModuleLoadData(cubin))
            self._functions[entry] = self._checked(driver.cuModuleGetFunction(module, entry.encode()))

    def _checked(self, answer: tuple[Any, ...]) -> Any:
        status, *values = answer
        if status != self.driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA driver: {status.name}")
        return values[0] if values else None

    def bind(self, kernel: CudaKernel, arguments: dict[str, Any], **sizes: int) -> Callable[[], None]:
        """A launch of ``kernel`` with tensors, numbers, or nothing (null) for its arguments, by name."""
        unknown = set(arguments) - {argument.name for argument in kernel.arguments}
        assert not unknown, f"{kernel.entry} has no arguments {sorted(unknown)}"
        function = self._functions[kernel.entry]
        driver = self.driver
        if kernel.shared_bytes:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._checked(driver.cuFuncSetAttribute(function, attribute, kernel.shared_bytes))
        values: list[Any] = []
        types: list[Any] = []
        for argument in kernel.arguments:
            given = arguments.get(argument.name)
            if argument.scalar:
                assert given is not None, f"{kernel.entry} needs {argument.name}"
                values.append(given)
                types.append(_SCALARS[argument.dtype])
            else:
                values.append(0 if given is None else given.data_ptr())
                types.append(ctypes.c_void_p)
        parameters = (tuple(values), tuple(types))
        grid = kernel.grid(**sizes)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
        config.sharedMemBytes = kernel.shared_bytes
        if self.overlaps:
            overlap = driver.CUlaunchAttribute()
            overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            allowed = driver.CUlaunchAttributeValue()
            allowed.programmaticStreamSerializationAllowed = 1
            overlap.value = allowed
            config.attrs = [overlap]
            config.numAttrs = 1
        keep_alive = [given for given in arguments.values() if given is not None]

        def launch() -> None:
            config.hStream = driver.CUstream(self.torch.cuda.current_stream().cuda_stream)
            self._checked(driver.cuLaunchKernelEx(config, function, parameters, 0))
            assert keep_alive is not None

        return launch

    def run(self, kernel: CudaKernel, arguments: dict[str, Any], **sizes: int) -> None:
        """Launch once and wait; an error of the kernel is raised here."""
        self.bind(kernel, arguments, **sizes)()
        self.torch.cuda.synchronize()


def time_calls(torch: Any, calls: Sequence[Callable[[], Any]], replays: int = 20, warm_ups: int = 3) -> float:
    """Median seconds of one pass over ``calls``, replayed as one CUDA graph."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(warm_ups):
        graph.replay()
    times: list[float] = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
