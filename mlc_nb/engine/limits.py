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
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limits:
    """Tokens in one sequence, and pages of the KV pool."""

    single_sequence: int
    pages: int


def free_memory() -> int:
    """Bytes that this process may still take: what the host has available, within the control group's limit."""
    free = int(psutil.virtual_memory().available)
    granted = [
        _granted(_CGROUP, "memory.max", "memory.current", "inactive_file"),
        _granted(_CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ]
    return min([free, *(room for room in granted if room is not None)])


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
    least = config.max_total_sequence_length or metadata.page_size
    if capacity < least:
        raise OutOfMemoryError(
            f"the model needs {weight_bytes / 2**20:,.0f} MiB for its weights, {_WORKSPACE_BYTES / 2**20:,.0f} MiB to "
            f"work in and {least * token_bytes / 2**20:,.1f} MiB for a KV cache of {least} tokens; "
            f"{free_bytes / 2**20:,.0f} MiB are free, of which {_SHARE_OF_FREE_MEMORY:.0%} may be used. Free memory, "
            "unload another model, or lower engine_config.max_total_sequence_length."
        )
    mode = config.mode or "local"
    by_mode = {"local": min(single, _LOCAL_TOTAL), "interactive": single, "server": config.num_sequences * single}
    total = config.max_total_sequence_length or min(by_mode[mode], capacity)
    if config.max_single_sequence_length is not None and single > total:
        if config.max_total_sequence_length is not None:
            reason = "engine_config.max_total_sequence_length says; raise it"
        elif total == capacity:
            reason = "fit in the free memory; free some"
        else:
            reason = f"mode {mode!r} gives; set engine_config.max_total_sequence_length"
        raise BadRequestError(
            f"engine_config.max_single_sequence_length is {single}, but the KV cache holds {total} tokens, as many as "
            f"{reason}, or lower max_single_sequence_length"
        )
    return Limits(min(single, total), -(-total // metadata.page_size))
