"""The GPU kernels without a GPU: they compile for every architecture, and their grids cover the work.

What they compute is checked by ``benchmarks/gpu_kernels.py``, where there is a GPU.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from mlc_nb.compiler.kernels.cuda.attention import (
    CudaAttentionShape,
    attend_decodes,
    attend_prefills,
    rotate_and_append,
)
from mlc_nb.compiler.kernels.cuda.elementwise import embedding_rows, gated_silu, rms_norm
from mlc_nb.compiler.kernels.cuda.kernel import module_source
from mlc_nb.compiler.kernels.cuda.matrix import CudaMatrix, dequantize_matrix, pack_matrix, pack_rows
from mlc_nb.compiler.kernels.cuda.product import Epilogue, HeadLayout, product_plan, skinny_product
from mlc_nb.compiler.kernels.cuda.sampling import sample_rows
from mlc_nb.compiler.toolchain import compile_cubin

if TYPE_CHECKING:
    from mlc_nb.compiler.kernels.cuda.kernel import CudaKernel

QUANTIZED = ("Q4_0", "Q4_1", "Q8_0", "q4f16_1")


def every_kind() -> list[CudaKernel]:
    """A kernel of every kind and block type, for the odd shapes of small models."""
    kernels = [sample_rows(1003), sample_rows(49152), pack_rows(CudaMatrix("F16", 576, 200), "BF16")]
    for block_type in ("F16", "BF16", *QUANTIZED):
        kernels.append(embedding_rows(CudaMatrix(block_type, 49152, 576)))
        kernels.append(skinny_product(CudaMatrix(block_type, 3072, 576, 1536), Epilogue.GATED_SILU, 1))
    for block_type in QUANTIZED:
        kernels += [
            pack_matrix(CudaMatrix(block_type, 960, 96, 32)),
            dequantize_matrix(CudaMatrix(block_type, 960, 96)),
        ]
    heads = HeadLayout(9, 3, 64)
    kernels += [
        skinny_product(CudaMatrix("q4f16_1", 960, 576, 32), Epilogue.ROTATE_APPEND, 16, heads=heads),
        skinny_product(CudaMatrix("Q8_0", 576, 1536), Epilogue.ADD_TO_STREAM, 32),
        skinny_product(CudaMatrix("F16", 1003, 200), Epilogue.STORE, 64, bias=True),
        skinny_product(CudaMatrix("Q4_0", 49152, 576), Epilogue.STORE_FLOAT32, 64),
    ]
    for dtype in ("float16", "bfloat16"):
        shape = CudaAttentionShape(9, 3, 64, dtype)
        kernels += [rotate_and_append(shape), attend_decodes(shape), attend_prefills(shape)]
        kernels += [rms_norm(576, dtype, picked=True), gated_silu(1536, dtype)]
    return kernels


@pytest.mark.parametrize("capability", [75, 80, 89, 90])
def test_every_kernel_compiles(capability: int) -> None:
    kernels = [kernel for kernel in every_kind() if kernel.minimum_capability <= capability]
    assert len(kernels) >= 30
    cubin = compile_cubin(module_source(kernels), "kernels.cu", f"sm_{capability}")
    missing = [kernel.entry for kernel in kernels if kernel.entry.encode() not in cubin]
    assert not missing


def test_a_module_needs_no_headers_and_holds_each_thing_once() -> None:
    kernels = every_kind()
    source = module_source([*kernels, *kernels])
    assert "#include" not in source
    entries = re.findall(r'extern "C" __global__ void __launch_bounds__\(.*?\) (\w+)\(', source)
    assert sorted(entries) == sorted({kernel.entry for kernel in kernels})
    assert source.count("INLINE void wait_for_previous_kernel()") == 1


@pytest.mark.parametrize("kernel", every_kind(), ids=lambda kernel: kernel.entry)
def test_what_a_kernel_says_fits_its_source(kernel: CudaKernel) -> None:
    parameters = re.search(rf" {kernel.entry}\(([^{{]*)\) {{", kernel.definition)
    assert parameters is not None
    named = [parameter.split()[-1] for parameter in parameters[1].split(",")]
    assert named == [argument.name for argument in kernel.arguments]
    pointers = ["*" not in parameter for parameter in parameters[1].split(",")]
    assert pointers == [argument.scalar for argument in kernel.arguments]
    bounds = re.search(r"__launch_bounds__\((\d+)", kernel.definition)
    assert bounds is not None
    assert int(bounds[1]) == kernel.threads <= 1024


@pytest.mark.parametrize("tokens", [1, 5, 8, 16, 33, 64])
@pytest.mark.parametrize("block_type", ["F16", "Q4_1", "Q8_0", "q4f16_1"])
@pytest.mark.parametrize(("rows", "columns"), [(576, 576), (4096, 14336), (6144, 4096), (128256, 4096), (1008, 96)])
def test_plans_give_every_block_work_and_every_tile_a_block(
    rows: int, columns: int, block_type: str, tokens: int
) -> None:
    matrix = CudaMatrix(block_type, rows, columns)
    plan = product_plan(matrix, tokens, multiprocessors=132)
    at_once = plan.groups * plan.row_tiles
    assert 8 * plan.token_tiles >= tokens
    assert plan.threads <= 512
    assert (plan.grid - 1) * at_once < matrix.tiles
    assert plan.grid <= 132 * plan.blocks_per_multiprocessor


def test_arrays_are_as_large_as_the_bits_of_their_format() -> None:
    weights = 4096 * 4096
    sizes = {b: CudaMatrix(b, 4096, 4096).array_bytes for b in ("F16", *QUANTIZED)}
    assert sizes["F16"] == {"values": 2 * weights}
    assert sizes["q4f16_1"] == sizes["Q4_0"] == {"values": weights // 2, "scales": weights // 16}
    assert sizes["Q4_1"] == {"values": weights // 2, "scales": weights // 16, "offsets": weights // 16}
    assert sizes["Q8_0"] == {"values": weights, "scales": weights // 16}


def test_packing_covers_all_rows() -> None:
    kernel = pack_matrix(CudaMatrix("Q4_0", 160, 96))  # two blocks of 64 columns, four words each
    for rows in (1, 31, 33, 160):
        blocks, _, _ = kernel.grid(rows=rows)
        assert blocks * kernel.threads >= rows * 2 * 4 > (blocks - 1) * kernel.threads
