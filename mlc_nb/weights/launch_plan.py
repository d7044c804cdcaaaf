"""How a compiled model runs on a GPU: buffers, kernels and the order of launches, as plain data of a library bundle.

The compiler writes the plan; the runtime gives addresses to its buffers and carries it out, knowing no architecture.
Sizes are arithmetic of a few named numbers, written as Python expressions of ``+ - * //``.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Literal

from mlc_nb.errors import ModelFormatError
from mlc_nb.weights.plan import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "MOST_BIASES",
    "MOST_TOP_LOGPROBS",
    "Argument",
    "Buffer",
    "Kernel",
    "Launch",
    "LaunchPlan",
    "Packing",
    "Product",
    "Sequenced",
    "Size",
    "compile_size",
]

MOST_BIASES = 256
"""Biased tokens of a request that sampling on a GPU takes."""

MOST_TOP_LOGPROBS = 20
"""Likeliest tokens whose log probabilities sampling on a GPU gives."""

_NODES = (ast.Expression, ast.BinOp, ast.Name, ast.Load, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv)


class Size:
    """A size that is not known yet, for arithmetic whose text `compile_size` reads."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __add__(self, other: Size | int) -> Size:
        return self._combine(self, "+", other)

    def __radd__(self, other: int) -> Size:
        return self._combine(other, "+", self)

    def __sub__(self, other: Size | int) -> Size:
        return self._combine(self, "-", other)

    def __rsub__(self, other: int) -> Size:
        return self._combine(other, "-", self)

    def __mul__(self, other: Size | int) -> Size:
        return self._combine(self, "*", other)

    def __rmul__(self, other: int) -> Size:
        return self._combine(other, "*", self)

    def __floordiv__(self, other: Size | int) -> Size:
        return self._combine(self, "//", other)

    def __neg__(self) -> Size:
        return self._combine(0, "-", self)

    def __str__(self) -> str:
        return self.text

    @staticmethod
    def _combine(left: Size | int, operator: str, right: Size | int) -> Size:
        return Size(f"({left} {operator} {right})")


def compile_size(text: str) -> Callable[[Mapping[str, int]], int]:
    """Make a function of named numbers from an expression.

    Raises
    ------
    ModelFormatError
        If the text is anything but ``+ - * //`` of names and whole numbers.
    """
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ModelFormatError(f"the launch plan holds {text!r}, which is no size") from error
    for node in ast.walk(tree):
        allowed = isinstance(node, _NODES) or (isinstance(node, ast.Constant) and type(node.value) is int)
        if not allowed:
            raise ModelFormatError(f"the launch plan holds {text!r}, which is no size")
    code = compile(tree, "<size>", "eval")
    return lambda sizes: int(eval(code, {"__builtins__": {}}, sizes))


class Buffer(Frozen):
    """Device memory that a step works in, placed once.

    Attributes
    ----------
    name
        What arguments call it.
    size
        Bytes, by the largest values that its sizes can have.
    """

    name: str
    size: str


class Argument(Frozen):
    """What a kernel is given in one place.

    Attributes
    ----------
    kind
        ``buffer``, ``parameter`` and ``null`` are addresses, ``size`` and ``number`` are 32-bit integers, ``real`` is a
        float32.
    name
        Of the buffer or the size.
    value
        The parameter's place in the list of parameters, or the number itself.
    offset
        Bytes behind the beginning of a buffer or parameter.
    """

    kind: Literal["buffer", "parameter", "null", "size", "number", "real"]
    name: str = ""
    value: int | float = 0
    offset: int = 0


class Kernel(Frozen):
    """A compiled function.

    Attributes
    ----------
    entry
        Its name in the machine code.
    grid
        Blocks in x, y and z, as sizes.
    threads, shared_bytes
        Of a block.
    """

    entry: str
    grid: tuple[str, str, str]
    threads: int
    shared_bytes: int


class Launch(Frozen):
    """One launch of a kernel."""

    kernel: str
    arguments: tuple[Argument, ...]


class Product(Frozen):
    """A product by cuBLAS: ``output = inputs @ weight.T``, sums in float32.

    Attributes
    ----------
    weight, inputs, output
        ``[rows, columns]``, ``[m, columns]`` and ``[m, rows]``.
    m
        The size that says how many rows the inputs have.
    output_stride
        Elements from one row of the output to the next.
    dtype, output_dtype
        Of weight and inputs, and of the output.
    add
        Whether to add to what the output holds.
    """

    weight: Argument
    inputs: Argument
    output: Argument
    m: str
    rows: int
    columns: int
    output_stride: int
    dtype: str
    output_dtype: str
    add: bool = False


class Packing(Frozen):
    """How a tensor of the file comes to its place in a parameter.

    Its rows are copied to the buffer ``source`` in portions, and for each portion the launch is made with the sizes
    ``rows`` and ``first_row``, the place of its first row in the parameter.

    Attributes
    ----------
    first_row
        The place of the tensor's first row.
    row_group
        Rows that must stay together in a portion.
    """

    tensor: str
    launch: Launch
    first_row: int
    row_group: int


class Sequenced(Frozen):
    """Launches in order, for steps of up to ``most`` tokens (a body) or rows (a head)."""

    most: int
    steps: tuple[Launch | Product, ...]


class LaunchPlan(Frozen):
    """How a model is loaded and how a step of it runs.

    Attributes
    ----------
    parameters
        Bytes of each parameter.
    packing
        How the parameters that are matrices are filled; vectors are in the bundle's metadata.
    kernels
        By the name that launches use.
    buffers
        Memory to work in.
    bodies
        From token ids to the residual stream, for ``tokens`` new tokens; the first that fits is taken. Of the tokens
        the first ``batch`` are decodes, whose contexts up to ``splits`` blocks share; the others are in ``tiles`` of at
        most ``tile_rows``.
    heads
        From the residual stream to logits in float32, for ``rows`` rows; the first that fits is taken.
    sampling
        From logits to sampled tokens, for ``rows`` rows.
    tile_rows
        New tokens of one sequence in a tile.
    decode_blocks
        Blocks of the decode attention for each row and split.
    page_elements
        Elements of the KV pool for each page and layer.
    """

    parameters: tuple[int, ...]
    packing: tuple[Packing, ...]
    kernels: dict[str, Kernel]
    buffers: tuple[Buffer, ...]
    bodies: tuple[Sequenced, ...]
    heads: tuple[Sequenced, ...]
    sampling: Launch
    tile_rows: int
    decode_blocks: int
    page_elements: int
