"""Products of a weight matrix with up to 64 tokens.

More tokens are cuBLAS's business, after `dequantize_matrix` where the matrix is quantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from mlc_nb.compiler.kernels.cuda.kernel import CudaKernel, KernelArgument

if TYPE_CHECKING:
    from mlc_nb.compiler.kernels.cuda.matrix import CudaMatrix

__all__ = [
    "MOST_TOKENS",
    "Epilogue",
    "HeadLayout",
    "ProductPlan",
    "product_plan",
    "skinny_product",
]

MOST_TOKENS = 64
"""Tokens that a `skinny_product` takes at most."""

_HEADERS = ("common.cuh", "matrix.cuh", "pages.cuh", "skinny_product.cuh")


class Epilogue(Enum):
    """What becomes of a product's sums; the values are the names in ``skinny_product.cuh``."""

    STORE = "STORE"
    """``out`` is 16-bit floats ``[tokens, rows]``."""
    STORE_FLOAT32 = "STORE_FLOAT32"
    """``out`` is float32 ``[tokens, rows]``."""
    ADD_TO_STREAM = "ADD_TO_STREAM"
    """Added to ``out``, float32 ``[tokens, rows]``."""
    GATED_SILU = "GATED_SILU"
    """``silu(first half of the rows) * second half`` to ``out``, 16-bit floats ``[tokens, rows / 2]``."""
    ROTATE_APPEND = "ROTATE_APPEND"
    """Rows are heads: rotated queries to ``out``, 16-bit floats ``[tokens, query heads, head size]``; keys and values
    to their pages."""


@dataclass(frozen=True)
class HeadLayout:
    """Heads of a model whose queries, keys and values a product makes; ``first_head`` is that of its row 0.

    Heads count over queries, keys and values: a product of stacked matrices begins at 0, one of the values alone at
    ``query_heads + kv_heads``.
    """

    query_heads: int
    kv_heads: int
    head_size: int
    first_head: int = 0


@dataclass(frozen=True)
class ProductPlan:
    """How a product is shared out.

    Attributes
    ----------
    token_tiles
        Of 8 tokens: 1, 2, 4 or 8.
    row_tiles
        Tiles of 16 rows that a warp works on at once.
    splits
        Warps that share the columns of a tile.
    groups
        Such groups of warps in a block.
    units
        Blocks of 64 columns that a warp loads at once.
    blocks_per_multiprocessor
        Blocks that must fit on a multiprocessor; it bounds the registers.
    grid
        Blocks; each takes one tile after another.
    """

    token_tiles: int
    row_tiles: int
    splits: int
    groups: int
    units: int
    blocks_per_multiprocessor: int
    grid: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.splits * self.groups


