"""Kernels over rows of activations, against float64: norms, gated SiLU, quantization, embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mlc_nb.compiler.kernels.cpu.elementwise import embedding_rows, gated_silu, rms_norm
from mlc_nb.compiler.kernels.cpu.isa import isa_level
from tests.compiler.compiled import LEVELS, compile_kernel, run_kernel, tensor, use_threads
from tests.compiler.weights import PLAIN, QUANTIZED, decoded, packed, random_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

BATCHES = (1, 2, 3, 5, 7, 8, 9, 17, 33)
ROWS = 33
LARGEST_CODE = {1: 127, 2: 32512}


def same_in_every_batch(run: Callable[[slice], list[npt.NDArray[Any]]]) -> list[npt.NDArray[Any]]:
    """What ``run`` gives for all rows; it must give the same bits for any run of them, and on two threads."""
    whole = run(slice(0, ROWS))
    rng = np.random.default_rng(5)
    for count in BATCHES:
        first = int(rng.integers(0, ROWS - count + 1))
        part = slice(first, first + count)
        for mine, all_rows in zip(run(part), whole, strict=True):
            assert np.array_equal(mine, all_rows[part]), count
    try:
        use_threads(2)
        assert all(np.array_equal(*pair) for pair in zip(run(slice(0, ROWS)), whole, strict=True))
    finally:
        use_threads(1)
    return whole


def outputs(level: str, rows: int, columns: int, terms: int) -> list[Any]:
    """Tensors for rows of activations, filled with what must be overwritten."""
    if not terms:
        return [tensor(np.full((rows, columns), np.nan, np.float32))]
    blocks = columns // 32
    return [
        tensor(np.full((rows, blocks, isa_level(level).code_rows(terms), 8), 0x55555555, np.int32)),
        tensor(np.full((rows, blocks, 2), np.nan, np.float32)),
    ]


def dequantized(codes: npt.NDArray[np.int32], scales: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The activations that codes stand for; checks on the way that codes and sums are what products rely on."""
    terms = min(2, codes.shape[2])
    lanes = codes[:, :, :terms].view(np.int8).astype(np.int64)
    assert np.abs(lanes).max() <= 127
    assert np.isfinite(scales).all()
    whole = lanes[:, :, 0] if terms == 1 else lanes[:, :, 0] * 256 + lanes[:, :, 1]
    if codes.shape[2] > 2:  # the same numbers once more, with the middle of every four swapped
        pairs = codes[:, :, 2:].copy().view(np.int16).reshape(len(codes), -1, 8, 4)
        assert np.array_equal(pairs[..., [0, 2, 1, 3]], whole.reshape(pairs.shape))
    assert np.array_equal(scales[..., 1], scales[..., 0] * whole.sum(-1).astype(np.float32))
    return (whole * scales[..., :1].astype(np.float64)).reshape(len(codes), -1)


def check_quantized(
    result: list[npt.NDArray[Any]], wanted: npt.NDArray[np.float64], terms: int, slack: float = 1e-6
) -> None:
    """Each value is off by half a code at most (and by one more where the second term would be -128)."""
    values = dequantized(*result)
    largest = np.abs(wanted).reshape(len(wanted), -1, 32).max(-1)
    code = np.repeat(largest / LARGEST_CODE[terms], 32, axis=1)
    allowed = code * (0.5 if terms == 1 else 1.5) + slack * np.repeat(largest, 32, axis=1) + 4e-34
    assert (np.abs(values - wanted) <= allowed).all()


def rows_of(columns: int) -> npt.NDArray[np.float32]:
    """Activations with rows of zeros, of denormals, of the smallest and of large numbers, and one lonely spike."""
    values = np.random.default_rng(columns).standard_normal((ROWS, columns)).astype(np.float32)
    values[0] = 0.0
    values[1] = 1e-40
    values[2] *= 1e-38
    values[3] *= np.float32(1e-44)
    values[4] *= 1e-36
    values[5] *= 1e15
    values[6] = 0.0
    values[6, -1] = -3.0
    return values


@pytest.mark.parametrize(("columns", "terms"), [(36, 0), (576, 0), (96, 1), (576, 2)])
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_rms_norm(level: str, columns: int, terms: int, gather: bool) -> None:
    kernel = compile_kernel(level, rms_norm, columns, 1e-5, terms, gather)
    source = rows_of(columns)
    weight = np.random.default_rng(1).standard_normal(columns).astype(np.float32)
    order = np.random.default_rng(2).integers(0, ROWS, ROWS).astype(np.int32) if gather else np.arange(ROWS)

    def run(part: slice) -> list[npt.NDArray[Any]]:
        given = outputs(level, part.stop - part.start, columns, terms)
        inputs = [source, order[part]] if gather else [source[part]]
        run_kernel(kernel, *inputs, weight, *given)
        return [output.numpy() for output in given]

    x = source[order].astype(np.float64)
    wanted = x * weight / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    result = same_in_every_batch(run)
    if terms:
        check_quantized(result, wanted, terms, slack=1e-5)
    else:
        np.testing.assert_allclose(result[0], wanted, rtol=3e-6, atol=1e-35)


@pytest.mark.parametrize(("columns", "terms"), [(36, 0), (192, 0), (96, 1), (32, 2)])
@pytest.mark.parametrize("level", LEVELS)
def test_gated_silu(level: str, columns: int, terms: int) -> None:
    kernel = compile_kernel(level, gated_silu, columns, terms)
    rng = np.random.default_rng(columns)
    source = (rng.standard_normal((ROWS, 2 * columns)) * 4).astype(np.float32)
    source[0] = 0.0
    source[1, :columns] = np.linspace(-200, 200, columns)
    source[2] = 1e-40
    source[3, :columns] = -1e30

    def run(part: slice) -> list[npt.NDArray[Any]]:
        given = outputs(level, part.stop - part.start, columns, terms)
        run_kernel(kernel, source[part], *given)
        return [output.numpy() for output in given]

    gate, up = source[:, :columns].astype(np.float64), source[:, columns:].astype(np.float64)
    # exp stops at 88: what silu loses there is 1e-36 of its argument.
    wanted = gate / (1 + np.exp(np.minimum(-gate, 88.0))) * up
    result = same_in_every_batch(run)
    if terms:
        check_quantized(result, wanted, terms, slack=1e-5)
    else:
        np.testing.assert_allclose(result[0], wanted, rtol=2e-6, atol=1e-35)


@pytest.mark.parametrize("block_type", [*QUANTIZED, *PLAIN])
@pytest.mark.parametrize("level", LEVELS)
def test_embedding_rows(level: str, block_type: str) -> None:
    kernel = compile_kernel(level, embedding_rows, block_type, 48, 96)
    data = random_blocks(block_type, 48, 96, np.random.default_rng(3))
    parts = packed(block_type, data, 96)
    token_ids = np.random.default_rng(4).integers(0, 48, ROWS).astype(np.int32)
    token_ids[:4] = 0, 15, 16, 47

    def run(part: slice) -> list[npt.NDArray[Any]]:
        output = outputs(level, part.stop - part.start, 96, 0)
        run_kernel(kernel, token_ids[part], *parts, *output)
        return [output[0].numpy()]

    wanted = decoded(block_type, data)[token_ids]
    np.testing.assert_allclose(same_in_every_batch(run)[0], wanted, rtol=2e-7, atol=1e-7)
