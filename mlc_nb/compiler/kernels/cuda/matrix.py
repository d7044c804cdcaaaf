"""Weight matrices on a GPU: the arrays that hold them, and the kernels that bring a file's tensors into that order."""

from __future__ import annotations

from dataclasses import dataclass

from mlc_nb.compiler.kernels.cuda.kernel import CudaKernel, KernelArgument

__all__ = ["PLAIN_PAIR", "CudaMatrix", "dequantize_matrix", "pack_matrix", "pack_rows"]

PLAIN_PAIR = 8
"""`CudaMatrix.pair` of a matrix whose rows have nothing to do with each other."""

_FORMATS = {"F16": "FLOAT16", "BF16": "BFLOAT16", "Q4_0": "Q4_0", "Q4_1": "Q4_1", "Q8_0": "Q8_0", "q4f16_1": "Q4F16_1"}
_THREADS = 256


@dataclass(frozen=True)
class CudaMatrix:
    """A weight ``[rows, columns]`` of one block type, in the order of ``matrix.cuh``.

    Attributes
    ----------
    block_type
        ``F16``, ``BF16``, a GGUF type (``Q4_0``, ``Q4_1``, ``Q8_0``) or MLC's ``q4f16_1``.
    rows, columns
        Outputs and inputs. Columns are a multiple of 8, of 32 where quantized.
    pair
        How far apart the rows lie of which one lane of a tensor core gets both sums: half a head for queries, keys and
        values that are rotated, all rows of the gate for a gate stacked on its up projection, else `PLAIN_PAIR`.
        A multiple of 8; other than `PLAIN_PAIR`, rows are a multiple of twice that.
    """

    block_type: str
    rows: int
    columns: int
    pair: int = PLAIN_PAIR

    def __post_init__(self) -> None:
        assert self.block_type in _FORMATS, self.block_type
        assert self.columns % (32 if self.quantized else 8) == 0, self
        assert self.pair % 8 == 0, self
        assert self.pair == PLAIN_PAIR or self.rows % (2 * self.pair) == 0, self

    @property
    def quantized(self) -> bool:
        """Whether its elements are codes with scales."""
        return self.block_type not in ("F16", "BF16")

    @property
    def bfloat16(self) -> bool:
        """Whether its activations are bfloat16; otherwise they are float16."""
        return self.block_type == "BF16"

    @property
    def activation_dtype(self) -> str:
        """Of what is multiplied with it."""
        return "bfloat16" if self.bfloat16 else "float16"

    @property
    def format(self) -> str:
        """Its name in ``matrix.cuh``."""
        return _FORMATS[self.block_type]

    @property
    def tiles(self) -> int:
        """Tiles of 16 rows."""
        return -(-self.rows // 16)

    @property
    def blocks(self) -> int:
        """Blocks of 64 columns."""
        return -(-self.columns // 64)

    @property
    def array_bytes(self) -> dict[str, int]:
        """Bytes of each array that holds it, by name: ``values``, and ``scales`` and ``offsets`` where it has them."""
        if not self.quantized:
            return {"values": 2 * self.rows * self.columns}
        fragments = self.tiles * self.blocks
        sizes = {"values": fragments * 512 * (2 if self.block_type == "Q8_0" else 1), "scales": fragments * 64}
        if self.block_type == "Q4_1":
            sizes["offsets"] = fragments * 64
        return sizes

    @property
    def arguments(self) -> tuple[KernelArgument, ...]:
        """Parameters of a kernel that reads it; pass null for arrays that it has not."""
        return tuple(KernelArgument(name, "uint8") for name in ("values", "scales", "offsets"))

    @property
    def suffix(self) -> str:
        """Tells kernels for different matrices apart."""
        return f"{self.block_type.lower()}_{self.rows}x{self.columns}_{self.pair}"


def pack_matrix(matrix: CudaMatrix) -> CudaKernel:
    """Kernel that packs rows of a quantized tensor of a file into ``matrix``; run it once for each stacked tensor.

    ``source`` holds the tensor's rows as in the file (MLC: the uint32 codes, with ``source_scales`` beside them, which
    is null for GGUF). They become the rows from ``first_row``. ``interleaved_head_size`` is 0, or the head size where a
    file stores rotary pairs side by side (GGUF's query and key tensors of the Llama family).
    """
    assert matrix.quantized
    entry = f"pack_{matrix.suffix}"
    return CudaKernel(
        entry=entry,
        headers=("common.cuh", "matrix.cuh", "conversions.cuh"),
        definition=f"""
extern "C" __global__ void __launch_bounds__({_THREADS}) {entry}(
    const u8* source, const u16* source_scales, u8* values, u16* scales, u16* offsets, int rows, int first_row,
    int interleaved_head_size) {{
    pack_matrix<{matrix.format}, {matrix.columns}, {matrix.pair}>(
        source, source_scales, values, scales, offsets, rows, first_row, interleaved_head_size);
}}""",
        arguments=(
            KernelArgument("source", "uint8"),
            KernelArgument("source_scales", "float16"),
            *(KernelArgument(name, "uint8", written=True) for name in ("values", "scales", "offsets")),
            *(KernelArgument(name, "int32", scalar=True) for name in ("rows", "first_row", "interleaved_head_size")),
        ),
        sizes=("rows",),
        grid=lambda rows: ((rows * matrix.blocks * 4 + _THREADS - 1) // _THREADS, 1, 1),
        threads=_THREADS,
    )


def pack_rows(matrix: CudaMatrix, source_type: str) -> CudaKernel:
    """Kernel like `pack_matrix` for an unquantized ``matrix``, from a tensor of type ``F32``, ``F16`` or ``BF16``."""
    assert not matrix.quantized
    entry = f"pack_{source_type.lower()}_{matrix.suffix}"
    shape = f"{4 if source_type == 'F32' else 2}, {_flag(source_type == 'BF16')}, {_flag(matrix.bfloat16)}"
    return CudaKernel(
        entry=entry,
        headers=("common.cuh", "matrix.cuh", "conversions.cuh"),
        definition=f"""
extern "C" __global__ void __launch_bounds__({_THREADS}) {entry}(
    const u8* source, u16* values, int rows, int first_row, int interleaved_head_size) {{
    pack_rows<{shape}, {matrix.columns}>(source, values, rows, first_row, interleaved_head_size);
}}""",
        arguments=(
            KernelArgument("source", "uint8"),
            KernelArgument("values", "uint8", written=True),
            *(KernelArgument(name, "int32", scalar=True) for name in ("rows", "first_row", "interleaved_head_size")),
        ),
        sizes=("rows",),
        grid=lambda rows: ((rows * matrix.columns + _THREADS - 1) // _THREADS, 1, 1),
        threads=_THREADS,
    )


def dequantize_matrix(matrix: CudaMatrix) -> CudaKernel:
    """Kernel that writes a quantized ``matrix`` as float16 ``[rows, columns]``, for products with many tokens."""
    assert matrix.quantized
    entry = f"dequantize_{matrix.suffix}"
    return CudaKernel(
        entry=entry,
        headers=("common.cuh", "matrix.cuh", "conversions.cuh"),
        definition=f"""
extern "C" __global__ void __launch_bounds__({_THREADS}) {entry}(
    const u8* values, const u16* scales, const u16* offsets, u16* out) {{
    dequantize_matrix<{matrix.format}, {matrix.rows}, {matrix.columns}, {matrix.pair}>(values, scales, offsets, out);
}}""",
        arguments=(*matrix.arguments, KernelArgument("out", "float16", written=True)),
        sizes=(),
        grid=lambda: ((matrix.tiles * matrix.blocks * 32 + _THREADS - 1) // _THREADS, 1, 1),
        threads=_THREADS,
    )


def _flag(value: bool) -> str:
    return "true" if value else "false"