def product_plan(matrix: CudaMatrix, tokens: int, multiprocessors: int) -> ProductPlan:
    """The plan that was best, or near it, when measured on an H200."""
    token_tiles = next(n for n in (1, 2, 4, 8) if 8 * n >= tokens)
    wide = not matrix.quantized or matrix.block_type == "Q8_0"
    many = matrix.tiles > 4 * multiprocessors
    few = matrix.tiles <= 2 * multiprocessors
    # Enough bytes must be on their way to each multiprocessor; that takes more loads of narrow codes.
    row_tiles, splits, groups, units, blocks = 1, 8, 1, 2, 2
    if token_tiles == 1 and wide:
        if matrix.tiles <= multiprocessors and matrix.blocks >= 32:
            splits, blocks = 16, 1
    elif token_tiles == 1:
        if not few:
            splits, units, blocks = 4, 4, 3
        elif matrix.tiles > multiprocessors:
            row_tiles, splits, blocks = 2, 16, 1
    elif many and (wide or token_tiles > 2):
        # Sums need not be split over so many warps, and activations serve more rows.
        row_tiles, splits, groups, units, blocks = {
            2: (1, 1, 8, 2, 2),
            4: (2, 2, 4, 1, 2) if wide else (4, 2, 2, 2, 2),
            8: (2, 1, 8, 1, 1),
        }[token_tiles]
    elif not few:
        splits, units, blocks = 4 if token_tiles == 8 else 8, 1, 3
    elif token_tiles == 8:
        row_tiles, units, blocks = 2, 1, 1
    return ProductPlan(
        token_tiles,
        row_tiles,
        splits,
        groups,
        min(units, -(-matrix.blocks // splits)),
        blocks,
        # The last tiles, if they are fewer than the blocks, fall on different multiprocessors.
        min(-(-matrix.tiles // (groups * row_tiles)), multiprocessors * blocks),
    )


def skinny_product(
    matrix: CudaMatrix,
    epilogue: Epilogue,
    tokens: int,
    *,
    heads: HeadLayout | None = None,
    bias: bool = False,
    multiprocessors: int = 132,
    plan: ProductPlan | None = None,
) -> CudaKernel:
    """Kernel that multiplies ``matrix`` with up to ``tokens`` rows of activations.

    Parameters
    ----------
    matrix
        With ``pair`` half a head for ``ROTATE_APPEND`` and half the rows for ``GATED_SILU``.
    epilogue
        What becomes of the sums.
    tokens
        The bucket: at most `MOST_TOKENS`. The argument ``tokens`` may be less.
    heads
        For ``ROTATE_APPEND``; the head size is a multiple of 16.
    bias
        Whether a bias of the activations' dtype ``[rows]`` is added first.
    multiprocessors
        Of the device that the grid is made for; any device gives the same result.
    plan
        How the work is shared out, instead of what `product_plan` says.

    Returns
    -------
    CudaKernel
        Activations are 16-bit floats ``[tokens, columns]``. Null is passed for arguments that the epilogue has no use
        for.
    """
    assert 0 < tokens <= MOST_TOKENS
    assert (heads is not None) == (epilogue is Epilogue.ROTATE_APPEND)
    assert epilogue is not Epilogue.GATED_SILU or matrix.pair == matrix.rows // 2
    assert heads is None or matrix.pair == heads.head_size // 2
    plan = plan or product_plan(matrix, tokens, multiprocessors)
    entry = f"product_{epilogue.value.lower()}_{matrix.suffix}_{plan.token_tiles * 8}"

    if heads is not None:
        entry += f"_{heads.query_heads}_{heads.kv_heads}_{heads.head_size}_{heads.first_head}"
    if bias:
        entry += "_bias"
    head_arguments = f"{heads.first_head}, {heads.query_heads}, {heads.kv_heads}, {heads.head_size}" if heads else "0"
    shape = (
        f"{matrix.format}, {_flag(matrix.bfloat16)}, {matrix.rows}, {matrix.columns}, {matrix.pair}, "
        f"{epilogue.value}, {_flag(bias)}, {head_arguments}"
    )
    sizes = f"{plan.token_tiles}, {plan.row_tiles}, {plan.splits}, {plan.groups}, {plan.units}"
    return CudaKernel(
        entry=entry,
        headers=_HEADERS,
        definition=f"""
extern "C" __global__ void __launch_bounds__({plan.threads}, {plan.blocks_per_multiprocessor}) {entry}(
    const u8* values, const u16* scales, const u16* offsets, const u16* bias, const u16* activations, void* out,
    const int* positions, const int* sequences, const int* page_tables, const float* cosines, const float* sines,
    u16* pages, int tokens, int page_table_width, int num_pages, int layer) {{
    ProductArguments arguments = {{values, scales, offsets, bias, activations, out, positions, sequences, page_tables,
                                   cosines, sines, pages, page_table_width, num_pages, layer}};
    SkinnyProduct<ProductShape<{shape}>, {sizes}>::run(arguments, tokens);
}}""",
        arguments=(
            *matrix.arguments,
            KernelArgument("bias", matrix.activation_dtype),
            KernelArgument("activations", matrix.activation_dtype),
            KernelArgument("out", _out_dtype(matrix, epilogue), written=True),
            KernelArgument("positions", "int32"),
            KernelArgument("sequences", "int32"),
            KernelArgument("page_tables", "int32"),
            KernelArgument("cosines", "float32"),
            KernelArgument("sines", "float32"),
            KernelArgument("pages", matrix.activation_dtype, written=True),
            *(
                KernelArgument(name, "int32", scalar=True)
                for name in ("tokens", "page_table_width", "num_pages", "layer")
            ),
        ),
        sizes=(),
        grid=lambda: (plan.grid, 1, 1),
        threads=plan.threads,
        minimum_capability=80 if matrix.bfloat16 else 75,
    )


def _out_dtype(matrix: CudaMatrix, epilogue: Epilogue) -> str:
    return "float32" if epilogue in (Epilogue.STORE_FLOAT32, Epilogue.ADD_TO_STREAM) else matrix.activation_dtype


def _flag(value: bool) -> str:
    return "true" if value else "false"
