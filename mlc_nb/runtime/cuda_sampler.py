"""Sampling on the GPU: what each row's kernel is told, and what comes back.

The rules are those of `mlc_nb.runtime.sampler`; random numbers, grammars and the tokens picked so far stay with the
sampling states, so that a seed gives the same tokens alone and in any batch.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mlc_nb.runtime.cuda_driver import call, driver
from mlc_nb.runtime.cuda_inputs import host_array
from mlc_nb.runtime.sampler import not_finite
from mlc_nb.runtime.step import SampledToken
from mlc_nb.weights.launch_plan import MOST_BIASES, MOST_TOP_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlc_nb.runtime.cuda_driver import Context
    from mlc_nb.runtime.sampler import SamplingState, TokenConstraint
    from mlc_nb.runtime.step import StepResult

__all__ = ["CudaSampler"]

# Of `SamplingArguments` in compiler/kernels/cuda/sampling.cuh.
_USES_MASK, _USES_PENALTIES = 1, 2
_OPTIONS = 8
_NO_ROW = -1

_PER_ROW = {
    "uniforms": ("float64", 1),
    "options": ("float32", _OPTIONS),
    "choices": ("int32", _OPTIONS),
    "bias_ids": ("int32", MOST_BIASES),
    "bias_values": ("float32", MOST_BIASES),
}
_RESULTS = {
    "sampled_ids": ("int32", 1),
    "logprobs": ("float32", 1),
    "top_ids": ("int32", MOST_TOP_LOGPROBS),
    "top_logprobs": ("float32", MOST_TOP_LOGPROBS),
}


class CudaSampler:
    """Arguments and results of the sampling kernel for up to ``rows`` rows.

    Parameters
    ----------
    context
        The device.
    rows
        The most rows in a step.
    vocab_size
        Ids are 0 to ``vocab_size - 1``.

    Attributes
    ----------
    places
        Addresses on the device, by the names of a launch plan.
    """

    def __init__(self, context: Context, rows: int, vocab_size: int) -> None:
        self._context = context
        self._rows = rows
        self._vocab_size = vocab_size
        self._mask_words = -(-vocab_size // 32)
        # One copy on the host is enough: the results of a step are waited for before the next one is written.
        self._sent = _Region(context, rows, _PER_ROW)
        self._received = _Region(context, rows, _RESULTS)
        self._masks_host = host_array(context, rows * self._mask_words * 4).reshape(rows, -1)
        masks = context.allocate(self._masks_host.nbytes, "grammar masks")
        self._counts = context.allocate(rows * vocab_size * 4, "counts of picked tokens")
        adjusted = context.allocate(rows * vocab_size * 4, "adjusted logits")
        self._masks = masks
        self.places = {
            **self._sent.places,
            **self._received.places,
            "masks": masks,
            "counts": self._counts,
            "adjusted_logits": adjusted,
        }
        self._states: list[SamplingState | None] = [None] * rows
        self._failed: dict[int, Exception] = {}
        self._slots: OrderedDict[SamplingState, int] = OrderedDict()
        self._free_slots = list(range(rows))
        self._sent.arrays["choices"][:, 2] = _NO_ROW
        self._sent.copy_to_device()

    @staticmethod
    def needed(rows: int, vocab_size: int) -> int:
        """Bytes of device memory that a sampler takes."""
        fixed = sum(np.dtype(dtype).itemsize * width for dtype, width in [*_PER_ROW.values(), *_RESULTS.values()])
        return rows * (fixed + -(-vocab_size // 32) * 4 + 2 * vocab_size * 4)

    @staticmethod
    def takes(state: SamplingState) -> bool:
        """Whether the kernel can pick this sequence's tokens; those of others are picked on the host."""
        return len(state.bias_ids) <= MOST_BIASES and state.top_logprobs <= MOST_TOP_LOGPROBS

    def send(self, states: Sequence[SamplingState | None], padded_rows: int) -> None:
        """Queue the copies of what the kernel is told of each row; it leaves those alone that have no state.

        Parameters
        ----------
        states
            Of each row.
        padded_rows
            Rows of the launch; those past the states are left alone as well.
        """
        self._failed.clear()
        changed = False
        for row in range(padded_rows):
            state = states[row] if row < len(states) else None
            if self._states[row] is not state:
                self._describe(row, state)
                changed = True
        arrays = self._sent.arrays
        masked = False
        for row, state in enumerate(states):
            if state is None:
                continue
            if state.has_penalties:
                slot = self._slot(state, states)
                changed = changed or arrays["choices"][row, 2] != slot
                arrays["choices"][row, 2] = slot
            if state.is_random:
                arrays["uniforms"][row, 0] = state.next_uniform()
                changed = True
            if state.constraint is not None:
                self._mask(row, state.constraint)
                masked = True
        if changed:
            self._sent.copy_to_device()
        if masked:
            size = len(states) * self._mask_words * 4
            source, stream = self._masks_host.ctypes.data, self._context.stream
            call(driver().cuMemcpyHtoDAsync(self._masks, source, size, stream), "copying grammar masks")

    def receive(self, states: Sequence[SamplingState | None]) -> None:
        """Queue the copy of what the kernel found."""
        with_logprobs = any(state is not None and state.logprobs for state in states)
        self._received.copy_to_host(None if with_logprobs else "sampled_ids")

    def results(self, states: Sequence[SamplingState | None]) -> list[StepResult]:
        """The tokens, once the stream was waited for: one for each state, or what went wrong with it."""
        ids = self._received.arrays["sampled_ids"][: len(states), 0].tolist()
        return [
            None if state is None else self._result(row, state, token)
            for row, (state, token) in enumerate(zip(states, ids, strict=True))
        ]

    def _result(self, row: int, state: SamplingState, token_id: int) -> StepResult:
        if row in self._failed:
            return self._failed[row]
        if token_id < 0:
            return not_finite()
        try:
            state.record(token_id)
        except Exception as error:  # of one sequence, and the others go on
            return error
        if not state.logprobs:
            return SampledToken(token_id)
        arrays = self._received.arrays
        top = zip(
            arrays["top_ids"][row, : state.top_logprobs].tolist(),
            arrays["top_logprobs"][row, : state.top_logprobs].tolist(),
            strict=True,
        )
        return SampledToken(token_id, float(arrays["logprobs"][row, 0]), tuple(top))

    def _mask(self, row: int, constraint: TokenConstraint) -> None:
        try:
            bits = np.packbits(constraint.allowed(), bitorder="little")
        except Exception as error:  # of one sequence, and the others go on
            self._failed[row] = error
            return
        self._masks_host[row, : len(bits)] = bits

    def _describe(self, row: int, state: SamplingState | None) -> None:
        arrays = self._sent.arrays
        self._states[row] = state
        if state is None:
            arrays["choices"][row, 2] = _NO_ROW
            return
        arrays["options"][row, :6] = (
            state.temperature if state.is_random else 0.0,
            state.top_p,
            state.min_p,
            state.presence_penalty,
            state.frequency_penalty,
            state.repetition_penalty,
        )
        flags = (_USES_MASK if state.constraint is not None else 0) | (_USES_PENALTIES if state.has_penalties else 0)
        biases = len(state.bias_ids)
        arrays["choices"][row, :5] = (state.top_k, flags, 0, biases, state.top_logprobs if state.logprobs else 0)
        arrays["bias_ids"][row, :biases] = state.bias_ids
        arrays["bias_values"][row, :biases] = state.bias

    def _slot(self, state: SamplingState, keep: Sequence[SamplingState | None]) -> int:
        """The place of a sequence's counts; one that has none takes a free one, or the one that was idle longest."""
        slot = self._slots.get(state)
        if slot is not None:
            self._slots.move_to_end(state)
            return slot
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            held = {id(one) for one in keep}
            idle = next(one for one in self._slots if id(one) not in held)
            slot = self._slots.pop(idle)
        self._slots[state] = slot
        counts = np.zeros(self._vocab_size, np.int32)
        counts[list(state.counts.keys())] = list(state.counts.values())
        place = self._counts + slot * counts.nbytes
        # Not in stream order: the results of the last step were waited for, so that nothing reads there now.
        call(driver().cuMemcpyHtoD(place, counts.ctypes.data, counts.nbytes), "copying counts of picked tokens")
        return slot


