"""Runs steps of one compiled model on a GPU: owns its weights, its KV pages, its program and its CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mlc_nb.errors import EngineTerminatedError, OutOfMemoryError
from mlc_nb.runtime.cublas import WORKSPACE_BYTES, Cublas
from mlc_nb.runtime.cuda_driver import Context, call, driver
from mlc_nb.runtime.cuda_graphs import DecodeGraphs, bucket_of
from mlc_nb.runtime.cuda_inputs import StepInputs
from mlc_nb.runtime.cuda_program import CudaProgram
from mlc_nb.runtime.cuda_sampler import CudaSampler
from mlc_nb.runtime.cuda_sizes import StepSizes
from mlc_nb.runtime.cuda_weights import PORTION_BYTES, fill_parameters, upload
from mlc_nb.runtime.memory import MemoryUse
from mlc_nb.runtime.parameters import rope_tables
from mlc_nb.runtime.step import SequenceSlice
from mlc_nb.weights.launch_plan import LaunchPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mlc_nb.library import LibraryBundle
    from mlc_nb.runtime.devices import CudaDevice
    from mlc_nb.runtime.parameters import SourceTensorData
    from mlc_nb.runtime.sampler import SamplingState
    from mlc_nb.runtime.step import StepResult

__all__ = ["CudaModelRunner"]


# With fewer, a step waits for the memory that holds the weights: an H200 has 528 at once, a T4 160.
_PREFILL_TOKENS_PER_MULTIPROCESSOR = 4


@dataclass(slots=True)
class _Piece:
    """New tokens of a slice that run in one call, the last ``rows`` of which have their logits wanted."""

    owner: int
    slice: SequenceSlice
    rows: int


class CudaModelRunner:
    """A model on a GPU. Made, used and closed on one thread.

    Decodes whose rows are all sampled on the GPU run as one CUDA graph, of which there is one for each size of batch
    (rounded up); other steps are queued launch by launch.

    Parameters
    ----------
    bundle
        The compiled model.
    tensors
        The file's tensors by name.
    device
        The GPU.
    num_pages
        Pages of 16 tokens in the KV pool.
    positions
        Most tokens in one sequence.
    num_sequences
        Most sequences in a step.
    progress
        Called with the bytes of weights that were copied since the last call.
    use_graphs
        Whether decodes run as CUDA graphs.

    Raises
    ------
    OutOfMemoryError
        If the device has not enough free memory.
    DeviceUnavailableError
        If CUDA fails.
    """

    def __init__(
        self,
        bundle: LibraryBundle,
        tensors: Mapping[str, SourceTensorData],
        device: CudaDevice,
        *,
        num_pages: int,
        positions: int,
        num_sequences: int,
        progress: Callable[[int], object],
        use_graphs: bool = True,
    ) -> None:
        metadata = bundle.metadata
        plan = LaunchPlan.model_validate_json(bundle.launch_plan.read_bytes())
        self._sizes = StepSizes(
            plan,
            metadata,
            positions=positions,
            num_sequences=num_sequences,
            multiprocessors=device.multiprocessors,
        )
        self.metadata = metadata
        self.page_size = metadata.page_size
        self.least_prefill_chunk = _PREFILL_TOKENS_PER_MULTIPROCESSOR * device.multiprocessors
        self.num_pages = num_pages
        self.weight_bytes = sum(plan.parameters)
        self.kv_bytes = self._sizes.kv_bytes(num_pages)
        self.use_graphs = use_graphs
        self._closed = False
        self._graphs: DecodeGraphs | None = None
        self._cublas: Cublas | None = None
        self._context = Context(device.ordinal)
        try:
            self._free_before = self._context.free_memory()
            self._check_memory(device)
            self._open(bundle, plan, tensors, progress)
        except BaseException:
            self.close()
            raise

    def logits(self, slices: Sequence[SequenceSlice]) -> npt.NDArray[np.float32]:
        """Run one step; logits after the last token of each slice, float32 ``[len(slices), vocab_size]``."""
        return self._logits(slices, [1] * len(slices))

    def logits_all(self, slices: Sequence[SequenceSlice]) -> npt.NDArray[np.float32]:
        """Run one step; logits after every new token, float32 ``[total new tokens, vocab_size]``."""
        return self._logits(slices, [len(part.token_ids) for part in slices])

    def step(self, slices: Sequence[SequenceSlice], meanwhile: Callable[[], None] | None = None) -> list[StepResult]:
        """Run one step and sample; one entry a slice: a token, what sampling raised, or None if not to be sampled."""
        results: list[StepResult] = [None] * len(slices)
        for pieces in self._calls(slices, [_wanted_rows(part) for part in slices]):
            states = [_kernel_state(piece) for piece in pieces for _ in range(piece.rows)]
            self._queue(pieces, states)
            if states:
                self._sampler.receive(states)
            if meanwhile is not None:
                meanwhile()
                meanwhile = None
            # Prefill chunks that sample nothing are waited for too: they are sized by how long they take.
            self._context.synchronize()
            if not states:
                continue
            sampled = self._sampler.results(states)
            row = 0
            for piece in pieces:
                if piece.rows and states[row] is not None:
                    results[piece.owner] = sampled[row]
                elif piece.rows:
                    results[piece.owner] = _pick(piece, self._copy_logits(row, piece.rows), results[piece.owner])
                row += piece.rows
        return results

    def memory(self) -> MemoryUse:
        """What is held on the device now; from any thread."""
        return MemoryUse() if self._closed else self._memory

    def resize_kv_cache(self, num_pages: int) -> None:
        """Replace the KV pool by an empty one of so many pages.

        Raises
        ------
        OutOfMemoryError
            There is no memory for it beside the old one; the old pool stays.
        """
        self._context.synchronize()
        size = self._sizes.kv_bytes(num_pages)
        pages = self._context.allocate(size, "the KV cache")
        call(driver().cuMemsetD8(pages, 0, size), "clearing the KV cache")
        old = self._program.places["pages"]
        # Graphs hold the old address.
        assert self._graphs is not None
        self._graphs.close()
        self._program.move("pages", pages)
        self._program.set_limit("num_pages", num_pages)
        self._context.free(old)
        self.num_pages, self.kv_bytes = num_pages, size
        self._measure()

    def close(self) -> None:
        """Release weights, KV pages and the library; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._graphs is not None:
            self._graphs.close()
        if self._cublas is not None:
            self._cublas.close()
        self._context.close()

    def _open(
        self,
        bundle: LibraryBundle,
        plan: LaunchPlan,
        tensors: Mapping[str, SourceTensorData],
        progress: Callable[[int], object],
    ) -> None:
        context, metadata, sizes = self._context, self.metadata, self._sizes
        parameters = [context.allocate(count, "the weights") for count in plan.parameters]
        pages = context.allocate(self.kv_bytes, "the KV cache")
        call(driver().cuMemsetD8(pages, 0, self.kv_bytes), "clearing the KV cache")
        rope = rope_tables(metadata, tensors, sizes.positions)
        cosines, sines = (context.allocate(table.nbytes, "rotary embeddings") for table in rope)
        upload(cosines, rope[0])
        upload(sines, rope[1])
        self._inputs = StepInputs(context, sizes.inputs)
        self._sampler = CudaSampler(context, sizes.rows, metadata.vocab_size)
        self._cublas = Cublas(int(context.stream), context.allocate(WORKSPACE_BYTES, "cuBLAS"))
        source = context.allocate(PORTION_BYTES, "loading the weights")
        places = {**self._inputs.places, **self._sampler.places}
        self._program = CudaProgram(
            context,
            plan,
            bundle.machine_code.read_bytes(),
            limits={**sizes.limits, "num_pages": self.num_pages},
            buffers=sizes.buffer_bytes(),
            places={**places, "pages": pages, "cosines": cosines, "sines": sines, "source": source},
            parameters=parameters,
            cublas=self._cublas,
        )
        fill_parameters(context, self._program, plan, metadata, tensors, parameters, progress)
        context.free(source)
        self._graphs = DecodeGraphs(context, self._queue_decodes)
        self._measure()

    def _logits(self, slices: Sequence[SequenceSlice], rows: Sequence[int]) -> npt.NDArray[np.float32]:
        found = []
        for pieces in self._calls(slices, rows):
            count = sum(piece.rows for piece in pieces)
            self._queue(pieces, [None] * count)
            self._context.synchronize()
            found.append(self._copy_logits(0, count))
        return np.concatenate(found)

    def _calls(self, slices: Sequence[SequenceSlice], rows: Sequence[int]) -> Iterator[list[_Piece]]:
        """Cut a step into calls that the buffers can hold, in order; usually it is one.

        Of each slice, the logits after its last ``rows`` tokens are wanted.
        """
        if self._closed:
            raise EngineTerminatedError("the model was released; make a new engine")
        most_tokens, most_rows = self._sizes.inputs.tokens, self._sizes.rows
        counts = [len(part.token_ids) for part in slices]
        if sum(counts) <= most_tokens and sum(rows) <= most_rows:
            yield [_Piece(owner, part, wanted) for owner, (part, wanted) in enumerate(zip(slices, rows, strict=True))]
            return
        call: list[_Piece] = []
        tokens_left, rows_left = most_tokens, most_rows
        for owner, (part, count, wanted) in enumerate(zip(slices, counts, rows, strict=True)):
            start = 0
            while start < count:
                # The first tokens have no rows, the last ones have one each.
                silent = max(count - wanted - start, 0)
                taken = min(count - start, tokens_left, silent + rows_left)
                if taken:
                    call.append(_Piece(owner, _cut(part, start, taken), max(taken - silent, 0)))
                    start += taken
                    tokens_left -= taken
                    rows_left -= call[-1].rows
                if start < count or not tokens_left:
                    yield call
                    call, tokens_left, rows_left = [], most_tokens, most_rows
        if call:
            yield call

    def _queue(self, pieces: Sequence[_Piece], states: Sequence[SamplingState | None]) -> None:
        """Queue a call, up to the tokens that the kernel samples for ``states``, one for each wanted row."""
        assert self._graphs is not None  # made when the runner was
        rows: list[int] = []
        tokens = 0
        for piece in pieces:
            tokens += len(piece.slice.token_ids)
            rows += range(tokens - piece.rows, tokens)
        bucket = bucket_of(tokens) if tokens == len(pieces) == len(rows) and self.use_graphs else 0
        if bucket > min(self._sizes.rows, self._sizes.inputs.sequences):
            bucket = 0
        padded_tokens, padded_rows = (bucket, bucket) if bucket else (tokens, len(rows))
        slices = [piece.slice for piece in pieces]
        batch, tiles = self._inputs.send(slices, rows, padded_tokens=padded_tokens, padded_rows=padded_rows)
        self._sampler.send(states, padded_rows)
        if bucket:
            captured = len(self._graphs)
            self._graphs.launch(bucket)
            if len(self._graphs) > captured:
                self._measure()
            return
        self._queue_body(tokens, batch, tiles)
        if rows:
            self._queue_head(len(rows))

    def _queue_decodes(self, batch: int) -> None:
        """Queue a step of ``batch`` decodes, all sampled, to be captured."""
        self._queue_body(batch, batch, 0, overlapping=True)
        self._queue_head(batch, overlapping=True)

    def _queue_body(self, tokens: int, batch: int, tiles: int, *, overlapping: bool = False) -> None:
        body = next(body for body in self._program.bodies if body.most >= tokens)
        sizes = {"tokens": tokens, "batch": batch, "splits": self._sizes.splits(batch), "tiles": tiles}
        self._program.run(body, sizes, overlapping=overlapping)

    def _queue_head(self, rows: int, *, overlapping: bool = False) -> None:
        head = next(head for head in self._program.heads if head.most >= rows)
        self._program.run(head, {"rows": rows}, overlapping=overlapping)
        self._program.run(self._program.sampling, {"rows": rows}, overlapping=overlapping)

    def _copy_logits(self, row: int, rows: int) -> npt.NDArray[np.float32]:
        logits = np.empty((rows, self.metadata.vocab_size), np.float32)
        place = self._program.places["logits"] + row * logits.strides[0]
        call(driver().cuMemcpyDtoH(logits.ctypes.data, place, logits.nbytes), "copying logits")
        return logits

    def _check_memory(self, device: CudaDevice) -> None:
        needed = self.weight_bytes + self.kv_bytes + self._sizes.workspace_bytes
        free = self._free_before
        if needed > free:
            raise OutOfMemoryError(
                f"the model needs {needed / 2**20:,.0f} MiB of the memory of {device.name} ({device.device}), of which "
                f"{free / 2**20:,.0f} MiB are free. Free memory, or lower engine_config.max_total_sequence_length or "
                "max_num_sequence."
            )

    def _measure(self) -> None:
        """Bring the memory table up to date: what was allocated, and what modules, cuBLAS and graphs took beside it."""
        allocated = self._context.allocated_bytes
        taken = max(self._free_before - self._context.free_memory(), allocated)
        logits = self._sizes.buffer_bytes()["logits"]
        self._memory = MemoryUse(
            weights=self.weight_bytes,
            kv_cache=self.kv_bytes,
            workspace=taken - self.weight_bytes - self.kv_bytes - logits,
            logits=logits,
        )


def _wanted_rows(part: SequenceSlice) -> int:
    if part.scorer is not None:
        return len(part.token_ids)
    return 0 if part.sampling is None else 1


def _kernel_state(piece: _Piece) -> SamplingState | None:
    """The state by which the kernel samples; None where the host does, or nobody."""
    state = piece.slice.sampling
    return state if piece.slice.scorer is None and state is not None and CudaSampler.takes(state) else None


def _cut(part: SequenceSlice, start: int, count: int) -> SequenceSlice:
    """Some tokens of a slice; only the last ones are sampled after."""
    is_last = start + count == len(part.token_ids)
    return SequenceSlice(
        part.token_ids[start : start + count],
        part.start_position + start,
        part.page_table,
        part.sampling if is_last else None,
        part.scorer,
    )


def _pick(piece: _Piece, logits: npt.NDArray[np.float32], found: StepResult) -> StepResult:
    """Score and sample on the host; an error that an earlier piece of the slice has ``found`` stays."""
    part = piece.slice
    try:
        if part.scorer is not None:
            part.scorer.score(part.start_position + len(part.token_ids) - piece.rows, logits)
        return found if part.sampling is None else part.sampling.sample(logits[-1])
    except Exception as error:  # of one sequence, and the others go on
        return error
