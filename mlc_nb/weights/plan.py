"""How a file's tensors become the parameters of a compiled model: plain data that travels inside a library bundle.

The compiler knows the architecture and writes the plan; the runtime executes it and needs to know nothing of models.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = [
    "MAX_STEP_TOKENS",
    "CompileRequest",
    "LibraryMetadata",
    "PackedWeight",
    "RopeTable",
    "SourceRows",
    "VectorWeight",
]


MAX_STEP_TOKENS = 2048
"""New tokens that one call of a compiled model takes at most."""


class Frozen(BaseModel):
    """Plain data of a bundle."""

    # A file's numbers travel as they are, so that whoever reads them can name the one that makes no sense.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class SourceRows(Frozen):
    """All rows of one tensor of the file.

    Attributes
    ----------
    tensor
        The tensor's name in the file.
    rows
        Its number of rows.
    interleaved_heads
        0, or the number of attention heads whose rows are stored for the interleaved form of rotary embeddings (GGUF
        files of the Llama family); the loader reorders them for the form in which halves are rotated.
    """

    tensor: str
    rows: int
    interleaved_heads: int = 0


class PackedWeight(Frozen):
    """A matrix in the kernels' packed layout.

    Attributes
    ----------
    parameters
        The parameter of each part of the layout (`mlc_nb.quantization.packing.packed_layout`), by position in the
        model's parameter list.
    block_type
        The type of the file's blocks.
    rows, columns
        N and K of the whole matrix; N is a multiple of 16, and rows that no source fills are zero.
    sources
        Tensors whose rows are put under each other.
    """

    parameters: dict[str, int]
    block_type: str
    rows: int
    columns: int
    sources: tuple[SourceRows, ...]


class VectorWeight(Frozen):
    """A vector that is used in float32, from an F32, F16 or BF16 tensor of ``size`` elements."""

    parameter: int
    tensor: str
    size: int


class RopeTable(Frozen):
    """Rotary embedding angles: position * base ** (-2 i / dim) / (scale * factor[i]) for i in 0 to dim / 2 - 1.

    ``factors`` names a float32 tensor of the file with dim / 2 elements, or is None.
    """

    dim: int
    base: float
    scale: float
    factors: str | None


class LibraryMetadata(Frozen):
    """What a runtime must know of a compiled model.

    Attributes
    ----------
    format_version
        Version of the bundle's form.
    architecture, isa, activation_dtype
        What was compiled, for which ISA level or GPU architecture, and how products take their activations.
    vocab_size, padded_vocab_size, context_window_size, hidden_size
        Rows of the output head, the same with the rows that fill up its last tile, positions that the model was
        trained for, width of the residual stream.
    layers, query_heads, kv_heads, head_dim, kv_dtype, page_size, chunk_pages
        The form of the KV pool and of the page tables.
    rope
        The rotary embedding table to pass in.
    vectors, matrices
        How to fill the parameters.
    """

    format_version: int
    architecture: str
    isa: str
    activation_dtype: str
    vocab_size: int
    padded_vocab_size: int
    context_window_size: int
    hidden_size: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    page_size: int
    chunk_pages: int
    rope: RopeTable
    vectors: tuple[VectorWeight, ...]
    matrices: tuple[PackedWeight, ...]

    @property
    def for_cuda(self) -> bool:
        """Whether it is for a GPU."""
        return self.isa.startswith("sm_")


class CompileRequest(Frozen):
    """Everything that decides what the compiler produces.

    Attributes
    ----------
    architecture
        ``general.architecture`` of the file.
    hyperparameters
        The scalar metadata of the file whose keys start with the architecture's name, without that prefix.
    tensors
        Block type and shape (``[N, K]`` or ``[size]``) of each tensor.
    isa
        The ISA level, or the architecture of a GPU, such as ``sm_90``.
    activation_dtype
        On a CPU ``float32``, or how products take their activations where the weights are quantized: ``int8`` or
        ``int16``. On a GPU ``float16`` or ``bfloat16``.
    """

    architecture: str
    hyperparameters: dict[str, int | float | str | bool]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    isa: str
    activation_dtype: str

    @property
    def for_cuda(self) -> bool:
        """Whether it is for a GPU."""
        return self.isa.startswith("sm_")
