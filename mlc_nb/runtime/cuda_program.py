"""A launch plan on a device: its buffers placed, its kernels loaded, its launches ready to be queued."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlc_nb.errors import ModelFormatError
from mlc_nb.runtime.cublas import PreparedProduct
from mlc_nb.runtime.cuda_driver import call, driver
from mlc_nb.weights.launch_plan import Launch, Product, compile_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mlc_nb.runtime.cublas import Cublas
    from mlc_nb.runtime.cuda_driver import Context
    from mlc_nb.weights.launch_plan import Argument, LaunchPlan, Sequenced

__all__ = ["CudaProgram", "Queue"]


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launch with everything but the sizes."""

    function: Any
    parameters: int
    grid: int
    threads: int
    shared_bytes: int
    entry: str


class Queue:
    """Launches in order, ready for any sizes up to ``most``."""

    def __init__(self, most: int, steps: list[_Launch | PreparedProduct]) -> None:
        self.most = most
        self.steps = steps


class CudaProgram:
    """The bodies, heads and sampling of a plan.

    Arguments of a kernel are cells that its launches point to. Cells of addresses and numbers keep their values; those
    of sizes are set before the launches are queued, and read while they are.

    Parameters
    ----------
    context
        The device.
    plan, image
        The launch plan and the machine code of its kernels.
    limits
        Sizes that are the same in all steps.
    buffers
        Bytes of each of the plan's buffers.
    places
        Addresses of the buffers that are not the plan's own.
    parameters
        Addresses of the model's parameters.
    cublas
        Carries out products.
    """

    def __init__(
        self,
        context: Context,
        plan: LaunchPlan,
        image: bytes,
        *,
        limits: Mapping[str, int],
        buffers: Mapping[str, int],
        places: Mapping[str, int],
        parameters: Sequence[int],
        cublas: Cublas,
    ) -> None:
        self._context = context
        self._cublas = cublas
        self._parameters = parameters
        self._plan = plan
        self._limits = dict(limits)
        self.places = {**places, **{name: context.allocate(size, "work space") for name, size in buffers.items()}}
        for name, size in buffers.items():
            # Counters must begin at zero, and nothing should depend on what was there.
            call(driver().cuMemsetD8(self.places[name], 0, size), "clearing work space")
        self._module = context.load_module(image)
        self._functions = {name: self._function(name) for name in plan.kernels}
        self._cells: dict[tuple[str, Any], Any] = {}
        self._arrays: list[Any] = []
        self._grids: dict[tuple[str, str, str], int] = {}
        self._grid_sizes: list[tuple[Callable[[Mapping[str, int]], int], ...]] = []
        self.bodies = [self._queue(body) for body in plan.bodies]
        self.heads = [self._queue(head) for head in plan.heads]
        self.sampling = Queue(0, [self._prepare(plan.sampling)])

    def move(self, name: str, address: int) -> None:
        """Give a buffer that is not the plan's own another address, for all launches that are queued from now on."""
        old = ("address", self.places[name])
        cell = self._cells.pop(old, None)
        self.places[name] = address
        if cell is not None:
            cell.value = address
            self._cells["address", address] = cell

    def set_limit(self, name: str, value: int) -> None:
        """Change a size that is the same in all steps."""
        self._limits[name] = value
        cell = self._cells.get(("size", name))
        if cell is not None:
            cell.value = value

    def run_one(self, launch: Launch, sizes: Mapping[str, int]) -> None:
        """Queue a launch that is not part of a step."""
        self.run(Queue(0, [self._prepare(launch)]), sizes)

    def run(self, queue: Queue, sizes: Mapping[str, int], *, overlapping: bool = False) -> None:
        """Queue all launches on the stream.

        Parameters
        ----------
        sizes
            A value for each size that launches depend on.
        overlapping
            Whether a kernel may be set up while the one before it ends (a launch attribute, which costs host time;
            meant for capturing).
        """
        for name, size in sizes.items():
            cell = self._cells.get(("size", name))
            if cell is not None:
                cell.value = size
        known = {**self._limits, **sizes}
        grids: dict[int, tuple[int, ...]] = {}
        launch = driver().cuLaunchKernel
        stream = self._context.stream
        for step in queue.steps:
            if isinstance(step, PreparedProduct):
                self._cublas.product(step, sizes[step.m])
                continue
            grid = grids.get(step.grid)
            if grid is None:
                grid = grids[step.grid] = tuple([extent(known) for extent in self._grid_sizes[step.grid]])
            x, y, z = grid
            if not (x and y and z):
                continue
            if overlapping:
                self._launch_overlapping(step, (x, y, z))
                continue
            (status,) = launch(
                step.function, x, y, z, step.threads, 1, 1, step.shared_bytes, stream, step.parameters, 0
            )
            if status:
                call((status,), f"launching {step.entry}")

    def _launch_overlapping(self, step: _Launch, grid: tuple[int, int, int]) -> None:
        cu = driver()
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = step.threads, 1, 1
        config.sharedMemBytes = step.shared_bytes
        config.hStream = self._context.stream
        config.attrs = [attribute]
        config.numAttrs = 1
        call(cu.cuLaunchKernelEx(config, step.function, step.parameters, 0), f"launching {step.entry}")

    def _function(self, name: str) -> Any:
        cu = driver()
        kernel = self._plan.kernels[name]
        function = call(cu.cuModuleGetFunction(self._module, kernel.entry.encode()), f"finding {kernel.entry}")
        if kernel.shared_bytes:
            # Without it, what a kernel declares and this together are limited to 48 KiB.
            limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(cu.cuFuncSetAttribute(function, limit, kernel.shared_bytes), f"giving {kernel.entry} shared memory")
        return function

    def _queue(self, plan: Sequenced) -> Queue:
        return Queue(plan.most, [self._prepare(step) for step in plan.steps])

    def _prepare(self, step: Launch | Product) -> _Launch | PreparedProduct:
        if isinstance(step, Product):
            return PreparedProduct(
                self._address(step.weight),
                self._address(step.inputs),
                self._address(step.output),
                step.m,
                (step.rows, step.columns),
                step.output_stride,
                (step.dtype, step.output_dtype),
                step.add,
            )
        kernel = self._plan.kernels[step.kernel]
        cells = [self._cell(argument) for argument in step.arguments]
        array = (ctypes.c_void_p * max(1, len(cells)))(*[ctypes.addressof(cell) for cell in cells])
        self._arrays.append(array)
        grid = self._grids.get(kernel.grid)
        if grid is None:
            grid = self._grids[kernel.grid] = len(self._grid_sizes)
            self._grid_sizes.append(tuple(compile_size(extent) for extent in kernel.grid))
        return _Launch(
            self._functions[step.kernel],
            ctypes.addressof(array),
            grid,
            kernel.threads,
            kernel.shared_bytes,
            kernel.entry,
        )

    def _cell(self, argument: Argument) -> Any:
        if argument.kind == "size":
            key: tuple[str, Any] = ("size", argument.name)
            made: Any = ctypes.c_int32(self._limits.get(argument.name, 0))
        elif argument.kind == "number":
            key, made = ("number", argument.value), ctypes.c_int32(int(argument.value))
        elif argument.kind == "real":
            key, made = ("real", argument.value), ctypes.c_float(argument.value)
        else:
            address = self._address(argument)
            key, made = ("address", address), ctypes.c_void_p(address)
        return self._cells.setdefault(key, made)

    def _address(self, argument: Argument) -> int:
        if argument.kind == "null":
            return 0
        if argument.kind == "parameter":
            return self._parameters[int(argument.value)] + argument.offset
        if argument.name not in self.places:
            raise ModelFormatError(f"the launch plan uses a buffer {argument.name!r}, which it does not place")
        return self.places[argument.name] + argument.offset
