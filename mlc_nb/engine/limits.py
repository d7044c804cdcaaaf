"""How long sequences may be, from the model, the configuration and the memory that is free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from mlc_nb.errors import BadRequestError, OutOfMemoryError
from mlc_nb.quantization.packing import packed_bytes

if TYPE_CHECKING:
    from mlc_nb.protocol.engine_config import EngineConfig
    from mlc_nb.weights.plan import LibraryMetadata

__all__ = ["Limits", "free_memory", "resolve_limits"]

_SHARE_OF_FREE_MEMORY = 0.85
_LOCAL_TOTAL = 8192
_WORKSPACE_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Limits:
    """Tokens in one sequence, and pages of the KV pool."""

    single_sequence: int
    pages: int


def free_memory() -> int:
    """Bytes that this process may still take: what the host has available, within the control group's limit."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii").strip()
    except OSError:
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - int(used)))


def resolve_limits(metadata: LibraryMetadata, config: EngineConfig, free_bytes: int) -> Limits:
    """Apply the rules of the modes (section 8.2 of the MLC formats) to the memory that is free.

    Raises
    ------
    BadRequestError
        If ``max_single_sequence_length`` exceeds the model's context window, or the KV cache cannot hold it.
    OutOfMemoryError
        If the weights and a KV cache for one sequence of the wanted length do not fit.
    """
    context = metadata.context_window_size
    single = config.max_single_sequence_length or context
    if single > context:
        raise BadRequestError(
            f"engine_config.max_single_sequence_length is {single}, but the model's context window is {context} tokens"
        )
    token_bytes = (
        2 * metadata.layers * metadata.kv_heads * metadata.head_dim * (2 if metadata.kv_dtype == "float16" else 4)
    )
    weight_bytes = sum(packed_bytes(m.block_type, m.rows, m.columns) for m in metadata.matrices)
    room = int(free_bytes * _SHARE_OF_FREE_MEMORY) - weight_bytes - _WORKSPACE_BYTES
    capacity = max(room, 0) // token_bytes
    total = config.max_total_sequence_length
    if total is None:
        by_mode = {"local": min(single, _LOCAL_TOTAL), "interactive": single, "server": config.num_sequences * single}
        total = min(by_mode[config.mode or "local"], capacity)
    elif total > capacity:
        total = -1
    smallest = metadata.page_size
    if total < smallest:
        wanted = config.max_total_sequence_length or smallest
        raise OutOfMemoryError(
            f"the model needs {weight_bytes / 2**20:,.0f} MiB for its weights, {_WORKSPACE_BYTES / 2**20:,.0f} MiB to "
            f"work in and {wanted * token_bytes / 2**20:,.1f} MiB for a KV cache of {wanted} tokens; "
            f"{free_bytes / 2**20:,.0f} MiB are free, of which {_SHARE_OF_FREE_MEMORY:.0%} may be used. Free memory, "
            "unload another model, or lower engine_config.max_total_sequence_length."
        )
    if config.max_single_sequence_length is not None and config.max_single_sequence_length > total:
        raise BadRequestError(
            f"engine_config.max_single_sequence_length is {single}, but the KV cache holds {total} tokens; raise "
            "engine_config.max_total_sequence_length or lower max_single_sequence_length"
        )
    return Limits(min(single, total), -(-total // metadata.page_size))
