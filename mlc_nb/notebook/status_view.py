"""The table of engines, as text and as HTML."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

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
    cells = [_cells(row) for row in rows]
    return {"text/plain": _text(cells), "text/html": _html(cells)}


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


def _text(rows: Sequence[tuple[str, ...]]) -> str:
    table = [_HEADINGS, *rows]
    widths = [max(len(line[column]) for line in table) for column in range(len(_HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _html(rows: Sequence[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in _HEADINGS)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
