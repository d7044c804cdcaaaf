"""Sampling on the GPU by the rules of ``mlc_nb/runtime/sampler.py``."""

from __future__ import annotations

from mlc_nb.compiler.kernels.cuda.kernel import CudaKernel, KernelArgument

__all__ = ["MOST_TOP_LOGPROBS", "USES_MASK", "USES_PENALTIES", "sample_rows"]

MOST_TOP_LOGPROBS = 20
"""Columns of the arguments ``top_ids`` and ``top_logprobs``."""

USES_MASK = 1
"""Flag: only tokens whose bit is set in the row's mask are allowed."""

USES_PENALTIES = 2
"""Flag: penalties apply to what the row's slot has picked; the kernel counts its own picks there."""

_POINTERS = (
    ("logits", "float32", "const float*", False),
    ("adjusted", "float32", "float*", True),
    ("options", "float32", "const float*", False),
    ("choices", "int32", "const int*", False),
    ("uniforms", "float64", "const double*", False),
    ("masks", "uint32", "const u32*", False),
    ("bias_ids", "int32", "const int*", False),
    ("bias_values", "float32", "const float*", False),
    ("counts", "int32", "int*", True),
    ("token_ids", "int32", "int*", True),
    ("logprobs", "float32", "float*", True),
    ("top_ids", "int32", "int*", True),
    ("top_logprobs", "float32", "float*", True),
)


def sample_rows(vocab_size: int) -> CudaKernel:
    """Kernel that picks a token for each row of logits.

    Arguments
    ---------
    logits
        float32 ``[rows, vocab_size]``, left as they are; ``adjusted`` has the same shape, to work in.
    options
        float32 ``[rows, 8]``: temperature, top_p, min_p, presence, frequency and repetition penalty, two unused.
    choices
        int32 ``[rows, 8]``: top_k, flags, slot (negative: the row is padding), number of biases, number of top
        log probabilities, three unused.
    uniforms
        float64 ``[rows]`` in [0, 1).
    masks
        uint32 ``[rows, ceil(vocab_size / 32)]``, least significant bit first.
    bias_ids, bias_values
        ``[rows, bias_width]``; a row's ids differ.
    counts
        int32 ``[slots, vocab_size]``: how often a slot's sequence has picked each token; zero for a new sequence.
    token_ids, logprobs
        ``[rows]``: the pick, -1 where the logits are not numbers, and its log probability by the raw logits.
    top_ids, top_logprobs
        ``[rows, MOST_TOP_LOGPROBS]``, likeliest first.
    """
    entry = f"sample_rows_{vocab_size}"
    parameters = ", ".join(f"{spelling} {name}" for name, _, spelling, _ in _POINTERS)
    names = ", ".join(name for name, _, _, _ in _POINTERS)
    return CudaKernel(
        entry=entry,
        headers=("common.cuh", "sampling.cuh"),
        definition=f"""
extern "C" __global__ void __launch_bounds__(1024) {entry}({parameters}, int bias_width) {{
    Sampler<{vocab_size}>::run(SamplingArguments{{{names}, bias_width}});
}}""",
        arguments=(
            *(KernelArgument(name, dtype, written=written) for name, dtype, _, written in _POINTERS),
            KernelArgument("bias_width", "int32", scalar=True),
        ),
        sizes=("rows",),
        grid=lambda rows: (rows, 1, 1),
        threads=1024,
    )
