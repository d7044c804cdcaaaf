"""Matrix products by cuBLAS, on one stream and in a workspace of ours, so that they can be captured in CUDA graphs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from mlc_nb.cuda_wheels import INSTALL
from mlc_nb.errors import DeviceUnavailableError

__all__ = ["WORKSPACE_BYTES", "Cublas", "PreparedProduct"]

WORKSPACE_BYTES = 32 * 2**20
"""What NVIDIA recommends for Hopper; smaller GPUs need less."""

# cublas_api.h and library_types.h.
_TRANSPOSED, _AS_IT_IS = 1, 0
_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
_COMPUTE_FLOAT32 = 68
_DEFAULT_ALGORITHM = -1


@dataclass(frozen=True, slots=True)
class PreparedProduct:
    """``output = inputs @ weight.T`` with everything but the number of rows M of its inputs.

    Attributes
    ----------
    weight, inputs, output
        Addresses of ``[N, K]``, ``[M, K]`` and ``[M, N]``.
    m
        The size that says M.
    shape
        N and K.
    output_stride
        Elements from one row of the output to the next; the rows of the others follow each other.
    dtypes
        Of weight and inputs, and of the output.
    add
        Whether to add to what the output holds.
    """

    weight: int
    inputs: int
    output: int
    m: str
    shape: tuple[int, int]
    output_stride: int
    dtypes: tuple[str, str]
    add: bool


class Cublas:
    """A handle of cuBLAS.

    Parameters
    ----------
    stream
        Address of the stream that products run on.
    workspace
        Address of `WORKSPACE_BYTES` on the device, which no other work may use.

    Raises
    ------
    DeviceUnavailableError
        If the library cannot be loaded or does not start.
    """

    def __init__(self, stream: int, workspace: int) -> None:
        self._library = _load()
        self._handle = ctypes.c_void_p()
        self._zero, self._one = ctypes.c_float(0.0), ctypes.c_float(1.0)
        _check(self._library.cublasCreate_v2(ctypes.byref(self._handle)), "starting")
        _check(self._library.cublasSetStream_v2(self._handle, ctypes.c_void_p(stream)), "taking the stream")
        # After the stream: setting one takes the default workspace.
        size = ctypes.c_size_t(WORKSPACE_BYTES)
        place = ctypes.c_void_p(workspace)
        _check(self._library.cublasSetWorkspace_v2(self._handle, place, size), "taking the workspace")
        self._zero_address, self._one_address = ctypes.addressof(self._zero), ctypes.addressof(self._one)

    def product(self, product: PreparedProduct, rows: int) -> None:
        """Queue a product; ``rows`` is M."""
        columns, depth = product.shape
        kind, output_kind = _TYPES[product.dtypes[0]], _TYPES[product.dtypes[1]]
        status = self._library.cublasGemmEx(
            self._handle,
            _TRANSPOSED,
            _AS_IT_IS,
            columns,
            rows,
            depth,
            self._one_address,
            product.weight,
            kind,
            depth,
            product.inputs,
            kind,
            depth,
            self._one_address if product.add else self._zero_address,
            product.output,
            output_kind,
            product.output_stride,
            _COMPUTE_FLOAT32,
            _DEFAULT_ALGORITHM,
        )
        if status:
            _check(status, f"multiplying {rows} x {depth} by {depth} x {columns}")

    def close(self) -> None:
        """Release the handle; a second call does nothing."""
        if self._handle:
            self._library.cublasDestroy_v2(self._handle)
            self._handle = ctypes.c_void_p()


def _load() -> Any:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        library = ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path)
    except Exception as error:  # a missing file, a missing package, a failure to load: one type each
        raise DeviceUnavailableError(f"cuBLAS cannot be loaded: {error}. Run: {INSTALL}") from error
    sizes: list[Any] = [ctypes.c_int] * 3
    pointer: Any = ctypes.c_void_p
    operand = [pointer, *sizes[:2]]
    library.cublasGemmEx.argtypes = [
        pointer,
        *sizes[:2],
        *sizes,
        pointer,
        *operand,
        *operand,
        pointer,
        *operand,
        *sizes[:2],
    ]
    return library


def _check(status: int, doing: str) -> None:
    if status:
        raise DeviceUnavailableError(f"cuBLAS failed while {doing} (cublasStatus_t {status}). Make a new engine.")
