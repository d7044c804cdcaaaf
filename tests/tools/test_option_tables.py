"""docs/notebook.md says what the code does."""

from __future__ import annotations

from tools.option_tables import PAGE, with_tables


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, "run `python -m tools.option_tables`"
    assert "| `--json-schema` NAME_OR_FILE |" in page
    assert "| `%%mlc_compare` |" in page
