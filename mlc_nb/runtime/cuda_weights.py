"""A model's parameters on the GPU, filled from a file's tensors as the launch plan says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mlc_nb.errors import ModelFormatError
from mlc_nb.runtime.cuda_driver import call, driver
from mlc_nb.runtime.parameters import floats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mlc_nb.runtime.cuda_driver import Context
    from mlc_nb.runtime.cuda_program import CudaProgram
    from mlc_nb.runtime.parameters import SourceTensorData
    from mlc_nb.weights.launch_plan import LaunchPlan
    from mlc_nb.weights.plan import LibraryMetadata

__all__ = ["PORTION_BYTES", "fill_parameters", "upload"]

PORTION_BYTES = 64 * 2**20
"""Bytes of a tensor that are on the device at once before they are packed."""


def fill_parameters(
    context: Context,
    program: CudaProgram,
    plan: LaunchPlan,
    metadata: LibraryMetadata,
    tensors: Mapping[str, SourceTensorData],
    addresses: list[int],
    progress: Callable[[int], object],
) -> None:
    """Copy all tensors to the device and pack them there.

    Parameters
    ----------
    program
        Has a buffer ``source`` of `PORTION_BYTES`.
    tensors
        The file's tensors by name.
    addresses
        Of the parameters.
    progress
        Called with the bytes that were copied since the last call.

    Raises
    ------
    ModelFormatError
        If a tensor has rows that do not fit in a portion.
    """
    source = program.places["source"]
    for vector in metadata.vectors:
        upload(addresses[vector.parameter], floats(tensors[vector.tensor]))
    for packing in plan.packing:
        data = tensors[packing.tensor].data
        rows, row_bytes = data.shape
        portion = PORTION_BYTES // (row_bytes * packing.row_group) * packing.row_group
        if not portion:
            raise ModelFormatError(f"tensor {packing.tensor} has rows of {row_bytes} bytes, too long to be loaded")
        for start in range(0, rows, portion):
            part = np.ascontiguousarray(data[start : start + portion])
            # What the last portion was packed from must not be overwritten before.
            context.synchronize()
            upload(source, part)
            program.run_one(packing.launch, {"rows": len(part), "first_row": packing.first_row + start})
            progress(part.nbytes)
    context.synchronize()


def upload(address: int, array: npt.NDArray[Any]) -> None:
    """Copy a contiguous array to the device."""
    call(driver().cuMemcpyHtoD(address, array.ctypes.data, array.nbytes), "copying to the GPU")
