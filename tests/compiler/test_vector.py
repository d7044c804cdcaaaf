"""The words that kernels are written in, one by one: exp, rounding, half precision, integer dot products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tvm.tirx.script import builder as T  # noqa: N812 - the name that every TIR source uses

from mlc_nb.compiler.kernels.cpu.isa import ISA_LEVELS, IsaLevel, isa_level
from mlc_nb.compiler.kernels.cpu.vector import VectorCode, build_kernel
from mlc_nb.errors import CompileError
from tests.compiler.compiled import LEVELS, compile_kernel, run_kernel, tensor

if TYPE_CHECKING:
    import numpy.typing as npt
    from tvm import tirx

FROM_AND_TO = {
    "exp": ("float32", "float32"),
    "round_to_int": ("float32", "int32"),
    "half_to_float": ("float16", "float32"),
    "bfloat16_bits_to_float": ("uint16", "float32"),
}


def map_kernel(level: IsaLevel, word: str) -> tirx.PrimFunc:
    """``output[i] = word(input[i])``."""
    code = VectorCode(level)
    source_dtype, output_dtype = FROM_AND_TO[word]

    def body() -> None:
        count = T.int32()
        source = T.match_buffer(T.arg("source", T.handle()), (count,), source_dtype)
        output = T.match_buffer(T.arg("output", T.handle()), (count,), output_dtype)
        with T.serial(0, count // code.lanes) as i:
            code.store(output, getattr(code, word)(code.load(source, i * code.lanes)), i * code.lanes)

    return build_kernel(body)


def mapped(level: str, word: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    assert len(values) % 16 == 0
    output = tensor(np.zeros(len(values), FROM_AND_TO[word][1]))
    run_kernel(compile_kernel(level, map_kernel, word), values, output)
    return output.numpy()


@pytest.mark.parametrize("level", LEVELS)
def test_exp(level: str) -> None:
    values = np.concatenate([np.linspace(-100, 88, 1 << 16), np.zeros(16), [-1e30, -87.29, -87.31, -1e-30] * 4])
    values = values.astype(np.float32)
    result = mapped(level, "exp", values)
    in_range = values >= -87.3
    wanted = np.exp(values.astype(np.float64))[in_range]
    ulp = np.spacing(wanted.astype(np.float32)).astype(np.float64)
    assert (np.abs(result[in_range] - wanted) / ulp).max() <= 3
    assert (result[~in_range] == 0).all()
    assert (result[values == 0] == 1).all()


@pytest.mark.parametrize("level", LEVELS)
def test_round_to_int_takes_ties_to_even(level: str) -> None:
    halves = np.arange(-40000, 40000, dtype=np.float32) / 2
    values = np.concatenate([halves, np.nextafter(halves, np.float32(np.inf)), [2.0**22 - 1, 1 - 2.0**22] * 8])
    values = values.astype(np.float32)
    assert np.array_equal(mapped(level, "round_to_int", values), np.rint(values).astype(np.int32))


@pytest.mark.parametrize("level", LEVELS)
def test_every_half_is_read_exactly(level: str) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    finite = np.isfinite(halves.view(np.float16)) | np.isinf(halves.view(np.float16))
    result = mapped(level, "half_to_float", halves.view(np.float16))
    assert np.array_equal(
        result[finite].view(np.uint32), halves.view(np.float16)[finite].astype(np.float32).view(np.uint32)
    )
    assert np.isnan(result[~finite]).all()


@pytest.mark.parametrize("level", LEVELS)
def test_every_bfloat16_is_read_exactly(level: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    result = mapped(level, "bfloat16_bits_to_float", bits)
    assert np.array_equal(result.view(np.uint32), bits.astype(np.uint32) << 16)


def dot_kernel(level: IsaLevel, kind: str) -> tirx.PrimFunc:
    """Sums over eight words of four int8 products: a vector lane is a row."""
    code = VectorCode(level)

    def body() -> None:
        count = T.int32()
        weights = T.match_buffer(T.arg("weights", T.handle()), (count, 8, code.lanes), "int32")
        activations = T.match_buffer(T.arg("activations", T.handle()), (count, 8, code.lanes), "int32")
        output = T.match_buffer(T.arg("output", T.handle()), (count, code.lanes), "int32")
        with T.serial(0, count) as i:
            words = [code.bind(code.load(weights, i, group, 0)) for group in range(8)]
            total = code.dot_start()
            add = code.dot_nibbles if kind == "nibbles" else code.dot_bytes
            for group, word in enumerate(words):
                total = add(total, word, code.bind(code.load(activations, i, group, 0)))
            if kind == "nibbles":
                total = code.dot_nibbles_finish(total)
            else:
                total = code.dot_bytes_finish(total, code.dot_bytes_bias(words))
            code.store(output, total, i, 0)

    return build_kernel(body)


@pytest.mark.parametrize("kind", ["nibbles", "bytes"])
@pytest.mark.parametrize("level", LEVELS)
def test_dot_products_are_exact_at_their_extremes(level: str, kind: str) -> None:
    lanes = isa_level(level).lanes
    rng = np.random.default_rng(0)
    shape = (64, 8, lanes, 4)
    low, high = (0, 15) if kind == "nibbles" else (-128, 127)
    weights = rng.integers(low, high + 1, shape).astype(np.int8)
    activations = rng.integers(-127, 128, shape).astype(np.int8)
    for row, (weight, activation) in enumerate([(low, 127), (low, -127), (high, 127), (high, -127), (0, 127)]):
        weights[row], activations[row] = weight, activation
    output = tensor(np.zeros((64, lanes), np.int32))
    as_words = [array.view(np.int32)[..., 0] for array in (weights, activations)]
    run_kernel(compile_kernel(level, dot_kernel, kind), *as_words, output)
    assert np.array_equal(output.numpy(), (weights.astype(np.int32) * activations).sum((1, 3)))


def test_levels_are_what_the_runtime_can_ask_for() -> None:
    assert set(LEVELS) <= set(ISA_LEVELS)
    with pytest.raises(CompileError, match=r"no ISA level 'sse9'.*avx2.*neon-dot"):
        isa_level("sse9")


def test_vectors_divide_the_row() -> None:
    assert [isa_level("avx512-vnni").dividing(size).lanes for size in (576, 40, 36)] == [16, 8, 4]
    with pytest.raises(CompileError, match="a row of 30 float32 elements"):
        isa_level("avx2").dividing(30)
