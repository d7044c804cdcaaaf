"""Memory for weights and pages."""

from __future__ import annotations

import numpy as np
import pytest

from mlc_nb.errors import OutOfMemoryError
from mlc_nb.runtime.arena import Arena


def test_arrays_are_zero_aligned_and_apart() -> None:
    shapes = [((3, 5), "float16"), ((7,), "float32"), ((0,), "int32"), ((2, 2), "int32")]
    arena = Arena(Arena.needed(shapes), "the test")
    arrays = [arena.array(*shape) for shape in shapes]
    for number, (array, (shape, dtype)) in enumerate(zip(arrays, shapes, strict=True)):
        assert array.shape == shape
        assert array.dtype == dtype
        assert not array.any()
        assert array.ctypes.data % 64 == 0
        array[...] = number + 1
    assert [set(array.reshape(-1).tolist()) for array in arrays] == [{1.0}, {2.0}, set(), {4}]
    assert arena.size == 64 * 3


def test_an_array_outlives_its_arena() -> None:
    array = Arena(4096, "the test").array((1024,), "float32")
    array[:] = np.arange(1024)
    assert array.sum() == 1023 * 512


@pytest.mark.parametrize("size", [2**62, 2**70])
def test_memory_that_is_not_granted_is_one_clear_error(size: int) -> None:
    with pytest.raises(
        OutOfMemoryError, match=r"^there is no memory for the weights: .* MiB are needed, and the system does not grant"
    ):
        Arena(size, "the weights")


def test_more_than_was_asked_for_is_refused() -> None:
    arena = Arena(64, "the test")
    arena.array((16,), "float32")
    with pytest.raises(ValueError, match="reshape"):
        arena.array((16,), "float32")
