"""Archives of source code: what they contain, and what is refused."""

import io
import sys
import zipfile

import pytest

from alfish.errors import UsageError
from alfish.runs import code


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A package of the user with a module that is not imported, and files that are not source code."""
    package = tmp_path / "lab" / "own_lab"
    (package / "tasks").mkdir(parents=True)
    (package / "data-1").mkdir()
    for name in ("__init__.py", "tasks/__init__.py", "tasks/later.py", "base.gin", "weights.pt", "data-1/x.py"):
        (package / name).write_text(f"# {name}\n")
    (tmp_path / "lab" / "own_script.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path / "lab")
    __import__("own_lab"), __import__("own_script")
    yield tmp_path / "lab"
    for name in ("own_lab", "own_script"):
        sys.modules.pop(name)


def names_of(archive):
    return zipfile.ZipFile(io.BytesIO(archive)).namelist()


def test_an_archive_has_alfish_and_the_users_imported_modules_only(lab):
    names = names_of(code.snapshot())
    assert {"alfish/__init__.py", "alfish/runs/code.py", "alfish/compiler/matmul.cpp"} <= set(names)
    own = [name for name in names if name.startswith("own_")]
    assert own == sorted(["own_lab/__init__.py", "own_lab/base.gin", "own_lab/tasks/__init__.py"]) + [
        "own_lab/tasks/later.py",
        "own_script.py",
    ]
    assert not any(name.startswith(("torch/", "numpy/", "json/", "pytest/")) for name in names)


def test_equal_code_makes_equal_archives(lab):
    first = code.snapshot()
    assert code.snapshot() == first
    (lab / "own_script.py").write_text("VALUE = 2\n")
    assert code.snapshot() != first


def test_an_extracted_archive_can_be_imported(lab, tmp_path):
    (tmp_path / "code.zip").write_bytes(code.snapshot())
    names = code.extract(tmp_path / "code.zip", tmp_path / "again")
    assert {"alfish", "own_lab", "own_script"} <= set(names)
    assert (tmp_path / "again" / "own_script.py").read_text() == "VALUE = 1\n"


@pytest.mark.parametrize("name", ["../out.py", "/tmp/out.py", "a/../../out.py", "a\\..\\out.py"])
def test_names_that_lead_out_are_refused(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
        archive.writestr(name, "")
    with pytest.raises(UsageError, match="outside of the directory"):
        code.extract(tmp_path / "code.zip", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_too_much_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(code, "_LARGEST", 1 << 20)
    with zipfile.ZipFile(tmp_path / "code.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.py", b" " * (1 << 21))
    with pytest.raises(UsageError, match="more than 1 MiB"):
        code.extract(tmp_path / "code.zip", tmp_path / "again")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 damaged"])
def test_damaged_and_missing_archives_are_named(tmp_path, content):
    with pytest.raises(UsageError, match="has no code.zip; a run writes it with .*CodeSnapshot"):
        code.extract(tmp_path / "code.zip", tmp_path / "again")
    (tmp_path / "code.zip").write_bytes(content)
    with pytest.raises(UsageError, match="code.zip cannot be read"):
        code.extract(tmp_path / "code.zip", tmp_path / "again")
