"""How long sequences may be, from the model, the configuration and the memory that is free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from mlc_nb.errors import BadRequestError, ModelFormatError, OutOfMemoryError
from mlc_nb.protocol.engine_config import ResolvedEngineConfig
from mlc_nb.quantization.packing import packed_bytes

if TYPE_CHECKING:
    from mlc_nb.protocol.engine_config import EngineConfig
    from mlc_nb.weights.plan import LibraryMetadata

__all__ = ["Limits", "free_memory", "resolve_limits", "resolved_config"]

_SHARE_OF_FREE_MEMORY = 0.85
_LOCAL_TOTAL = 8192
_WORKSPACE_BYTES = 128 * 2**20
_ADDRESSABLE_ELEMENTS = 2**31 - 1
"""Of the KV pool, which kernels index with 32 bits."""
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limits:
    """How long sequences may be, and why.

    Attributes
    ----------
    single_sequence, total
        Tokens in one sequence, and in all that hold pages together.
    pages
        Pages of the KV pool.
    rules
        By the name of the field of `EngineConfig`, the rule that bound its value.
    """

    single_sequence: int
    total: int
    pages: int
    rules: dict[str, str]


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
        If ``max_single_sequence_length`` exceeds the model's context window, or the KV cache cannot hold it, or
        if ``max_total_sequence_length`` exceeds what the kernels can address.
    ModelFormatError
        If not even one page of KV cache could be addressed.
    OutOfMemoryError
        If the weights and a KV cache for one sequence of the wanted length do not fit.
    """
    context = metadata.context_window_size
    single = config.max_single_sequence_length or context
    if single > context:
        raise BadRequestError(
            f"engine_config.max_single_sequence_length is {single}, but the model's context window is {context} tokens"
        )
    token_elements = 2 * metadata.layers * metadata.kv_heads * metadata.head_dim
    token_bytes = token_elements * (2 if metadata.kv_dtype == "float16" else 4)
    addressable = _addressable_tokens(token_elements, metadata.page_size)
    if config.max_total_sequence_length is not None and config.max_total_sequence_length > addressable:
        raise BadRequestError(
            f"engine_config.max_total_sequence_length is {config.max_total_sequence_length}, but kernels address the "
            f"KV pool with 32 bits: of this model it holds at most {addressable} tokens"
        )
    weight_bytes = sum(packed_bytes(m.block_type, m.rows, m.columns) for m in metadata.matrices)
    room = int(free_bytes * _SHARE_OF_FREE_MEMORY) - weight_bytes - _WORKSPACE_BYTES
    in_memory = max(room, 0) // token_bytes
    least = config.max_total_sequence_length or metadata.page_size
    if in_memory < least:
        lower = "" if config.max_total_sequence_length is None else ", or lower engine_config.max_total_sequence_length"
        raise OutOfMemoryError(
            f"the model needs {weight_bytes / 2**20:,.0f} MiB for its weights, {_WORKSPACE_BYTES / 2**20:,.0f} MiB to "
            f"work in and {least * token_bytes / 2**20:,.1f} MiB for a KV cache of {least} tokens; "
            f"{free_bytes / 2**20:,.0f} MiB are free, of which {_SHARE_OF_FREE_MEMORY:.0%} may be used. Free memory, "
            f"or unload another model{lower}."
        )
    capacity = min(in_memory, addressable)
    mode = config.mode or "local"
    by_mode = {"local": min(single, _LOCAL_TOTAL), "interactive": single, "server": config.num_sequences * single}
    # The pool has whole pages, one at least.
    total = config.max_total_sequence_length or min(max(by_mode[mode], metadata.page_size), capacity)
    if config.max_single_sequence_length is not None and single > total:
        if config.max_total_sequence_length is not None:
            reason = "engine_config.max_total_sequence_length says; raise it"
        elif total == addressable:
            reason = "its kernels can address with 32 bits; use a model with a smaller KV cache"
        elif total == capacity:
            reason = "fit in the free memory; free some"
        else:
            reason = f"mode {mode!r} gives; set engine_config.max_total_sequence_length"
        raise BadRequestError(
            f"engine_config.max_single_sequence_length is {single}, but the KV cache holds {total} tokens, as many as "
            f"{reason}, or lower max_single_sequence_length"
        )
    memory_rule = (
        f"memory: {_SHARE_OF_FREE_MEMORY:.0%} of {free_bytes / 2**20:,.0f} MiB that were free, less "
        f"{weight_bytes / 2**20:,.0f} MiB of weights and {_WORKSPACE_BYTES / 2**20:,.0f} MiB to work in, at "
        f"{token_bytes / 1024:,.1f} KiB a token"
    )
    mode_rule = {
        "local": f"mode 'local': one whole sequence, at most {_LOCAL_TOTAL} tokens",
        "interactive": "mode 'interactive': one whole sequence",
        "server": f"mode 'server': {config.num_sequences} whole sequences",
    }[mode]
    if config.max_total_sequence_length is not None:
        total_rule = "as configured"
    else:
        address_rule = f"kernels address the KV pool with 32 bits: at most {addressable} tokens"
        capacity_rule = address_rule if addressable < in_memory else memory_rule
        total_rule = capacity_rule if by_mode[mode] > capacity else mode_rule
    if single > total:
        single_rule = f"max_total_sequence_length ({total_rule})"
    else:
        single_rule = "the model's context window" if config.max_single_sequence_length is None else "as configured"
    rules = {"max_single_sequence_length": single_rule, "max_total_sequence_length": total_rule}
    return Limits(min(single, total), total, -(-total // metadata.page_size), rules)


def _addressable_tokens(token_elements: int, page_size: int) -> int:
    """Tokens in the most whole pages that kernels can address."""
    pages = _ADDRESSABLE_ELEMENTS // (token_elements * page_size)
    if pages < 1:
        raise ModelFormatError(
            f"the model needs {token_elements} numbers a token in the KV cache, of which not even a page of "
            f"{page_size} tokens can be addressed with 32 bits; it is too large for this version"
        )
    return pages * page_size


def resolved_config(
    config: EngineConfig, limits: Limits, *, activation_dtype: str, num_threads: int
) -> ResolvedEngineConfig:
    """Fill in every value that ``config`` leaves open, with the rule that bound it."""
    mode = config.mode or "local"
    values: dict[str, tuple[Any, str]] = {
        "mode": (mode, "the default"),
        "max_num_sequence": (config.num_sequences, f"mode {mode!r}"),
        "max_total_sequence_length": (limits.total, limits.rules["max_total_sequence_length"]),
        "max_single_sequence_length": (limits.single_sequence, limits.rules["max_single_sequence_length"]),
        "prefill_chunk_size": (config.prefill_chunk, "the default; the engine takes fewer where time is short"),
        "prefix_cache_max_num_recycling_seqs": (-1, "no limit but the pool"),
        "activation_dtype": (activation_dtype, "what is best for the device"),
        "num_threads": (num_threads, "the physical cores that this process may use"),
    }
    rules = {name: rule for name, (_, rule) in values.items()}
    # The limits know for themselves what was configured and held.
    configured = {name for name in values.keys() - limits.rules.keys() if getattr(config, name) not in (None, "auto")}
    rules |= dict.fromkeys(configured, "as configured")
    resolved = {name: value for name, (value, _) in values.items() if name not in configured}
    return ResolvedEngineConfig(**{**config.model_dump(), **resolved}, rules=rules)
