"""From a launch plan and its kernels to the two files of a GPU's library bundle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlc_nb.compiler.kernels.cuda.kernel import module_source
from mlc_nb.compiler.toolchain import compile_cubin
from mlc_nb.errors import CompileError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mlc_nb.compiler.kernels.cuda.kernel import CudaKernel
    from mlc_nb.weights.launch_plan import LaunchPlan

__all__ = ["build_cuda_library"]


def build_cuda_library(
    plan: LaunchPlan, kernels: Sequence[CudaKernel], architecture: str, machine_code: Path, launch_plan: Path
) -> None:
    """Compile the kernels and write the files.

    Parameters
    ----------
    plan, kernels
        The launch plan and the kernels that it uses.
    architecture
        Such as ``sm_90``.
    machine_code, launch_plan
        Files to write: the cubin and the plan as JSON.

    Raises
    ------
    CompileError
        If a kernel needs a newer architecture, or does not compile.
    DeviceUnavailableError
        If a package that compiles for CUDA is missing.
    OSError
        If a file cannot be written.
    """
    capability = int(architecture.removeprefix("sm_"))
    newer = [kernel for kernel in kernels if kernel.minimum_capability > capability]
    if newer:
        raise CompileError(
            f"{newer[0].entry} needs compute capability {newer[0].minimum_capability / 10}, and this GPU is "
            f"{architecture}; bfloat16 needs 8.0: use engine_config.activation_dtype='float16'"
        )
    machine_code.write_bytes(compile_cubin(module_source(kernels), "mlc_nb.cu", architecture))
    launch_plan.write_text(plan.model_dump_json(), encoding="utf-8")
