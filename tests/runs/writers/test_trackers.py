"""Experiment trackers: with a fake one, and with the libraries where they are installed."""

import errno
import json
import os
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from alfish.errors import UsageError
from alfish.runs import files
from alfish.runs.writers import Counters, Histogram, Image, MlflowWriter, RunOrigin, TrackioWriter, WandbWriter, tracker
from alfish.runs.writers.tracker import Tracker

COUNTERS = (0, 0, 0, 0.5)
SETTINGS = {"PPO.gamma": "0.98"}
PROVENANCE = {"alfish": "0.2.0", "packages": {"torch": "2.13.0"}}


class Fake(Tracker):
    title, package, extra = "Fake tracker", "json", "fake"

    def __init__(self, server):
        self._server = server

    def connect(self, run, id, is_new, settings):
        if self._server.is_away:
            raise ConnectionError("no route to host\nand more")
        self._server.runs.setdefault(id, [])
        self._server.settings = settings
        self._run = self._server.runs[id]
        return id

    def send(self, values, steps, wall_seconds):
        if self._server.is_away:
            raise ConnectionError("no route to host")
        self._run.append((steps, values))

    def send_histogram(self, name, histogram, steps):
        self._run.append((steps, name))

    def finish(self):
        self._server.num_finished += 1


@pytest.fixture
def server():
    return SimpleNamespace(is_away=False, runs={}, settings=None, num_finished=0)


def began(writer, directory, log=print):
    """Starts a writer of a run in `directory`."""
    writer.start(RunOrigin(directory, "0123456789abcdef", log))
    writer.describe(SETTINGS, {"config.gin": "PPO.gamma = 0.98"}, PROVENANCE)
    return writer


def warned(caplog):
    """Returns alfish's own warnings; libraries log too."""
    return [record.getMessage() for record in caplog.records if record.name == "absl"]


def names(row):
    steps, values = row
    return steps, [name for name in values if not name.startswith("counters/")] if isinstance(values, dict) else values


def test_a_resumed_run_keeps_its_tracker_id_and_sends_nothing_twice(server, tmp_path):
    first = began(Fake(server), tmp_path)
    first.scalars({"train/loss": 1.0}, Counters(1000, *COUNTERS))
    first.scalars({"evaluation/mean_return": 2.0}, Counters(1000, *COUNTERS))
    first.scalars({"train/loss": 3.0, "time/train_ms": 1.0}, Counters(2000, *COUNTERS))
    first.histogram("histogram/action", Histogram.of([1.0]), 2000)
    del first  # killed: it is not closed
    second = began(Fake(server), tmp_path)  # from a checkpoint at 1000
    second.scalars({"train/loss": 3.0, "time/train_ms": 1.0}, Counters(2000, *COUNTERS))
    second.histogram("histogram/action", Histogram.of([1.0]), 2000)
    second.scalars({"evaluation/mean_return": 4.0}, Counters(2000, *COUNTERS))  # before the last clock of train
    second.scalars({"train/loss": 5.0}, Counters(3000, *COUNTERS))
    second.close()
    [(id, rows)] = server.runs.items()
    assert id == "0123456789abcdef"
    assert [names(row) for row in rows] == [
        (1000, ["train/loss"]),
        (1000, ["evaluation/mean_return"]),
        (2000, ["train/loss", "time/train_ms"]),
        (2000, "histogram/action"),
        (2000, ["evaluation/mean_return"]),
        (3000, ["train/loss"]),
    ]
    assert server.num_finished == 1


def test_several_values_of_one_clock_are_all_sent(server, tmp_path):
    writer = began(Fake(server), tmp_path)
    for name in ("histogram/action", "histogram/observation"):
        writer.histogram(name, Histogram.of([1.0]), 8)
    assert [name for _, name in server.runs["0123456789abcdef"]] == ["histogram/action", "histogram/observation"]


