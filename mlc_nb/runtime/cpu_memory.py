"""The host's memory: what is free, what this process takes and for what, and what an engine will take."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from mlc_nb.quantization.packing import packed_bytes
from mlc_nb.runtime.memory import MemoryNeeds, MemoryRow
from mlc_nb.weights.plan import MAX_STEP_TOKENS

if TYPE_CHECKING:
    from mlc_nb.weights.plan import LibraryMetadata

__all__ = ["PARTIALS_BYTES", "CpuMemory", "cpu_needs", "free_memory", "partials_bytes"]

PARTIALS_BYTES = 64 * 2**20
"""Attention workspace of a call; steps that would need more run in several calls."""

_CGROUP = Path("/sys/fs/cgroup")
_SMAPS = Path("/proc/self/smaps")
_SMAPS_TOTAL = Path("/proc/self/smaps_rollup")
_PRIVATE = ("Private_Clean:", "Private_Dirty:")


class CpuMemory:
    """Implements `DeviceMemory`."""

    def free_bytes(self) -> int:
        """Bytes that this process may still take."""
        return free_memory()

    def total_bytes(self) -> int:
        """Bytes that the host has, or its control group grants."""
        total = int(psutil.virtual_memory().total)
        return min([total, *(limit for limit in _limits() if limit is not None)])

    def process_bytes(self) -> int:
        """Bytes of memory that this process shares with no other."""
        if sys.platform == "linux":
            return _private_bytes(_SMAPS_TOTAL.read_text(encoding="utf-8"))
        return int(psutil.Process().memory_full_info().uss)

    def process_rows(self, engine_bytes: int) -> list[MemoryRow]:
        """Measure what is not of engines: data and code of Python and of libraries."""
        if sys.platform != "linux":
            return [MemoryRow("Python, libraries and data", max(0, self.process_bytes() - engine_bytes))]
        sizes = {"data": 0, "stacks": 0, "files": 0}
        for kind, size in _mappings(_SMAPS.read_text(encoding="utf-8", errors="surrogateescape")):
            sizes[kind] += size
        return [
            MemoryRow("Python and libraries: data", max(0, sizes["data"] - engine_bytes)),
            MemoryRow("Python and libraries: code and files", sizes["files"]),
            MemoryRow("main thread's stack", sizes["stacks"]),
        ]


def free_memory() -> int:
    """Bytes that this process may still take: what the host has available, within the control group's limit."""
    free = int(psutil.virtual_memory().available)
    granted = [
        _granted(_CGROUP, "memory.max", "memory.current", "inactive_file"),
        _granted(_CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ]
    return min([free, *(room for room in granted if room is not None)])


def cpu_needs(metadata: LibraryMetadata, num_sequences: int) -> MemoryNeeds:
    """Work out what `CpuModelRunner` takes for a model.

    Parameters
    ----------
    num_sequences
        Most sequences that run at once: each wants a row of logits.
    """
    chunks = -(-metadata.context_window_size // (metadata.page_size * metadata.chunk_pages))
    token_elements = 2 * metadata.layers * metadata.kv_heads * metadata.head_dim
    tables = metadata.context_window_size * metadata.rope.dim * 4
    inner = [m for m in metadata.matrices if m.rows < metadata.vocab_size]
    # What lies between two products of a layer: the widest result, as activations of the next product, beside the
    # residual stream and its normalized copy. The compiler plans these buffers for the largest step.
    widest = max((m.rows for m in inner), default=0) + max((m.columns for m in inner), default=0)
    buffers = MAX_STEP_TOKENS * 4 * (widest + 2 * metadata.hidden_size)
    return MemoryNeeds(
        weights=sum(packed_bytes(m.block_type, m.rows, m.columns) for m in metadata.matrices)
        + sum(4 * vector.size for vector in metadata.vectors),
        kv_token=token_elements * (2 if metadata.kv_dtype == "float16" else 4),
        workspace=partials_bytes(metadata, chunks) + tables + buffers,
        logits=(num_sequences + 1) * metadata.padded_vocab_size * 4,
    )


def partials_bytes(metadata: LibraryMetadata, chunks: int) -> int:
    """Bytes for the partial results of attention over so many chunks of pages."""
    token = chunks * metadata.query_heads * (metadata.head_dim + 2) * 4
    return min(token * MAX_STEP_TOKENS, max(PARTIALS_BYTES, token))


def _granted(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """Bytes that a control group still grants; None where it sets no limit.

    Files that it has read count as used, though the system drops them when memory is wanted: a model that was just
    downloaded must not seem to fill the machine.
    """
    try:
        most, used = (int((group / name).read_text(encoding="ascii")) for name in (limit, usage))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        return max(0, most - used + int(statistics.get(reclaimable, 0)))
    except (OSError, ValueError):  # no such group, or a limit of "max"
        return None


def _limits() -> list[int | None]:
    """What control groups of either version grant in all."""
    return [_number_in(_CGROUP / "memory.max"), _number_in(_CGROUP / "memory" / "memory.limit_in_bytes")]


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _private_bytes(text: str) -> int:
    """Sum of the private parts of mappings in the form of /proc/<pid>/smaps."""
    return sum(1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith(_PRIVATE))


def _mappings(text: str) -> list[tuple[str, int]]:
    """Kind and private bytes of each mapping."""
    found: list[tuple[str, int]] = []
    kind, size = "data", 0
    for line in text.splitlines():
        first, _, rest = line.partition(" ")
        if first.endswith(":"):
            if first in _PRIVATE:
                size += 1024 * int(rest.split()[0])
            continue
        found.append((kind, size))
        name = line.split(maxsplit=5)[5:]
        path = name[0] if name else ""
        kind, size = "stacks" if path == "[stack]" else "files" if path.startswith("/") else "data", 0
    return [*found, (kind, size)]
