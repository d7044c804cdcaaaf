"""Products of every block type at every ISA level that this machine runs, against float64."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mlc_nb.compiler.kernels.cpu.isa import isa_level
from mlc_nb.compiler.kernels.cpu.linear import TERM_BITS, float_product, quantized_product
from tests.compiler.compiled import LEVELS, compile_kernel, run_kernel, tensor, use_threads
from tests.compiler.weights import PLAIN, QUANTIZED, decoded, packed, random_blocks

if TYPE_CHECKING:
    import numpy.typing as npt

BATCHES = (1, 2, 3, 5, 7, 8, 9, 17, 33)
SHAPES = [(16, 576, False), (48, 96, True), (192, 32, True)]
"""N, K, and whether a residual is added."""


def cases(block_types: tuple[str, ...], terms: tuple[int, ...]) -> list[Any]:
    """Every block type at every level; shapes and terms in turn, because compiling is what takes time."""
    return [
        pytest.param(
            level,
            block_type,
            count := terms[(i + j) % len(terms)],
            *SHAPES[(i + j) % len(SHAPES)],
            id=f"{level}-{block_type}-{count}",
        )
        for (i, level), (j, block_type) in itertools.product(enumerate(LEVELS), enumerate(block_types))
    ]


class Product:
    """One compiled product with its weights, called for any rows of activations; no terms mean float32 activations."""

    def __init__(self, level: str, block_type: str, rows: int, columns: int, residual: bool, terms: int) -> None:
        if terms:
            self.kernel = compile_kernel(level, quantized_product, block_type, rows, columns, residual, terms)
        else:
            self.kernel = compile_kernel(level, float_product, block_type, rows, columns, residual)
        data = random_blocks(block_type, rows, columns, np.random.default_rng(rows + columns))
        self.rows = rows
        self.parts = packed(block_type, data, columns)
        self.values = decoded(block_type, data)
        self.residual = residual

    def __call__(self, inputs: list[npt.NDArray[Any]], residual: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        output = tensor(np.full((len(inputs[0]), self.rows), np.nan, np.float32))
        run_kernel(self.kernel, *inputs, *self.parts, *([residual] if self.residual else []), output)
        return output.numpy()

    def check(self, inputs: list[npt.NDArray[Any]], activations: npt.NDArray[np.float64]) -> None:
        """Compare with float64, and every batch with the largest one bit by bit."""
        rng = np.random.default_rng(1)
        residual = rng.standard_normal((len(activations), self.rows)).astype(np.float32)
        whole = self(inputs, residual)
        wanted = activations @ self.values.T + (residual if self.residual else 0)
        magnitude = np.abs(activations).sum(1, keepdims=True) * np.abs(self.values).max() + np.abs(residual)
        assert np.isfinite(whole).all()
        assert (np.abs(whole - wanted) <= 3e-7 * np.sqrt(activations.shape[1]) * magnitude).all()
        for count in BATCHES:
            first = int(rng.integers(0, len(activations) - count + 1))
            part = slice(first, first + count)
            assert np.array_equal(self([array[part] for array in inputs], residual[part]), whole[part]), count
        try:
            use_threads(2)
            assert np.array_equal(self(inputs, residual), whole)
        finally:
            use_threads(1)


def laid_out(level: str, codes: npt.NDArray[np.int8], whole_codes: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Codes in the layout of ``elementwise``: int8 terms, and where the level wants them int16 with middles swapped."""
    words = codes.view(np.int32)
    if codes.shape[2] == 1 or not isa_level(level).multiplies_pairs:
        return words
    fours = whole_codes.reshape(*whole_codes.shape[:2], 8, 4)[..., [0, 2, 1, 3]]
    return np.concatenate([words, fours.astype(np.int16).reshape(*whole_codes.shape[:2], 2, 16).view(np.int32)], 2)


@pytest.mark.parametrize(("level", "block_type", "terms", "rows", "columns", "residual"), cases(QUANTIZED, (1, 2)))
def test_quantized_product(level: str, block_type: str, terms: int, rows: int, columns: int, residual: bool) -> None:
    product = Product(level, block_type, rows, columns, residual, terms)
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, (33, columns // 32, terms, 32)).astype(np.int8)
    codes[0], codes[1], codes[2] = 0, 127, -127
    scales = rng.random((33, columns // 32)).astype(np.float32)
    scales[3] = 1e-40
    scales[4] = 0.0
    radix = 2 ** (TERM_BITS * np.arange(terms)[::-1])
    whole_codes = (codes.astype(np.int64) * radix[:, None]).sum(2)
    activations = (whole_codes * scales[..., None].astype(np.float64)).reshape(33, columns)
    block_sums = scales * whole_codes.sum(-1).astype(np.float32)
    product.check([laid_out(level, codes, whole_codes), np.stack([scales, block_sums], -1)], activations)


@pytest.mark.parametrize(
    ("level", "block_type", "terms", "rows", "columns", "residual"), cases(QUANTIZED + PLAIN, (0,))
)
def test_float_product(level: str, block_type: str, terms: int, rows: int, columns: int, residual: bool) -> None:
    product = Product(level, block_type, rows, columns, residual, terms)
    activations = np.random.default_rng(0).standard_normal((33, columns)).astype(np.float32)
    activations[0], activations[1] = 0.0, 1e-40
    activations[2] *= 1e20
    product.check([activations], activations.astype(np.float64))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("columns", [2, 7, 36])
def test_plain_weights_may_have_any_number_of_columns(level: str, columns: int) -> None:
    product = Product(level, "F16", 16, columns, residual=False, terms=0)
    activations = np.random.default_rng(0).standard_normal((33, columns)).astype(np.float32)
    product.check([activations], activations.astype(np.float64))
