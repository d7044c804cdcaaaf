"""What the engines of this process are and hold: the rows of the tables that users see."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from mlc_nb.admission import Tenant, memory_policy
from mlc_nb.errors import EngineTerminatedError
from mlc_nb.runtime.memory import MemoryRow, device_memory

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["EngineRow", "EngineState", "Listed", "MemoryTable", "row_of", "table_of"]

EngineState = Literal["loading", "ready", "failed", "terminated"]


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One line of the table of engines.

    Attributes
    ----------
    model
        The name that the engine was first asked for.
    device
        As it was asked for.
    state
        ``"loading"``, ``"ready"``, ``"failed"`` or ``"terminated"``.
    scheme
        How most of its weights are stored, such as ``"Q4_1"``; None unless ready.
    weight_bytes, kv_bytes
        Memory that the weights and the KV pages take; None unless ready.
    workspace_bytes
        Memory that steps work in, logits included, as measured now; None unless ready.
    memory_bytes
        Memory that all of it together holds, as measured now: on a CPU, KV pages that no request has touched take
        none. None unless ready.
    pages_used, pages_total
        KV pages that requests hold, and all of them; None unless ready.
    requests_running, requests_waiting
        Requests that hold KV pages, and requests in line.
    decode_tokens_per_s
        Measured over all steps so far that only decoded; None where there was none.
    idle_seconds
        Since when it has nothing to do; None unless ready.
    pinned
        Whether it stays when it is idle and its memory is wanted.
    """

    model: str
    device: str
    state: EngineState
    scheme: str | None = None
    weight_bytes: int | None = None
    kv_bytes: int | None = None
    workspace_bytes: int | None = None
    memory_bytes: int | None = None
    pages_used: int | None = None
    pages_total: int | None = None
    requests_running: int = 0
    requests_waiting: int = 0
    decode_tokens_per_s: float | None = None
    idle_seconds: float | None = None
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """Who holds which memory of a device.

    Attributes
    ----------
    device
        Which.
    rows
        What the engines of this process hold, each by purpose, and what the process takes besides; all measured.
    process_bytes
        What this process takes in all, measured by itself: the rows add up to it.
    free_bytes, total_bytes
        Of the device, as far as this process may have them.
    memory_limit
        Bytes that the engines of this process together may take; None for no limit.
    """

    device: str
    rows: tuple[MemoryRow, ...]
    process_bytes: int
    free_bytes: int
    total_bytes: int
    memory_limit: int | None


class Listed(Tenant, Protocol):
    """An engine that has a row."""

    @property
    def state(self) -> EngineState:
        """What it is doing."""


def row_of(entry: Listed) -> EngineRow:
    """Describe one engine as it is now."""
    row = EngineRow(entry.name, entry.device, entry.state)
    core = entry.core
    if core is None or row.state != "ready":
        return row
    try:
        metrics, memory, scheme = core.metrics(), core.memory(), core.model.scheme
    except EngineTerminatedError:  # between two lines of this function
        return EngineRow(entry.name, entry.device, entry.state)
    speed = metrics.decode_tokens / metrics.decode_time_s if metrics.decode_time_s else None
    return EngineRow(
        entry.name,
        entry.device,
        row.state,
        scheme=scheme,
        weight_bytes=metrics.weight_bytes,
        kv_bytes=metrics.kv_bytes,
        workspace_bytes=memory.workspace + memory.logits,
        memory_bytes=memory.total,
        pages_used=metrics.total_pages - metrics.free_pages,
        pages_total=metrics.total_pages,
        requests_running=metrics.running_requests,
        requests_waiting=metrics.waiting_requests,
        decode_tokens_per_s=speed,
        idle_seconds=core.idle_seconds,
        pinned=entry.pinned,
    )


def table_of(device: str, tenants: Iterable[Tenant]) -> MemoryTable:
    """Measure who holds which memory of a device."""
    rows: list[MemoryRow] = []
    for entry in tenants:
        if entry.device == device and entry.core is not None:
            with contextlib.suppress(EngineTerminatedError):  # a moment ago
                use = entry.core.memory()
                parts = {
                    "weights": use.weights,
                    "KV cache": use.kv_cache,
                    "workspace": use.workspace,
                    "logits": use.logits,
                }
                rows += [MemoryRow(f"{entry.name}: {purpose}", size) for purpose, size in parts.items()]
    memory = device_memory(device)
    rows += memory.process_rows(sum(row.size for row in rows))
    return MemoryTable(
        device,
        tuple(rows),
        memory.process_bytes(),
        memory.free_bytes(),
        memory.total_bytes(),
        memory_policy().memory_limits.get(device),
    )
