"""A table as text and as HTML."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["one_line", "table_bundle"]


def table_bundle(headings: Sequence[str], rows: Sequence[Sequence[str]], *, below: str = "") -> dict[str, str]:
    """Return the representations of a table by MIME type.

    Parameters
    ----------
    rows
        Each as long as ``headings``.
    below
        A line of text under the table.
    """
    return {"text/plain": _text(headings, rows, below), "text/html": _html(headings, rows, below)}


def one_line(text: str, most: int = 60) -> str:
    """Return the beginning of ``text`` without line breaks, at most ``most`` characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= most else flat[: most - 1].rstrip() + "…"


def _text(headings: Sequence[str], rows: Sequence[Sequence[str]], below: str) -> str:
    table = [headings, *rows]
    widths = [max(len(line[column]) for line in table) for column in range(len(headings))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    lines.insert(1, "-" * max(len(line) for line in lines))
    return "\n".join([*lines, *([below] if below else [])])


def _html(headings: Sequence[str], rows: Sequence[Sequence[str]], below: str) -> str:
    head = "".join(f"<th style='text-align: left'>{html.escape(heading)}</th>" for heading in headings)
    body = "".join(
        "<tr>"
        + "".join(f"<td style='text-align: left; white-space: pre-wrap'>{html.escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    note = f"<small>{html.escape(below)}</small>" if below else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"
