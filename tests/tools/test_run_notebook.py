"""The runner behind ``make demo``, with real kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tools.run_notebook import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

STREAM = """
from IPython.display import Markdown, display
handle = display(Markdown(""), display_id=True)
for text in ["Paris", "Paris is", "Paris is the capital."]:
    handle.update(Markdown(text))
handle.update(Markdown("Paris is the **capital**."))
print("12 token/s")
"""


def write(path: Path, *cells: nbformat.NotebookNode) -> str:
    nbformat.write(new_notebook(cells=list(cells)), path)
    return str(path)


def test_prints_sources_streams_and_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.ipynb", new_markdown_cell("# Title"), new_code_cell(STREAM), new_code_cell("6 * 7"))
    assert main([path]) == 0
    out = capsys.readouterr().out
    assert "# Title" in out
    assert '>>> print("12 token/s")' in out
    # A growing text is printed once; a rewritten one again from the line that changed.
    assert "\nParis is the capital.\nParis is the **capital**.\n12 token/s\n" in out
    assert "\n42\n" in out


def test_a_failing_cell_is_told_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "b.ipynb", new_code_cell("raise ValueError('no such thing')"), new_code_cell("print(1)"))
    assert main([path]) == 1
    captured = capsys.readouterr()
    assert "ValueError" in captured.err
    assert "no such thing" in captured.err
    assert ">>> print(1)" not in captured.out