def test_a_tracker_receives_configuration_provenance_and_counters(server, tmp_path):
    writer = began(Fake(server), tmp_path)
    writer.scalars({"train/loss": 1.0}, Counters(8, 7, 6, 5, 0.5))
    assert server.settings == {
        "PPO.gamma": "0.98",
        "provenance.alfish": "0.2.0",
        "provenance.packages": {"torch": "2.13.0"},
    }
    [(_, values)] = server.runs["0123456789abcdef"]
    assert (
        values["counters/steps"] == 8 and values["counters/env_steps"] == 7 and values["counters/wall_seconds"] == 0.5
    )


@pytest.mark.parametrize("is_away_at_first", [True, False])
def test_an_unreachable_server_gives_one_warning(server, tmp_path, caplog, is_away_at_first):
    server.is_away = is_away_at_first
    writer = began(Fake(server), tmp_path)
    server.is_away = True
    for steps in (8, 16):
        writer.scalars({"train/loss": 1.0}, Counters(steps, *COUNTERS))
        writer.histogram("histogram/action", Histogram.of([1.0]), steps)
    writer.close()
    [message] = warned(caplog)
    assert "Fake tracker failed" in message and "ConnectionError: no route to host" in message and "\n" not in message


def test_a_resumed_run_sends_what_the_server_missed(server, tmp_path):
    server.is_away = True
    began(Fake(server), tmp_path).scalars({"train/loss": 1.0}, Counters(8, *COUNTERS))
    server.is_away = False
    began(Fake(server), tmp_path).scalars({"train/loss": 1.0}, Counters(8, *COUNTERS))
    assert [names(row) for row in server.runs["0123456789abcdef"]] == [(8, ["train/loss"])]


@pytest.mark.parametrize("writer", [WandbWriter, MlflowWriter, TrackioWriter])
def test_a_missing_library_is_reported_in_one_sentence_with_the_command(tmp_path, monkeypatch, writer):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=rf"{writer.__name__} needs {writer.package}.*pip install 'alfish\[{writer.extra}\]'"
    ):
        writer().start(RunOrigin(tmp_path, "0"))


@pytest.mark.parametrize("content", ["", "[]", '{"id": 3}', '{"id": "3", "sent": {"train": "x"}}'])
def test_a_broken_record_is_reported_in_one_sentence(server, tmp_path, content):
    path = tmp_path / "trackers" / "fake.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(UsageError, match="fake.json is not the record of a tracker"):
        Fake(server).start(RunOrigin(tmp_path, "0"))


# The libraries, without a server.


def show(writer, directory):
    """Sends everything a run can show in two processes, of which the second repeats the first's last row."""
    for clocks in ((1000, 2000), (2000, 3000)):
        run = began(writer(), directory)
        for steps in clocks:
            run.scalars(
                {"train/loss": steps / 1000, "evaluation/mean_return": float("nan")}, Counters(steps, *COUNTERS)
            )
            run.histogram("histogram/action", Histogram.of(np.arange(3)), steps)
            run.image("custom/frame", Image(np.zeros((4, 4, 3), np.uint8)), steps)
        run.film("films/film", directory / "film.mp4", steps)
        run.close()


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "film.mp4").write_bytes(b"\0" * 64)
    return directory


