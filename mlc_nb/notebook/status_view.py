"""The table of engines, as text and as HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlc_nb.table import table_bundle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlc_nb.registry import EngineRow, MemoryTable

__all__ = ["status_bundle"]

_HEADINGS = (
    "model",
    "scheme",
    "device",
    "state",
    "weights",
    "KV cache",
    "KV pages used / total",
    "workspace",
    "requests running / waiting",
    "decode tokens/s",
)
_NOTHING = "No engine is loaded in this kernel. %mlc_load loads one; so does the first %%mlc_chat."


def status_bundle(rows: Sequence[EngineRow], devices: Sequence[MemoryTable] = ()) -> dict[str, str]:
    """Return the representations of the table of engines by MIME type.

    Parameters
    ----------
    devices
        Memory of the devices that the engines run on, told below the table.
    """
    if not rows:
        return {"text/plain": _NOTHING}
    return table_bundle(_HEADINGS, [_cells(row) for row in rows], below=" · ".join(map(_memory, devices)))


def _memory(table: MemoryTable) -> str:
    limit = "" if table.memory_limit is None else f", at most {_mebibytes(table.memory_limit)} for engines"
    return (
        f"{table.device}: {_mebibytes(table.free_bytes)} free of {_mebibytes(table.total_bytes)}, "
        f"{_mebibytes(table.process_bytes)} in this process{limit}"
    )


def _cells(row: EngineRow) -> tuple[str, ...]:
    return (
        row.model,
        row.scheme or "-",
        row.device,
        row.state + (", pinned" if row.pinned else ""),
        _mebibytes(row.weight_bytes),
        _mebibytes(row.kv_bytes),
        f"{row.pages_used} / {row.pages_total}" if row.pages_total is not None else "-",
        _mebibytes(row.workspace_bytes),
        f"{row.requests_running} / {row.requests_waiting}",
        f"{row.decode_tokens_per_s:.1f}" if row.decode_tokens_per_s is not None else "-",
    )


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.1f} MiB"
