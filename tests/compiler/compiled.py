"""Compiles single kernels for one ISA level and calls them with numpy arrays, on this machine's processor."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm

from mlc_nb.compiler.kernels.cpu.isa import IsaLevel, isa_level
from mlc_nb.compiler.pipeline import pass_context, target_of
from mlc_nb.runtime.isa import runnable_isas

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

LEVELS = runnable_isas()


@cache
def compile_kernel(level_name: str, make: Callable[..., tvm.tirx.PrimFunc], *arguments: Any) -> tvm.runtime.Module:
    """Compile ``make(level, *arguments)`` under the name ``kernel``, once a test session."""
    function = make(isa_level(level_name), *arguments).with_attr("global_symbol", "kernel")
    with pass_context():
        return tvm.compile(tvm.IRModule({"kernel": function}), target=target_of(isa_level(level_name))).mod


def assembly(level_name: str, make: Callable[[IsaLevel], tvm.tirx.PrimFunc], *arguments: Any) -> str:
    """The kernel's machine code as text; any level can be asked for, whatever this machine can run."""
    return str(compile_kernel(level_name, make, *arguments).inspect_source("asm"))


def tensor(array: npt.NDArray[Any]) -> tvm.runtime.Tensor:
    """A copy of an array that compiled code can read and write."""
    return tvm.runtime.tensor(np.ascontiguousarray(array))


def run_kernel(kernel: tvm.runtime.Module, *arguments: Any) -> None:
    """Call a kernel; arrays that it is to write to must be tensors made with `tensor`."""
    kernel["kernel"](*(tensor(value) if isinstance(value, np.ndarray) else value for value in arguments))


def use_threads(count: int) -> None:
    """Set the number of threads on which kernels run."""
    tvm.get_global_func("runtime.config_threadpool")(0, count)
