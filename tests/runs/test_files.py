"""Files are written whole, never through a link, and what killed processes left is removed."""

import os
import subprocess
import sys

import pytest

from alfish.__main__ import main
from alfish.errors import UsageError
from alfish.runs import files
from alfish.runs.packed import archive
from alfish.runs.run_log import RunLog
from alfish.sweeps.jobs import OUTPUT, LocalJobs
from alfish.training.run_directory import RunDirectory


def of_a_dead_process(path):
    """A place to write first, of a process that has ended."""
    pid = subprocess.Popen([sys.executable, "-c", ""])
    pid.wait()
    own = files.temporary_of(path)
    return own.with_name(own.name.replace(f".{os.getpid()}-", f".{pid.pid}-"))


def test_files_of_a_dead_process_are_removed_by_the_next_write(tmp_path):
    path = tmp_path / "x.csv"
    left = of_a_dead_process(path)
    kept = [tmp_path / ".y.csv.1-000000.tmp", files.temporary_of(tmp_path / "y.csv"), tmp_path / ".x.csv.tmp"]
    elsewhere = left.with_name(left.name.replace(files._machine(), "abcdef"))  # of another machine
    for one in (left, elsewhere, *kept):
        one.write_text("half")
    files.write_atomically(path, "whole")
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, elsewhere.name, *(one.name for one in kept)])


def test_only_directories_of_dead_processes_are_removed(tmp_path):
    archive.pack(tmp_path / "run.zip", {"config.gin": b"A.b = 1\n"}, {})
    left = of_a_dead_process(tmp_path / "new")
    (left / "checkpoints").mkdir(parents=True)
    living = left.with_name(left.name.replace(left.name.split(".")[2].split("-")[0], str(os.getppid())))
    living.mkdir()
    archive.unpack(tmp_path / "run.zip", tmp_path / "new")
    assert not left.exists() and living.exists() and (tmp_path / "new" / "config.gin").is_file()


def test_the_longest_name_is_written(tmp_path):
    files.write_atomically(tmp_path / ("x" * 255), "whole")
    assert os.listdir(tmp_path) == ["x" * 255]


def test_nothing_is_written_through_a_link(tmp_path):
    own = tmp_path / "own"
    own.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / "log.txt").symlink_to(own)
    with pytest.raises(UsageError, match="log.txt is a link, but alfish does not write through links"):
        RunDirectory(run, {}).open()
    log = RunLog(run / "log.txt")
    log.write("line")
    with pytest.raises(UsageError, match="log.txt is a link, but alfish does not write through links; remove the link"):
        log.open()
    (run / OUTPUT).symlink_to(own)
    jobs = LocalJobs(1)
    try:
        with pytest.raises(UsageError, match="output.txt is a link"):
            jobs.start(run, [])
    finally:
        jobs.close()
    assert own.read_text() == "mine"


@pytest.mark.parametrize("name", ["eval", "checkpoints"])
def test_a_run_directory_may_not_link_to_another(tmp_path, name):
    (tmp_path / "other").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "other")
    with pytest.raises(UsageError, match=f"{name} is a link.*put the directory itself there"):
        RunDirectory(tmp_path / "run", {}).open()


@pytest.mark.parametrize(
    "arguments",
    [
        ["plot", "LONG", "--output=x.png"],
        ["compare", "LONG"],
        ["report", "--root_dir=LONG", "--output=x.html"],
        ["pack", "--root_dir=LONG", "--output=x.zip"],
        ["pack", "--root_dir=.", "--output=LONG.zip"],
        ["unpack", "--input=LONG.zip", "--root_dir=x"],
        ["unpack", "--input=x.zip", "--root_dir=LONG"],
        ["evaluate", "--root_dir=LONG"],
        ["evaluate", "--root_dir=..zip"],
        ["watch", "--root_dir=LONG"],
        ["export-policy", "--root_dir=LONG", "--output=x.onnx"],
        ["record", "--root_dir=LONG", "--output=x"],
        ["record", "--root_dir=x", "--output=LONG"],
        ["sweep", "--root_dir=LONG", "--show"],
        ["population", "--root_dir=LONG"],
        ["train", "--gin_file=LONG.gin", "--root_dir=x"],
        ["train", "--gin_file=ppo.gin", "--root_dir=LONG"],
    ],
)
def test_a_name_that_no_file_can_have_is_named(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "..zip").write_bytes(b"")
    assert main([one.replace("LONG", "n" * 300) for one in arguments]) == 2
    words = capsys.readouterr().err
    assert words.count("\n") == 1 and words.startswith(f"alfish {arguments[0]}: ")
    assert ("n" * 100 if "LONG" in str(arguments) else "..zip") in words
