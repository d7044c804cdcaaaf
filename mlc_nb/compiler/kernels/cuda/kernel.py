"""What a kernel written in CUDA C++ tells those who compile and launch it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["CudaKernel", "KernelArgument", "module_source"]


@dataclass(frozen=True)
class KernelArgument:
    """One parameter of a kernel.

    Attributes
    ----------
    name
        As in the CUDA source.
    dtype
        Of the value, or of what the pointer points to, in numpy's spelling (``bfloat16`` beside those).
    scalar
        Passed by value; otherwise a device pointer, aligned to 16 bytes.
    written
        Whether the kernel writes there.
    """

    name: str
    dtype: str
    scalar: bool = False
    written: bool = False


@dataclass(frozen=True)
class CudaKernel:
    """A kernel for fixed shapes.

    Every kernel can be captured in a CUDA graph: it reads sizes that change between replays from device memory, and a
    row whose position is negative (padding up to a bucket) is neither read nor written. Every kernel begins with
    ``griddepcontrol.wait`` where the architecture has it, so it may be launched with the attribute "programmatic
    stream serialization", which lets it load weights while the kernel before it ends; without it nothing changes.

    Attributes
    ----------
    entry
        Its ``extern "C"`` name, unique for its shapes.
    headers
        Files of this folder that its definition needs, in order.
    definition
        The ``extern "C" __global__`` function.
    arguments
        In order.
    sizes
        Names of the runtime sizes that the grid depends on.
    grid
        Takes ``sizes`` as keywords and gives the grid ``(x, y, z)``, by ``+ - * //`` alone: TIR variables do as well as
        integers.
    threads
        Threads of a block (one dimension).
    shared_bytes
        Dynamic shared memory; where there is any, the launcher must raise the function's limit to it first, since it
        adds to what the kernel declares itself.
    minimum_capability
        The oldest compute capability that it compiles for, ten times the number.
    """

    entry: str
    headers: tuple[str, ...]
    definition: str
    arguments: tuple[KernelArgument, ...]
    sizes: tuple[str, ...]
    grid: Callable[..., tuple[Any, Any, Any]]
    threads: int
    shared_bytes: int = 0
    minimum_capability: int = 75


@cache
def _header(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def module_source(kernels: Iterable[CudaKernel]) -> str:
    """CUDA source of one module with all of ``kernels``; each header and each entry comes once, in order.

    It includes nothing, so that NVRTC needs no header from any toolkit.
    """
    unique = {kernel.entry: kernel for kernel in kernels}
    headers = dict.fromkeys(name for kernel in unique.values() for name in kernel.headers)
    return "\n".join([*(_header(name) for name in headers), *(kernel.definition for kernel in unique.values())])
