"""The quickstart notebook in a real kernel, and what is saved of it."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
QUICKSTART = Path(__file__).resolve().parents[2] / "notebooks" / "quickstart.ipynb"


def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
    nbformat.validate(notebook)
    return notebook


def with_tag(notebook: nbformat.NotebookNode, text: str) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code" and text in cell.source]


def test_the_quickstart_runs_and_reads_well_without_a_kernel(warm_model: Path, tmp_path: Path) -> None:
    del warm_model
    notebook = execute(nbformat.read(QUICKSTART, as_version=4))
    for cell in with_tag(notebook, "%%mlc_chat"):
        # A busy machine shows progress bars.
        outputs = [output for output in cell.outputs if WIDGET_VIEW not in output.get("data", {})]
        answers = [output for output in outputs if "text/markdown" in output.get("data", {})]
        notes = [output for output in outputs if "tokens/s" in output.get("data", {}).get("text/plain", "")]
        assert (len(answers), len(notes), len(outputs)) == (1, 1, 2)
        assert answers[0].output_type == "display_data"
        assert answers[0].data["text/plain"] == answers[0].data["text/markdown"] or "json" in cell.source
    first, _, city, _ = with_tag(notebook, "%%mlc_chat")
    assert "Paris" in first.outputs[0].data["text/markdown"]
    assert "Lisbon" in city.outputs[0].data["text/plain"]
    (validated,) = with_tag(notebook, "model_validate_json")
    assert validated.outputs[0].data["text/plain"] == "City(name='Lisbon', country='Portugal')"
    (batch,) = with_tag(notebook, "%%mlc_batch")
    assert "3 requests" in batch.outputs[-1].data["text/plain"]
    (compared,) = with_tag(notebook, "%%mlc_compare")
    assert compared.outputs[-1].data["text/html"].count("<td") == 4
    (coloured,) = with_tag(notebook, "show_logprobs")
    assert "hover" in coloured.outputs[0].data["text/html"]
    (python,) = with_tag(notebook, "stream=True")
    assert len("".join(output.text for output in python.outputs).split()) > 5
    (status,) = with_tag(notebook, "%mlc_status")
    assert "ready" in status.outputs[0].data["text/plain"]
    saved = tmp_path / "saved.ipynb"
    nbformat.write(notebook, saved)
    text = saved.read_text(encoding="utf-8")
    assert "\ufffd" not in text
    assert "loading smollm2" not in text
    assert '"stderr"' not in text


def test_the_quickstart_is_committed_clean() -> None:
    notebook = nbformat.read(QUICKSTART, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


def test_a_failed_chat_cell_fails_the_run(warm_model: Path) -> None:
    del warm_model
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("%load_ext mlc_nb"), nbformat.v4.new_code_cell("%%mlc_chat -m nowhere\nHi")]
    )
    with pytest.raises(CellExecutionError, match="ModelNotFoundError: There is no model 'nowhere'") as caught:
        execute(notebook)
    assert "Traceback" not in str(caught.value)
