"""The notebook of examples/ runs from its first cell to its last."""

import contextlib
import io
import json

import pytest
from test_examples import PROJECT

NOTEBOOK = PROJECT / "examples" / "tour.ipynb"


def cells(kind):
    return ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    pytest.importorskip("imageio")
    monkeypatch.chdir(tmp_path)
    printed, names = io.StringIO(), {}
    with contextlib.redirect_stdout(printed):
        for text in cells("code"):
            exec(compile(text, "tour.ipynb", "exec"), names)
    assert len(names["figure"].axes) == 1 and ", the worst episode" in printed.getvalue()
    assert (tmp_path / "runs" / "tour" / "film.mp4").stat().st_size > 1000
    assert "angle -0.15 rad: push left" in printed.getvalue() and "angle +0.15 rad: push right" in printed.getvalue()


def test_the_notebook_has_no_outputs():
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None