def records(path):
    """Yields the records of a file of Weights & Biases, whose format is that of LevelDB's logs."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_offline_has_every_value_once(directory, caplog):
    wandb = pytest.importorskip("wandb")
    show(lambda: WandbWriter(mode="offline", project="test"), directory)
    wandb.teardown()  # the process of its client has then written its files
    assert warned(caplog) == []
    paths = sorted(directory.glob("trackers/wandb/wandb/offline-run-*/*.wandb"))
    assert len(paths) == 2
    found = [record for path in paths for record in records(path)]
    assert {record.run.run_id for record in found if record.HasField("run")} == {"0123456789abcdef"}
    settings = {one.key: one.value_json for record in found for one in record.run.config.update}
    assert settings["PPO.gamma"] == '"0.98"' and settings["provenance.alfish"] == '"0.2.0"'
    rows = [
        {i.key or i.nested_key[0]: json.loads(i.value_json) for i in r.history.item}
        for r in found
        if r.HasField("history")
    ]
    assert [row["train/loss"] for row in rows if "train/loss" in row] == [1.0, 2.0, 3.0]
    assert [row["counters/steps"] for row in rows if "histogram/action" in row] == [1000, 2000, 3000]
    assert len(list(directory.glob("trackers/wandb/wandb/offline-run-*/files/media/videos/**/*.mp4"))) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_writes_files_while_its_server_is_away(directory, caplog, monkeypatch):
    pytest.importorskip("wandb").teardown()
    monkeypatch.setattr("alfish.runs.writers.wandb_writer.INIT_SECONDS", 2.0)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    writer = began(WandbWriter(), directory)
    writer.scalars({"train/loss": 1.0}, Counters(8, *COUNTERS))
    writer.close()
    [message] = warned(caplog)
    assert "cannot be reached" in message and "wandb sync" in message
    assert len(list(directory.glob("trackers/wandb/wandb/offline-run-*/*.wandb"))) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_without_a_key_is_reported_in_one_sentence(directory, monkeypatch):
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # which forgets the key of other tests
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(directory / "netrc"))
    with pytest.raises(UsageError, match="no API key"):
        WandbWriter().start(RunOrigin(directory, "0"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_every_value_once(directory, caplog):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    address = f"sqlite:///{directory}/mlflow.db"
    show(lambda: MlflowWriter(tracking_uri=address), directory)
    assert warned(caplog) == []
    from mlflow.tracking import MlflowClient

    client = MlflowClient(address)
    [run] = client.search_runs([client.get_experiment_by_name("alfish").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(1000, 1.0), (2000, 2.0), (3000, 3.0)]
    assert run.data.params["PPO.gamma"] == "0.98" and run.data.params["provenance.alfish"] == "0.2.0"
    assert run.info.status == "FINISHED"
    kept = {
        artifact.path
        for folder in ("films", "configuration")
        for artifact in client.list_artifacts(run.info.run_id, folder)
    }
    assert kept == {"films/film.mp4", "configuration/config.gin"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_missing_mlflow_server_gives_one_warning(directory, caplog):
    pytest.importorskip("mlflow")
    writer = began(MlflowWriter(tracking_uri="http://127.0.0.1:9"), directory)
    writer.scalars({"train/loss": 1.0}, Counters(8, *COUNTERS))
    writer.close()
    [message] = warned(caplog)
    assert message.startswith("MLflow failed")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trackio_has_every_value_once(directory, caplog, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(directory / "trackio"))
    if "trackio" in sys.modules:
        pytest.skip("trackio reads its directory when it is imported")
    pytest.importorskip("trackio")
    show(TrackioWriter, directory)
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_runs("alfish") == ["run-01234567"]
    rows = SQLiteStorage.get_logs("alfish", "run-01234567")
    assert [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row] == [
        (1000, 1.0),
        (2000, 2.0),
        (3000, 3.0),
    ]
    assert SQLiteStorage.get_run_config("alfish", "run-01234567")["PPO.gamma"] == "0.98"
    assert [row["step"] for row in rows if "films/film" in row] == [2000, 3000]


def test_a_full_disk_does_not_end_training_and_leaves_no_temporary_file(server, tmp_path, monkeypatch, caplog):
    writer = began(Fake(server), tmp_path)
    writer.scalars({"train/loss": 1.0}, Counters(1000, *COUNTERS))

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tracker.os, "replace", full)
    writer.scalars({"train/loss": 1.0}, Counters(2000, *COUNTERS))
    writer.scalars({"train/loss": 1.0}, Counters(3000, *COUNTERS))
    [warning] = warned(caplog)
    assert warning.startswith("Fake tracker failed and receives nothing more") and "No space left" in warning
    assert [path.name for path in (tmp_path / "trackers").iterdir() if path.name.endswith(".tmp")] == []


def test_partial_records_of_a_killed_process_are_removed(tmp_path):
    path = tmp_path / "fake.json"
    dead = str(files.temporary_of(path)).replace(f".{os.getpid()}-", ".4194305-")  # more than a process may have
    left = Path(f"{dead}.0a1b2c3d")
    left.write_text("{")
    tracker.Record(path).save()
    assert [one.name for one in tmp_path.iterdir()] == ["fake.json"]
