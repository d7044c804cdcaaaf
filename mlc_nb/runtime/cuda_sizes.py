"""How large the buffers of a model on a GPU are, known before anything is allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlc_nb.runtime.cublas import WORKSPACE_BYTES
from mlc_nb.runtime.cuda_graphs import MOST_DECODES, bucket_of
from mlc_nb.runtime.cuda_inputs import InputSizes, StepInputs
from mlc_nb.runtime.cuda_sampler import CudaSampler
from mlc_nb.runtime.memory import MemoryNeeds
from mlc_nb.weights.launch_plan import compile_size
from mlc_nb.weights.plan import MAX_STEP_TOKENS

if TYPE_CHECKING:
    from mlc_nb.weights.launch_plan import LaunchPlan
    from mlc_nb.weights.plan import LibraryMetadata

__all__ = ["OVERHEAD_BYTES", "StepSizes"]

OVERHEAD_BYTES = 192 * 2**20
"""What modules, cuBLAS and CUDA graphs take beside what is allocated for an engine, and what loading weights takes."""

_LEAST_ROWS = 64
_BLOCKS_PER_MULTIPROCESSOR = 4
_LEAST_PAGES_PER_SPLIT = 4
_ELEMENT_BYTES = 2


class StepSizes:
    """The most of everything in the steps of an engine, and the memory that follows from it.

    Parameters
    ----------
    plan, metadata
        Of the compiled model.
    positions
        Most tokens in one sequence.
    num_sequences
        Most sequences in a step.
    multiprocessors
        Of the GPU.

    Attributes
    ----------
    limits
        The largest values of the plan's sizes, by name.
    inputs
        The same for the numbers of a step.
    """

    def __init__(
        self, plan: LaunchPlan, metadata: LibraryMetadata, *, positions: int, num_sequences: int, multiprocessors: int
    ) -> None:
        self._plan = plan
        self._metadata = metadata
        self._multiprocessors = multiprocessors
        self._table_pages = -(-positions // metadata.page_size)
        self.positions = positions
        sequences = min(bucket_of(num_sequences) or num_sequences, MOST_DECODES)
        self.rows = min(max(sequences, _LEAST_ROWS), plan.heads[-1].most)
        self.inputs = InputSizes(
            tokens=MAX_STEP_TOKENS + sequences,
            sequences=sequences,
            rows=self.rows,
            page_table_width=self._table_pages,
            tile_rows=plan.tile_rows,
        )
        at_once = _BLOCKS_PER_MULTIPROCESSOR * multiprocessors
        self.limits = {
            "most_tokens": self.inputs.tokens,
            "most_rows": self.rows,
            "most_sequences": sequences,
            "page_table_width": self._table_pages,
            "decode_parts": -(-at_once // plan.decode_blocks) + sequences,
        }

    def splits(self, batch: int) -> int:
        """Blocks that share the context of each of ``batch`` decodes: enough to fill the GPU."""
        at_once = _BLOCKS_PER_MULTIPROCESSOR * self._multiprocessors
        wanted = -(-at_once // (self._plan.decode_blocks * max(batch, 1)))
        return max(1, min(wanted, -(-self._table_pages // _LEAST_PAGES_PER_SPLIT)))

    def buffer_bytes(self) -> dict[str, int]:
        """Bytes of each of the plan's buffers."""
        return {buffer.name: compile_size(buffer.size)(self.limits) for buffer in self._plan.buffers}

    def kv_bytes(self, num_pages: int) -> int:
        """Bytes of a KV pool."""
        return self._metadata.layers * num_pages * self._plan.page_elements * _ELEMENT_BYTES

    def needs(self) -> MemoryNeeds:
        """What an engine takes."""
        logits = self.buffer_bytes()["logits"]
        return MemoryNeeds(
            weights=sum(self._plan.parameters),
            kv_token=self.kv_bytes(1) // self._metadata.page_size,
            workspace=self.workspace_bytes - logits,
            logits=logits,
        )

    @property
    def workspace_bytes(self) -> int:
        """Bytes of everything but weights and KV pool."""
        rope = 4 * self.positions * self._metadata.rope.dim
        return (
            sum(self.buffer_bytes().values())
            + rope
            + StepInputs.needed(self.inputs)
            + CudaSampler.needed(self.rows, self._metadata.vocab_size)
            + WORKSPACE_BYTES
            + OVERHEAD_BYTES
        )
