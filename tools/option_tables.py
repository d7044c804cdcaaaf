"""Writes the tables of options in docs/notebook.md from the code.

``python -m tools.option_tables`` brings the page up to date; a test compares it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

__all__ = ["main", "with_tables"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "notebook.md"
_TABLE = re.compile(r"(<!-- options of (?P<name>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_MAGICS = re.compile(r"(<!-- magics -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """Return the page with the tables that its markers ask for."""
    from mlc_nb.notebook.extension import GROUPS, parsers

    found = parsers(GROUPS)
    page = _TABLE.sub(lambda place: f"{place[1]}{_options(found[place['name']])}{place[3]}", page)
    return _MAGICS.sub(lambda place: f"{place[1]}{_magics(found)}{place[2]}", page)


def _options(parser: argparse.ArgumentParser) -> str:
    lines = ["| option | meaning |", "| --- | --- |"]
    for action in parser._actions:
        names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.dest}`"
        value = action.metavar or ("" if action.choices is None else "\\|".join(map(str, action.choices)))
        takes = f" {value}" if value and action.nargs != 0 and action.option_strings else ""
        meaning = (action.help or "").replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {names}{takes} | {meaning} |")
    return "\n".join(lines) + "\n"


def _magics(found: dict[str, argparse.ArgumentParser]) -> str:
    lines = ["| magic | what it does |", "| --- | --- |"]
    for parser in found.values():
        sign = "%" if parser.prog.startswith("%") else ""
        lines.append(f"| `%{sign}{parser.prog.lstrip('%')}` | {(parser.description or '').strip().splitlines()[0]} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page."""
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
