"""What tests of data sets that are written start from."""

import importlib.util

import pytest

from alfish.__main__ import main

HAS_MINARI = all(importlib.util.find_spec(name) for name in ("minari", "h5py"))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Where Minari keeps data sets."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


@pytest.fixture(
    params=[
        "set",
        pytest.param(
            "minari:test/recorded-v0",
            marks=pytest.mark.skipif(not HAS_MINARI, reason="needs the extra 'minari'"),
        ),
    ]
)
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
