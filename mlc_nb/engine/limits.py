"""How long sequences may be, from the model, the configuration and the memory that is free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlc_nb.engine.memory_plan import SHARE_OF_FREE_MEMORY, MemoryPlan
from mlc_nb.errors import BadRequestError, ModelFormatError
from mlc_nb.protocol.engine_config import ResolvedEngineConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlc_nb.engine.room import Room
    from mlc_nb.protocol.engine_config import EngineConfig
    from mlc_nb.runtime.memory import MemoryNeeds
    from mlc_nb.weights.plan import LibraryMetadata

__all__ = ["Limits", "resolve_limits", "resolved_config"]

_LOCAL_TOTAL = 8192
_ADDRESSABLE_ELEMENTS = 2**31 - 1
"""Of the KV pool, which kernels for CPUs index with 32 bits."""


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


def resolve_limits(metadata: LibraryMetadata, config: EngineConfig, needs: MemoryNeeds, room: Room) -> Limits:
    """Apply the rules of the modes (section 8.2 of the MLC formats) to the memory that is free.

    Where a whole sequence does not fit, the room is asked to make some first.

    Parameters
    ----------
    needs
        What the model takes on its device.
    room
        What of the device is free; the memory of the limits is taken from it.

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
    addressable = _addressable_tokens(metadata, token_elements)
    if config.max_total_sequence_length is not None and config.max_total_sequence_length > addressable:
        raise BadRequestError(
            f"engine_config.max_total_sequence_length is {config.max_total_sequence_length}, but kernels address the "
            f"KV pool with 32 bits: of this model it holds at most {addressable} tokens"
        )
    least = config.max_total_sequence_length or metadata.page_size
    plan = _plan_with_room(needs, room, [config.max_total_sequence_length or min(single, _LOCAL_TOTAL), least])
    in_memory = plan.tokens_that_fit
    if in_memory < least:
        raise plan.refusal(room.others(), configured=config.max_total_sequence_length is not None)
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
    bound = "memory_limit" if plan.allowed == plan.most_bytes else f"{SHARE_OF_FREE_MEMORY:.0%} of what was free"
    memory_rule = (
        f"memory: {plan.allowed / 2**20:,.0f} MiB ({bound}), less {needs.weights / 2**20:,.0f} MiB of weights and "
        f"{(needs.workspace + needs.logits) / 2**20:,.0f} MiB to work in, at {needs.kv_token / 1024:,.1f} KiB a token"
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
    pages = -(-total // metadata.page_size)
    room.take(needs.fixed + pages * metadata.page_size * needs.kv_token)
    return Limits(min(single, total), total, pages, rules)


def _plan_with_room(needs: MemoryNeeds, room: Room, sizes: Sequence[int]) -> MemoryPlan:
    """The plan for the first of these numbers of tokens that fits, by making room if need be; else for the last."""
    for tokens in sizes:
        plan = MemoryPlan(needs, tokens, room.free_bytes(), room.most_bytes())
        if not plan.missing:
            return plan
        if room.make(plan.missing):
            return MemoryPlan(needs, tokens, room.free_bytes(), room.most_bytes())
    return plan


def _addressable_tokens(metadata: LibraryMetadata, token_elements: int) -> int:
    """Tokens in the most whole pages that kernels can address; on a GPU they can address all that there is."""
    page_size = metadata.page_size
    if metadata.for_cuda:
        return _ADDRESSABLE_ELEMENTS // page_size * page_size
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
