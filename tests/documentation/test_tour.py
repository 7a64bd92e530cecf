"""The notebook of examples/ runs from its first cell to its last."""

import contextlib
import io
import json

import gymnasium
import pytest
from test_examples import PROJECT

NOTEBOOK = PROJECT / "examples" / "tour.ipynb"


def cells(kind):
    return ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]


@pytest.mark.long
def test_the_notebook_runs(tmp_path, monkeypatch):
    pytest.importorskip("imageio")
    monkeypatch.chdir(tmp_path)
    printed, names, opened = io.StringIO(), {}, []
    make = gymnasium.make

    def recorded(*arguments, **keywords):
        opened.append(make(*arguments, **keywords))
        opened[-1].is_open = True
        close = opened[-1].close
        opened[-1].close = lambda env=opened[-1]: (close(), setattr(env, "is_open", False))
        return opened[-1]

    monkeypatch.setattr(gymnasium, "make", recorded)
    with contextlib.redirect_stdout(printed):
        for text in cells("code"):
            without_magics = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
            exec(compile(without_magics, "tour.ipynb", "exec"), names)
    assert len(opened) >= 2 and not any(env.is_open for env in opened)
    assert len(names["figure"].axes) == 1 and ", the worst episode" in printed.getvalue()
    assert (tmp_path / "runs" / "tour" / "film.mp4").stat().st_size > 1000
    assert "angle -0.15 rad: push left" in printed.getvalue() and "angle +0.15 rad: push right" in printed.getvalue()


def test_the_notebook_has_no_outputs():
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None
