"""The table of engines, as text and as HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlc_nb.table import table_bundle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlc_nb.registry import EngineRow

__all__ = ["status_bundle"]

_HEADINGS = (
    "model",
    "device",
    "state",
    "weights",
    "KV cache",
    "KV pages used / total",
    "requests running / waiting",
    "decode tokens/s",
)
_NOTHING = "No engine is loaded in this kernel. %mlc_load loads one; so does the first %%mlc_chat."


def status_bundle(rows: Sequence[EngineRow]) -> dict[str, str]:
    """Return the representations of the table of engines by MIME type."""
    if not rows:
        return {"text/plain": _NOTHING}
    return table_bundle(_HEADINGS, [_cells(row) for row in rows])


def _cells(row: EngineRow) -> tuple[str, ...]:
    return (
        row.model,
        row.device,
        row.state,
        _mebibytes(row.weight_bytes),
        _mebibytes(row.kv_bytes),
        f"{row.pages_used} / {row.pages_total}" if row.pages_total is not None else "-",
        f"{row.requests_running} / {row.requests_waiting}",
        f"{row.decode_tokens_per_s:.1f}" if row.decode_tokens_per_s is not None else "-",
    )


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.1f} MiB"
