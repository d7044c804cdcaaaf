"""Runs steps of one compiled model on the CPU: owns its weights, its KV pages and its virtual machine."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mlc_nb.errors import EngineTerminatedError, MLCError
from mlc_nb.runtime.arena import Arena
from mlc_nb.runtime.cores import usable_cores
from mlc_nb.runtime.cpu_memory import PARTIALS_BYTES, partials_bytes
from mlc_nb.runtime.crew import WorkerCrew
from mlc_nb.runtime.memory import MemoryUse, address_range, resident_bytes
from mlc_nb.runtime.native import load_native, load_virtual_machine, return_free_memory
from mlc_nb.runtime.step import SequenceSlice, StepResult
from mlc_nb.runtime.step_inputs import StepInputs
from mlc_nb.weights.plan import MAX_STEP_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mlc_nb.library import LibraryBundle

__all__ = ["CpuModelRunner"]


_LEAST_PREFILL_CHUNK = 8


class CpuModelRunner:
    """A model on the CPU. Made, used and closed on one thread.

    Parameters
    ----------
    bundle
        The compiled model.
    parameters
        Its parameters, from `mlc_nb.runtime.parameters.load_parameters`.
    rope
        Cosines and sines, from `mlc_nb.runtime.parameters.rope_tables`; their length is the longest sequence.
    num_pages
        Pages of 16 tokens in the KV pool.
    num_threads
        Threads of the kernels; None takes the usable cores.
    """

    def __init__(
        self,
        bundle: LibraryBundle,
        parameters: Sequence[npt.NDArray[Any]],
        rope: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]],
        *,
        num_pages: int,
        num_threads: int | None,
    ) -> None:
        metadata = bundle.metadata
        self.metadata = metadata
        self.page_size = metadata.page_size
        self.least_prefill_chunk = _LEAST_PREFILL_CHUNK
        self.weight_bytes = sum(parameter.nbytes for parameter in parameters)
        self._tvm_ffi = load_native()
        self.num_threads = num_threads or usable_cores()
        kernels, self._machine = load_virtual_machine(bundle.executable, bundle.objects)
        self._crew = WorkerCrew(kernels, self.num_threads)
        self._forward = self._machine["forward"]
        self.resize_kv_cache(num_pages)
        self._parameters = self._tvm_ffi.Array([self._tensor(parameter) for parameter in parameters])
        self._rope: tuple[Any, ...] = tuple(self._tensor(table) for table in rope)
        self._partial_bytes = metadata.query_heads * (metadata.head_dim + 2) * 4
        most_chunks = -(-len(rope[0]) // (metadata.page_size * metadata.chunk_pages))
        partials = partials_bytes(metadata, most_chunks)
        self._partials = Arena(partials, "the attention workspace").array((partials // 4,), "float32")
        self._logits = np.empty((0, metadata.padded_vocab_size), np.float32)
        unwanted = (1, metadata.padded_vocab_size)
        self._unwanted_logits = Arena(Arena.needed([(unwanted, "float32")]), "the logits").array(unwanted, "float32")
        self._inputs: StepInputs | None = None
        # Addresses alone, which keep nothing in memory.
        self._weight_ranges = [address_range(*parameters)]
        self._workspace_ranges = [address_range(self._partials), address_range(*rope)]
        self._closed = False

    def logits(self, slices: Sequence[SequenceSlice]) -> npt.NDArray[np.float32]:
        """Run one step; logits after the last token of each slice, float32 ``[len(slices), vocab_size]``."""
        return np.array(self._run(slices, _last_rows(slices)))

    def logits_all(self, slices: Sequence[SequenceSlice]) -> npt.NDArray[np.float32]:
        """Run one step; logits after every new token, float32 ``[total new tokens, vocab_size]``."""
        return np.array(self._run(slices, list(range(sum(len(part.token_ids) for part in slices)))))

    def step(self, slices: Sequence[SequenceSlice], meanwhile: Callable[[], None] | None = None) -> list[StepResult]:
        """Run one step and sample; one entry a slice: a token, what sampling raised, or None if not to be sampled."""
        if meanwhile is not None:
            meanwhile()
        rows: list[int] = []
        wanted: list[tuple[int, int]] = []
        for index, (part, last) in enumerate(zip(slices, _last_rows(slices), strict=True)):
            if part.scorer is not None:
                wanted.append((index, len(part.token_ids)))
                rows += range(last + 1 - len(part.token_ids), last + 1)
            elif part.sampling is not None:
                wanted.append((index, 1))
                rows.append(last)
        logits = self._run(slices, rows)
        results: list[StepResult] = [None] * len(slices)
        start = 0
        for index, count in wanted:
            results[index] = _pick(slices[index], logits[start : start + count])
            start += count
        return results

    def resize_kv_cache(self, num_pages: int) -> None:
        """Replace the KV pool by an empty one of so many pages.

        Raises
        ------
        OutOfMemoryError
            If the system does not grant it; the old pool stays.
        """
        metadata = self.metadata
        shape = (num_pages, metadata.layers, 2, metadata.kv_heads, metadata.page_size * metadata.head_dim)
        arena = Arena(Arena.needed([(shape, metadata.kv_dtype)]), "the KV cache")
        pages = arena.array(shape, metadata.kv_dtype)
        self._pages = self._tensor(pages)
        self.num_pages, self.kv_bytes = num_pages, pages.nbytes
        self._kv_ranges = [address_range(pages)]

    def memory(self) -> MemoryUse:
        """Measure what the runner holds now; from any thread."""
        if self._closed:
            return MemoryUse()
        logits, unwanted = self._logits, self._unwanted_logits
        return MemoryUse(
            weights=resident_bytes(self._weight_ranges),
            kv_cache=resident_bytes(self._kv_ranges),
            workspace=resident_bytes(self._workspace_ranges),
            logits=resident_bytes([address_range(logits), address_range(unwanted)]),
        )

    def close(self) -> None:
        """Release weights, KV pages and the library; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._crew.close()
        self._forward = self._machine = self._inputs = None
        self._parameters = self._pages = None
        self._rope = ()
        self._partials = self._logits = self._unwanted_logits = np.empty((0, 0), np.float32)
        return_free_memory()

    def _run(self, slices: Sequence[SequenceSlice], rows: Sequence[int]) -> npt.NDArray[np.float32]:
        """Run one step in as few calls as its size allows; logits after the new tokens that ``rows`` names, ascending.

        The result lies in this runner's own buffer: it is overwritten by the next step.
        """
        if self._closed:
            raise EngineTerminatedError("the model was released; make a new engine")
        chunks = self._chunks(slices)
        most = min(MAX_STEP_TOKENS, max(1, PARTIALS_BYTES // (chunks * self._partial_bytes)))
        logits = self._logits_buffer(len(rows))
        done = first = 0
        for call in _calls(slices, most):
            count = sum(len(part.token_ids) for part in call)
            wanted = [row - first for row in rows[done:] if row < first + count]
            self._call(call, wanted, logits[done : done + len(wanted)])
            done, first = done + len(wanted), first + count
        return logits[:, : self.metadata.vocab_size]

    def _call(self, slices: Sequence[SequenceSlice], rows: Sequence[int], logits: npt.NDArray[np.float32]) -> None:
        if not rows:
            # The compiled output head takes no empty batch.
            rows, logits = [sum(len(part.token_ids) for part in slices) - 1], self._unwanted_logits
        inputs = self._inputs_for(slices, len(rows))
        inputs.fill(slices, rows)
        try:
            self._forward(
                *inputs.tensors, *self._rope, self._pages, inputs.partials, self._tensor(logits), self._parameters
            )
        except Exception as error:
            raise MLCError(f"a step of the model failed in native code: {error}") from error

    def _inputs_for(self, slices: Sequence[SequenceSlice], rows: int) -> StepInputs:
        """The arguments of the last call where their shapes fit, as in one decode after another; else new ones."""
        tokens = sum(len(part.token_ids) for part in slices)
        chunks = self._chunks(slices)
        shapes = (tokens, len(slices), chunks, rows)
        if self._inputs is None or self._inputs.shapes != shapes:
            size = tokens * chunks * self._partial_bytes // 4
            shape = (tokens, chunks, self.metadata.query_heads, self.metadata.head_dim + 2)
            partials = self._tensor(self._partials[:size].reshape(shape))
            self._inputs = StepInputs(shapes, self.metadata.chunk_pages, partials, self._tensor)
        return self._inputs

    def _logits_buffer(self, rows: int) -> npt.NDArray[np.float32]:
        if len(self._logits) < rows:
            shape = (rows, self.metadata.padded_vocab_size)
            self._logits = Arena(Arena.needed([(shape, "float32")]), "the logits").array(shape, "float32")
        return self._logits[:rows]

    def _chunks(self, slices: Sequence[SequenceSlice]) -> int:
        """Chunks of pages in the longest page table."""
        end = max([part.start_position + len(part.token_ids) for part in slices])
        return -(-end // (self.page_size * self.metadata.chunk_pages))

    def _tensor(self, array: npt.NDArray[Any]) -> Any:
        return self._tvm_ffi.from_dlpack(array)


def _pick(part: SequenceSlice, logits: npt.NDArray[np.float32]) -> StepResult:
    """Score and sample one slice from the logits after all its tokens or after the last."""
    try:
        if part.scorer is not None:
            part.scorer.score(part.start_position, logits)
        return None if part.sampling is None else part.sampling.sample(logits[-1])
    except Exception as error:  # of one sequence, and the others go on
        return error


def _last_rows(slices: Sequence[SequenceSlice]) -> list[int]:
    """Of each slice the row of its last new token."""
    return [end - 1 for end in itertools.accumulate(len(part.token_ids) for part in slices)]


def _calls(slices: Sequence[SequenceSlice], most: int) -> Iterator[list[SequenceSlice]]:
    """Cut a step into calls of at most ``most`` new tokens, in order; usually it is one."""
    if sum(len(part.token_ids) for part in slices) <= most:
        yield list(slices)
        return
    call: list[SequenceSlice] = []
    room = most
    for part in slices:
        start = 0
        while start < len(part.token_ids):
            taken = part.token_ids[start : start + room]
            call.append(SequenceSlice(taken, part.start_position + start, part.page_table, None))
            start += len(taken)
            room -= len(taken)
            if not room:
                yield call
                call, room = [], most
    if call:
        yield call
