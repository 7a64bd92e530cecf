"""Fixtures of the tests of data sets."""

import pytest
from data_sets import NEEDS_MINARI

from alfish.__main__ import main
from alfish.offline.sources import flat, source_files


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Directory of Minari's data sets."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


@pytest.fixture(params=["set", pytest.param("minari:test/recorded-v0", marks=NEEDS_MINARI)])
def output(request, tmp_path, home):
    """A place of each kind for a data set."""
    return request.param if request.param.startswith("minari:") else str(tmp_path / request.param)


@pytest.fixture
def refused(capsys):
    """Asserts that a command fails with one sentence; returns it."""

    def refused(*arguments, status=2):
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == status
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith("alfish ")
        return captured.err

    return refused


@pytest.fixture(params=[65536, 7], ids=["one block", "small blocks"])
def block_rows(request, monkeypatch):
    """Tables are read whole, or a few rows at a time."""
    monkeypatch.setattr(flat, "BLOCK_ROWS", request.param)
    monkeypatch.setattr(source_files.blocks, "__defaults__", (0, request.param))
