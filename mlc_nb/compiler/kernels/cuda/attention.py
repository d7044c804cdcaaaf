"""Attention over pages of keys and values (``pages.cuh``): appending, decode (one new token a sequence), prefill."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mlc_nb.compiler.kernels.cuda.kernel import CudaKernel, KernelArgument

__all__ = [
    "PAGE_SIZE",
    "PREFILL_TILE_ROWS",
    "CudaAttentionShape",
    "attend_decodes",
    "attend_prefills",
    "rotate_and_append",
    "softmax_scale",
]

PAGE_SIZE = 16
"""Tokens in a page."""

PREFILL_TILE_ROWS = 128
"""New tokens that one tile of `attend_prefills` has at most."""

_PREFILL_WARPS = PREFILL_TILE_ROWS // 16
_THREADS = 256


@dataclass(frozen=True)
class CudaAttentionShape:
    """Sizes of a model's attention. ``head_dim`` is a multiple of 8; ``dtype`` is ``float16`` or ``bfloat16``."""

    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        assert self.query_heads % self.kv_heads == 0, self
        assert self.head_dim % 8 == 0, self
        assert self.dtype in ("float16", "bfloat16"), self

    @property
    def stored_dim(self) -> int:
        """Elements of a head in a page: ``head_dim`` filled up with zeros to a multiple of 32."""
        return -(-self.head_dim // 32) * 32

    @property
    def head_tiles(self) -> int:
        """Blocks that share the query heads of one KV head in a decode."""
        return -(-(self.query_heads // self.kv_heads) // 8)

    @property
    def suffix(self) -> str:
        """Tells kernels for different shapes apart."""
        return f"{self.query_heads}_{self.kv_heads}_{self.head_dim}_{self.dtype}"

    @property
    def template(self) -> str:
        """Its template arguments."""
        bf16 = "true" if self.dtype == "bfloat16" else "false"
        return f"{bf16}, {self.query_heads}, {self.kv_heads}, {self.head_dim}"

    def pages_shape(self, layers: int, num_pages: Any) -> tuple[Any, ...]:
        """Shape of the KV pool, which must be filled with zeros before its first use."""
        return (layers, num_pages, 2, self.kv_heads, PAGE_SIZE * self.stored_dim)

    def partials_elements(self, batch: int, splits: int) -> int:
        """float32 elements of the workspace of `attend_decodes`."""
        return batch * self.query_heads * splits * (self.stored_dim + 2)

    def arrivals_elements(self, batch: int) -> int:
        """uint32 elements of the counters of `attend_decodes`, zero before its first use and after each."""
        return batch * self.kv_heads * self.head_tiles


def softmax_scale(head_dim: int) -> float:
    """The argument ``scale`` of both attention kernels: ``head_dim ** -0.5``, for exponentials to the base 2."""
    return 1.4426950408889634 / math.sqrt(head_dim)


def rotate_and_append(shape: CudaAttentionShape) -> CudaKernel:
    """Kernel that rotates queries and keys (halves, as in GPT-NeoX) and writes keys and values to their pages.

    For products that did not do it themselves (`Epilogue.ROTATE_APPEND`). ``qkv`` is ``[tokens, (q + 2 kv heads) *
    head_dim]``; cosines and sines float32 ``[positions, head_dim / 2]``; ``head_dim`` a multiple of 16.
    """
    assert shape.head_dim % 16 == 0
    entry = f"rotate_and_append_{shape.suffix}"
    work = (shape.query_heads + 2 * shape.kv_heads) * (shape.head_dim // 16)
    return CudaKernel(
        entry=entry,
        headers=("common.cuh", "pages.cuh", "elementwise.cuh"),
        definition=f"""
extern "C" __global__ void __launch_bounds__({_THREADS}) {entry}(
    const u16* qkv, const int* positions, const int* sequences, const int* page_tables, const float* cosines,
    const float* sines, u16* queries, u16* pages, int tokens, int page_table_width, int num_pages, int layer) {{
    rotate_and_append<{shape.template}>(qkv, positions, sequences, page_tables, cosines, sines, queries, pages, tokens,
                                        page_table_width, num_pages, layer);
}}""",
        arguments=(
            KernelArgument("qkv", shape.dtype),
            KernelArgument("positions", "int32"),
            KernelArgument("sequences", "int32"),
            KernelArgument("page_tables", "int32"),
            KernelArgument("cosines", "float32"),
            KernelArgument("sines", "float32"),
            KernelArgument("queries", shape.dtype, written=True),
            KernelArgument("pages", shape.dtype, written=True),
            KernelArgument("tokens", "int32", scalar=True),
            *_pool_arguments(),
        ),
        sizes=("tokens",),
        grid=lambda tokens: ((tokens * work + _THREADS - 1) // _THREADS, 1, 1),
        threads=_THREADS,
    )


def attend_decodes(shape: CudaAttentionShape) -> CudaKernel:
    """Kernel for rows 0 to ``batch - 1`` of a step, each the one new token of its sequence.

    ``queries`` and ``out`` are ``[tokens, query heads, head_dim]``. The context of a row is shared by up to ``splits``
    blocks; their number is best such that ``splits * kv_heads * batch`` is a few times the multiprocessors. For
    ``partials`` and ``arrivals`` see `CudaAttentionShape`.
    """
    entry = f"attend_decodes_{shape.suffix}"
    return CudaKernel(
        entry=entry,
        headers=("common.cuh", "pages.cuh", "decode_attention.cuh"),
        definition=f"""
extern "C" __global__ void __launch_bounds__(128) {entry}(
    const u16* queries, const int* positions, const int* sequences, const int* page_tables, const u16* pages,
    float* partials, u32* arrivals, u16* out, float scale, int page_table_width, int num_pages, int layer) {{
    typedef DecodeAttention<{shape.template}> Kernel;
    Kernel::run(Kernel::Arguments{{queries, positions, sequences, page_tables, pages, partials, arrivals, out, scale,
                                  page_table_width, num_pages, layer}});
}}""",
        arguments=(
            KernelArgument("queries", shape.dtype),
            KernelArgument("positions", "int32"),
            KernelArgument("sequences", "int32"),
            KernelArgument("page_tables", "int32"),
            KernelArgument("pages", shape.dtype),
            KernelArgument("partials", "float32", written=True),
            KernelArgument("arrivals", "uint32", written=True),
            KernelArgument("out", shape.dtype, written=True),
            KernelArgument("scale", "float32", scalar=True),
            *_pool_arguments(),
        ),
        sizes=("splits", "batch"),
        grid=lambda splits, batch: (splits, shape.kv_heads * shape.head_tiles, batch),
        threads=128,
        minimum_capability=_minimum_capability(shape),
    )


def attend_prefills(shape: CudaAttentionShape) -> CudaKernel:
    """Kernel for longer inputs, in tiles of up to `PREFILL_TILE_ROWS` neighbouring tokens of one sequence.

    ``tiles`` is int32 ``[tiles, 4]``: first row of the step, rows (0 for padding), sequence, position of the first row;
    those with the longest contexts are best first.
    """
    entry = f"attend_prefills_{shape.suffix}"
    return CudaKernel(
        entry=entry,
        headers=("common.cuh", "pages.cuh", "prefill_attention.cuh"),
        definition=f"""
extern "C" __global__ void __launch_bounds__({32 * _PREFILL_WARPS}) {entry}(
    const u16* queries, const int* tiles, const int* page_tables, const u16* pages, u16* out, float scale,
    int page_table_width, int num_pages, int layer) {{
    typedef PrefillAttention<{shape.template}, {_PREFILL_WARPS}> Kernel;
    Kernel::run(Kernel::Arguments{{queries, tiles, page_tables, pages, out, scale, page_table_width, num_pages,
                                  layer}});
}}""",
        arguments=(
            KernelArgument("queries", shape.dtype),
            KernelArgument("tiles", "int32"),
            KernelArgument("page_tables", "int32"),
            KernelArgument("pages", shape.dtype),
            KernelArgument("out", shape.dtype, written=True),
            KernelArgument("scale", "float32", scalar=True),
            *_pool_arguments(),
        ),
        sizes=("tiles",),
        grid=lambda tiles: (shape.query_heads, tiles, 1),
        threads=32 * _PREFILL_WARPS,
        # Two stages of keys and values; 64 KiB are all that compute capability 7.5 has.
        shared_bytes=2 * 2 * (32 if shape.stored_dim > 128 else 64) * shape.stored_dim * 2,
        minimum_capability=_minimum_capability(shape),
    )


def _pool_arguments() -> tuple[KernelArgument, ...]:
    return tuple(KernelArgument(name, "int32", scalar=True) for name in ("page_table_width", "num_pages", "layer"))


def _minimum_capability(shape: CudaAttentionShape) -> int:
    return 80 if shape.dtype == "bfloat16" else 75
