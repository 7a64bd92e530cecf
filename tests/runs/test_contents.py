"""Files of a run's directory are read without trust."""

import os

import pytest

from alfish.errors import UsageError
from alfish.parameters import differences
from alfish.parameters.differences import literal
from alfish.runs import contents


def test_complete_values_are_returned_and_missing_ones_are_none(tmp_path):
    (tmp_path / "a.json").write_text('{"steps": 7, "share": 1, "more": [{}]}')
    (tmp_path / "a.csv").write_text("x,y\n1,\n2,nan\n")
    assert contents.record(tmp_path, "a.json", {"steps": int, "share": float, "words": str}, ["words"])["steps"] == 7
    assert contents.table(tmp_path, "a.csv") == (["x", "y"], [["1", ""], ["2", "nan"]])
    assert contents.text(tmp_path, "a.csv").startswith("x,y\n")
    for read in (contents.text, contents.json_value, contents.table, contents.content):
        assert read(tmp_path, "b") is None and read(tmp_path / "a.csv", "below a file") is None
    (tmp_path / "null.json").write_text("null")
    with pytest.raises(UsageError, match="null.json is not what alfish writes there: it is not a JSON object"):
        contents.record(tmp_path, "null.json", {})


def test_only_links_that_lead_out_of_the_run_are_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "secret").write_text("key")
    (tmp_path / "run" / "own").write_text("mine")
    (tmp_path / "run" / "inside").symlink_to("own")
    (tmp_path / "run" / "up").symlink_to("..")
    (tmp_path / "run" / "circle").symlink_to("circle")
    (tmp_path / "best").symlink_to("run")
    assert contents.text(tmp_path / "best", "inside") == contents.text(tmp_path / "run", "inside") == "mine"
    for name in ("up/secret", str(tmp_path / "secret"), "../secret"):
        with pytest.raises(UsageError, match="secret is a link that leads out of the run, to .*put the file itself"):
            contents.text(tmp_path / "run", name)
    with pytest.raises(UsageError, match="circle"):
        contents.text(tmp_path / "run", "circle")


def test_the_largest_size_and_the_deepest_value_are_read(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(b"7" * 100)
    assert len(contents.content(tmp_path, "x", 100)) == 100
    with pytest.raises(UsageError, match="x is larger than .* MiB, the largest size that alfish writes there"):
        contents.content(tmp_path, "x", 99)
    for depth, is_right in ((contents.MAX_DEPTH - 1, True), (contents.MAX_DEPTH + 1, False), (100_000, False)):
        (tmp_path / "x").write_text("[" * depth + "]" * depth)
        if is_right:
            assert contents.json_value(tmp_path, "x")
        else:
            with pytest.raises(UsageError, match="x is not what alfish writes there: it has more than 32 levels"):
                contents.json_value(tmp_path, "x")
    assert contents.last_text(tmp_path, "x", 3) == "]]]" and contents.last_text(tmp_path, "y") == ""


@pytest.mark.parametrize(
    "kind, right, wrong",
    [
        (int, ["0", "-7"], ["true", "1.0", "1e3", '"1"', "null", "9" * 25]),
        (float, ["0", "1.5"], ["true", "NaN", "Infinity", "1e999", "9" * 400, '"1"']),
        (bool, ["true"], ["1", "0"]),
        (str, ['"x"'], ["1", "null", "[]"]),
        (list, ["[]"], ["{}", '"x"']),
        (dict, ["{}"], ["[]"]),
    ],
)
def test_entries_have_their_types(tmp_path, kind, right, wrong):
    for value in (*right, *wrong):
        (tmp_path / "x").write_text(f'{{"entry": {value}}}')
        if value in right:
            contents.record(tmp_path, "x", {"entry": kind})
        else:
            with pytest.raises(UsageError, match="x is not what alfish writes there: 'entry' is not"):
                contents.record(tmp_path, "x", {"entry": kind})


def test_refused_files_leave_no_open_descriptor(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for name in ("pipe", "directory", "/dev/zero"):
        with pytest.raises(UsageError):
            contents.content(tmp_path, name)
    assert not before or len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "text", ["-" * 50_000 + "1", "not " * 50_000 + "1", "[" * 50_000, "{[]: 1}", "1+" * 50_000 + "1"]
)
def test_invalid_literals_raise_one_kind_of_error(text):
    with pytest.raises(ValueError, match="is not a literal"):
        literal(text)
    assert list(differences.values(f"A.b = {text}\n")) == ["A.b"]


def test_macros_are_counted_before_they_are_expanded():
    double = "".join(f"m{k} = [%m{k + 1}, %m{k + 1}]\n" for k in range(40)) + "m40 = 1\n"
    with pytest.raises(
        UsageError, match="here/config.gin: macros have values of more than 4,194,304 characters, as %m"
    ):
        differences.values(f"{double}A.b = %m0\n", "here/config.gin")
    assert differences.values(double.replace("m0 = [%m1, %m1]\n", "") + "A.b = %m38\n")["A.b"] == "((1, 1), (1, 1))"
    chain = "".join(f"m{k} = %m{k + 1}\n" for k in range(5000)) + "m5000 = 1\n"
    with pytest.raises(UsageError, match="more than 100 macros refer to each other"):
        differences.values(f"{chain}A.b = %m0\n")
