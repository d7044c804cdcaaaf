"""Kernels over rows of activations: embedding, RMSNorm, gated SiLU."""

from __future__ import annotations

from mlc_nb.compiler.kernels.cuda.kernel import CudaKernel, KernelArgument
from mlc_nb.compiler.kernels.cuda.matrix import PLAIN_PAIR, CudaMatrix

__all__ = ["embedding_rows", "gated_silu", "rms_norm"]

_THREADS = 256


def embedding_rows(table: CudaMatrix) -> CudaKernel:
    """Kernel that gives rows of ``table``: int32 ``[tokens]`` -> float32 ``[tokens, columns]``, the residual stream."""
    assert table.pair == PLAIN_PAIR
    entry = f"embedding_{table.suffix}"
    return CudaKernel(
        entry=entry,
        headers=("common.cuh", "matrix.cuh", "conversions.cuh"),
        definition=f"""
extern "C" __global__ void __launch_bounds__({_THREADS}) {entry}(
    const int* token_ids, const u8* values, const u16* scales, const u16* offsets, float* stream) {{
    embedding_rows<{table.format}, {table.rows}, {table.columns}>(token_ids, values, scales, offsets, stream);
}}""",
        arguments=(
            KernelArgument("token_ids", "int32"),
            *table.arguments,
            KernelArgument("stream", "float32", written=True),
        ),
        sizes=("tokens",),
        grid=lambda tokens: (tokens, 1, 1),
        threads=_THREADS,
    )


def rms_norm(size: int, dtype: str, picked: bool) -> CudaKernel:
    """Kernel that normalises rows: float32 ``[tokens, size]`` -> ``dtype`` ``[rows, size]``.

    ``dtype`` is ``float16`` or ``bfloat16``. Output row r is input row r, or ``picked[r]`` (int32 ``[rows]``) where
    ``picked``; otherwise pass null. ``size`` is a multiple of 4.
    """
    assert size % 4 == 0
    threads = min(1024, -(-size // 128) * 32)
    entry = f"rms_norm_{size}_{dtype}{'_picked' if picked else ''}"
    flags = "true" if picked else "false"
    return CudaKernel(
        entry=entry,
        headers=("common.cuh", "pages.cuh", "elementwise.cuh"),
        definition=f"""
extern "C" __global__ void __launch_bounds__({threads}) {entry}(
    const float* stream, const int* picked, const float* weight, u16* out, float epsilon) {{
    rms_norm<{_bf16(dtype)}, {size}, {threads}, {flags}>(stream, picked, weight, out, epsilon);
}}""",
        arguments=(
            KernelArgument("stream", "float32"),
            KernelArgument("picked", "int32"),
            KernelArgument("weight", "float32"),
            KernelArgument("out", dtype, written=True),
            KernelArgument("epsilon", "float32", scalar=True),
        ),
        sizes=("rows",),
        grid=lambda rows: (rows, 1, 1),
        threads=threads,
    )


def gated_silu(size: int, dtype: str) -> CudaKernel:
    """Kernel for ``silu(gate) * up``: ``dtype`` ``[tokens, 2 * size]``, gate first -> ``[tokens, size]``.

    ``size`` is a multiple of 8.
    """
    assert size % 8 == 0
    entry = f"gated_silu_{size}_{dtype}"
    return CudaKernel(
        entry=entry,
        headers=("common.cuh", "pages.cuh", "elementwise.cuh"),
        definition=f"""
extern "C" __global__ void __launch_bounds__({_THREADS}) {entry}(const u16* gate_up, u16* out, int tokens) {{
    gated_silu<{_bf16(dtype)}, {size}>(gate_up, out, tokens);
}}""",
        arguments=(
            KernelArgument("gate_up", dtype),
            KernelArgument("out", dtype, written=True),
            KernelArgument("tokens", "int32", scalar=True),
        ),
        sizes=("tokens",),
        grid=lambda tokens: ((tokens * (size // 8) + _THREADS - 1) // _THREADS, 1, 1),
        threads=_THREADS,
    )


def _bf16(dtype: str) -> str:
    return "true" if dtype == "bfloat16" else "false"
