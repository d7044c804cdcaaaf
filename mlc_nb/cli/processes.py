"""``mlc-nb ps``: the engines of every kernel and program of this user on this machine."""

from __future__ import annotations

from mlc_nb.presence import engines_of_all_processes

__all__ = ["list_processes"]

_HEADINGS = ("PID", "MODEL", "SCHEME", "DEVICE", "STATE", "ENGINE MiB", "PROCESS MiB", "NOTEBOOK")


def list_processes() -> int:
    """Print a line for each engine, or that there is none; 0."""
    rows = [
        (
            str(row.pid),
            row.model,
            row.scheme or "-",
            row.device,
            row.state,
            _mebibytes(row.memory_bytes),
            _mebibytes(row.process_bytes),
            row.notebook or "-",
        )
        for row in engines_of_all_processes()
    ]
    if not rows:
        print("No engine is loaded in any kernel or program of yours on this machine.")
        return 0
    table = [_HEADINGS, *rows]
    widths = [max(len(line[column]) for line in table) for column in range(len(_HEADINGS))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.1f}"
