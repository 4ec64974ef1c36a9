"""The notebook runs from top to bottom, and is committed without what it printed."""

import nbformat
import pytest
from doc_blocks import ROOT
from nbclient import NotebookClient

NOTEBOOK = ROOT / "examples" / "calibration.ipynb"


@pytest.fixture(scope="module")
def executed(smollm2_directory, tmp_path_factory):
    """The notebook after a run in another directory."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": tmp_path_factory.mktemp("notebook")}}
    return NotebookClient(notebook, timeout=None, resources=place).execute()


def test_it_is_committed_without_outputs():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    printed = [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    assert printed == []


def kinds_of_output(notebook):
    return {
        cell.id: {kind for each in cell.outputs for kind in each.get("data", {"text": ""})}
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


def test_tables_and_pictures_are_shown(executed):
    shown = kinds_of_output(executed)
    for cell in ("run", "stats", "scales"):
        assert "text/html" in shown[cell]
    for cell in ("plot-heads", "plot-scales", "plot-both"):
        assert "image/png" in shown[cell]
    assert not any(
        each.get("name") == "stderr" for cell in executed.cells for each in cell.get("outputs", ())
    )