class _Region:
    """Arrays that lie one after the other on the device and, in the same order, in page-locked memory."""

    def __init__(self, context: Context, rows: int, arrays: dict[str, tuple[str, int]]) -> None:
        self._context = context
        sizes = {name: rows * np.dtype(dtype).itemsize * width for name, (dtype, width) in arrays.items()}
        self.size = sum(sizes.values())
        self._ends: dict[str, int] = {}
        host = host_array(context, self.size)
        host[:] = 0
        self._host: Any = host
        self._device = context.allocate(self.size, "sampling")
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self.places: dict[str, int] = {}
        start = 0
        for name, (dtype, width) in arrays.items():
            end = start + sizes[name]
            self.arrays[name] = host[start:end].view(dtype).reshape(rows, width)
            self.places[name] = self._device + start
            self._ends[name] = end
            start = end

    def copy_to_device(self) -> None:
        stream = self._context.stream
        call(
            driver().cuMemcpyHtoDAsync(self._device, self._host.ctypes.data, self.size, stream),
            "copying sampling options",
        )

    def copy_to_host(self, last: str | None) -> None:
        """Copy everything, or what goes up to the array ``last``."""
        size = self.size if last is None else self._ends[last]
        stream = self._context.stream
        call(driver().cuMemcpyDtoHAsync(self._host.ctypes.data, self._device, size, stream), "copying sampled tokens")
