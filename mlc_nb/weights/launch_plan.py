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

__all__ = ["Argument", "Buffer", "Kernel", "Launch", "LaunchPlan", "Product", "Sequenced", "Size", "compile_size"]

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv)


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
        allowed = isinstance(node, ast.Expression | ast.BinOp | ast.Name | ast.Load | _OPERATORS) or (
            isinstance(node, ast.Constant) and type(node.value) is int
        )
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
        ``buffer`` and ``parameter`` are addresses, ``size`` and ``number`` are 32-bit integers, ``real`` is a float32.
    name
        Of the buffer or the size.
    value
        The parameter's place in the list of parameters, or the number itself.
    offset
        Bytes behind the beginning of a buffer or parameter, as a size.
    """

    kind: Literal["buffer", "parameter", "size", "number", "real"]
    name: str = ""
    value: int | float = 0
    offset: str = "0"


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
    """A product by cuBLAS: ``output = inputs @ weight.T`` for ``rows`` x ``columns`` of ``weight``, sums in float32.

    Attributes
    ----------
    m
        Rows of the inputs, as a size.
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
    dtype: str
    output_dtype: str
    add: bool = False


class Sequenced(Frozen):
    """Launches in order, for steps of certain sizes.

    Attributes
    ----------
    decodes_only
        Whether every sequence must have one new token.
    most
        The most tokens (of a body) or rows (of a head).
    steps
        In order.
    """

    most: int
    steps: tuple[Launch | Product, ...]
    decodes_only: bool = False


class LaunchPlan(Frozen):
    """A step of a model.

    Attributes
    ----------
    buffers
        Memory to work in.
    kernels
        By the name that launches use.
    bodies
        From token ids to the residual stream, for ``tokens`` new tokens; the first that fits is taken.
    heads
        From the residual stream to logits in float32, for ``rows`` rows; the first that fits is taken.
    sampling
        From logits to sampled tokens, for ``rows`` rows.
    """

    buffers: tuple[Buffer, ...]
    kernels: dict[str, Kernel]
    bodies: tuple[Sequenced, ...]
    heads: tuple[Sequenced, ...]
    sampling: Sequenced
