import io

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from alfish.errors import UsageError
from alfish.runs.files import DiskError
from alfish.runs.writers import Counters, CSVWriter, Histogram, Image, MultiWriter, TensorBoardWriter, Writer
from alfish.runs.writers.console import ConsoleProgress
from alfish.runs.writers.writer import shown_value

HEADER = "steps,env_steps,iterations,updates,wall_seconds"


class _Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def _lines(path):
    return path.read_text().splitlines()


def test_csv_columns_are_counters_then_values(tmp_path):
    path = tmp_path / "run" / "metrics.csv"
    writer = CSVWriter(path)
    writer.scalars({"return": 1.5, "loss": 0.1}, Counters(9, 8, iterations=1, updates=4, wall_seconds=0.5))
    assert _lines(path) == [HEADER + ",return,loss", "9,8,1,4,0.5,1.5,0.1"]  # before any flush or close
    writer.scalars({"loss": 0.3, "return": float("nan")}, Counters(16, 16, 2, 8, 1.0))
    writer.close()
    assert _lines(path)[2] == "16,16,2,8,1.0,nan,0.3"


def test_csv_gains_a_column_when_a_name_appears(tmp_path):
    path = tmp_path / "metrics.csv"
    writer = CSVWriter(path)
    writer.scalars({"loss": 0.1}, Counters(8, 8, 1, 4, 0.5))
    writer.scalars({"a,b": 2.0}, Counters(16, 16, 2, 8, 1.0))
    writer.scalars({"loss": 0.2}, Counters(24, 24, 3, 12, 1.5))
    writer.close()
    assert _lines(path) == [HEADER + ',loss,"a,b"', "8,8,1,4,0.5,0.1,", "16,16,2,8,1.0,,2.0", "24,24,3,12,1.5,0.2,"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.csv"]


def test_csv_cuts_what_a_resumed_run_writes_again(tmp_path):
    path = tmp_path / "metrics.csv"
    writer = CSVWriter(path)
    for steps in (8, 16, 24):
        writer.scalars({"loss": steps / 10}, Counters(steps, 7, 0, 0, 0.0))
    writer.close()
    resumed = CSVWriter(path, resume_steps=16)
    resumed.scalars({"loss": 9.0}, Counters(24, 7, 0, 0, 0.0))
    resumed.close()
    assert _lines(path) == [HEADER + ",loss", "8,7,0,0,0.0,0.8", "16,7,0,0,0.0,1.6", "24,7,0,0,0.0,9.0"]


@pytest.mark.parametrize("half", ["", "1", "16,7,0,0,0.0,1", '16,7,0,0,0.0,"'])
def test_csv_drops_the_half_line_of_a_killed_writer(tmp_path, half):
    path = tmp_path / "metrics.csv"
    path.write_text(f"{HEADER},loss\n8,7,0,0,0.0,0.8\n{half}")
    resumed = CSVWriter(path, resume_steps=16)
    resumed.scalars({"loss": 9.0}, Counters(16, 7, 0, 0, 0.0))
    resumed.close()
    assert _lines(path) == [HEADER + ",loss", "8,7,0,0,0.0,0.8", "16,7,0,0,0.0,9.0"]


def test_csv_starts_again_when_its_header_is_incomplete(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("ste")
    CSVWriter(path).close()
    assert _lines(path) == [HEADER]


def test_csv_does_not_change_files_of_others(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="not a table of metrics: its first columns are not steps, env_steps"):
        CSVWriter(path)
    assert path.read_text() == "a,b\n1,2\n"
    path.write_text(f"{HEADER}\nnonsense\n")
    with pytest.raises(UsageError, match="row 1"):
        CSVWriter(path)


def test_csv_refuses_a_value_named_as_a_counter(tmp_path):
    writer = CSVWriter(tmp_path / "metrics.csv")
    with pytest.raises(UsageError, match="^a scalar is called 'updates', which is the name of a counter of the run"):
        writer.scalars({"updates": 1.0}, Counters(8, 8, 1, 4, 0.5))
    writer.close()


def _events(directory):
    accumulator = EventAccumulator(str(directory), purge_orphaned_data=True)
    accumulator.Reload()
    return accumulator


def test_tensorboard_shows_values_and_counters_against_steps(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.scalars({"loss": 0.5}, Counters(steps=9, env_steps=8, iterations=1, updates=4, wall_seconds=0.25))
    writer.text("config", "Trainer.seed = 0", 0)
    writer.close()
    events = _events(tmp_path)
    tags = ["loss", "counters/env_steps", "counters/iterations", "counters/updates", "counters/wall_seconds"]
    assert {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags} == {
        "loss": [(9, 0.5)],
        "counters/env_steps": [(9, 8)],
        "counters/iterations": [(9, 1)],
        "counters/updates": [(9, 4)],
        "counters/wall_seconds": [(9, 0.25)],
    }
    assert b"Trainer.seed" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def test_tensorboard_drops_events_that_a_resumed_run_writes_again(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    for steps in (8, 16, 24):
        writer.scalars({"loss": 1.0}, Counters(steps, 7, 0, 0, 0.0))
    writer.close()
    [events] = tmp_path.iterdir()  # TensorBoard reads the files in the order of their names, which start with the time
    events.rename(tmp_path / "events.out.tfevents.0000000001.earlier")
    resumed = TensorBoardWriter(tmp_path, purge_step=16 + 1)
    resumed.scalars({"loss": 2.0}, Counters(20, 7, 0, 0, 0.0))
    resumed.close()
    assert [(e.step, e.value) for e in _events(tmp_path).Scalars("loss")] == [(8, 1.0), (16, 1.0), (20, 2.0)]


class _Recorder(Writer):
    def __init__(self, calls, broken=False):
        self._calls = calls
        self._broken = broken

    def scalars(self, values, counters):
        self._calls.append((values, *counters))

    def text(self, tag, text, steps):
        self._calls.append((tag, text, steps))

    def close(self):
        self._calls.append("close")
        if self._broken:
            raise OSError("disk")


def test_many_writers_are_written_as_one():
    calls = []
    writer = MultiWriter([_Recorder(calls), Writer(), _Recorder(calls)])
    writer.scalars({"loss": 1.0}, Counters(8, 8, 1, 4, 0.5))
    writer.text("tag", "text", 8)
    writer.close()
    row, text = ({"loss": 1.0}, 8, 8, 1, 4, 0.5), ("tag", "text", 8)
    assert calls == [row, row, text, text, "close", "close"]


def test_a_failing_writer_does_not_keep_others_open():
    calls = []
    with pytest.raises(OSError, match="disk"):
        MultiWriter([_Recorder(calls, broken=True), _Recorder(calls)]).close()
    assert calls == ["close", "close"]


def test_a_pipe_gets_a_plain_line_every_period():
    clock, stream = _Clock(), io.StringIO()
    progress = ConsoleProgress(50_000, stream=stream, clock=clock)
    for env_steps in range(0, 12_289, 1024):  # a second each
        progress.update(env_steps, env_steps, clock.now, {"return": 213.4, "loss": 0.031})
        clock.now += 1
    assert stream.getvalue().splitlines() == [
        "   5 120 / 50 000 env steps  10%  1 024 steps/s  return 213.4  loss 0.031  left 0:44",
        "  10 240 / 50 000 env steps  20%  1 024 steps/s  return 213.4  loss 0.031  left 0:39",
    ]
    progress.close()
    progress.close()
    assert len(stream.getvalue().splitlines()) == 3
    assert stream.getvalue().splitlines()[2].startswith("  12 288 / 50 000 env steps  25%")


def test_a_last_line_that_was_shown_is_not_shown_again():
    clock, stream = _Clock(), io.StringIO()
    progress = ConsoleProgress(10, unit="iterations", stream=stream, clock=clock)
    progress.close()
    assert stream.getvalue() == ""
    clock.now += 5
    progress.update(10, 80, clock.now, {})
    progress.close()
    assert stream.getvalue() == "  10 / 10 iterations  100%\n"


@pytest.mark.parametrize("steps_per_update, words", [(1, "10 updates/s"), (4, "40 steps/s")])
def test_the_speed_of_a_run_that_does_not_act_is_in_updates(steps_per_update, words):
    clock, stream = _Clock(), io.StringIO()
    progress = ConsoleProgress(1000, unit="updates", stream=stream, clock=clock)
    for second in range(11):
        progress.update(10 * second, steps_per_update * 10 * second, clock.now, {})
        clock.now += 1
    assert words in stream.getvalue()


def test_speed_is_measured_in_the_recent_window_after_a_resume():
    clock, stream = _Clock(), io.StringIO()
    progress = ConsoleProgress(1000, unit="iterations", stream=stream, window_seconds=10, clock=clock)
    progress.update(500, 1_000_000, clock.now, {})  # resumed here
    for second in range(1, 101):  # 100 steps/s for a minute, then 300
        clock.now += 1
        env_steps = 1_000_000 + (100 * second if second <= 60 else 6000 + 300 * (second - 60))
        progress.update(500 + second, env_steps, clock.now, {})
    lines = stream.getvalue().splitlines()
    assert "100 steps/s" in lines[0]
    assert "200 steps/s" in lines[12]  # 65 s: half of the window fast
    assert "300 steps/s" in lines[13]
    assert "300 steps/s  left 6:40" in lines[-1]  # 400 iterations left at one a second


def test_work_between_iterations_counts_only_in_the_time_left():
    clock, stream = _Clock(), io.StringIO()
    progress = ConsoleProgress(400, unit="iterations", stream=stream, clock=clock)
    progress.update(0, 0, 0.0, {})
    for iteration in range(1, 101):
        clock.now += 1
        progress.update(iteration, 100 * iteration, float(iteration), {})
    clock.now += 300  # an evaluation
    progress.update(101, 10_100, 101.0, {})
    lines = stream.getvalue().splitlines()
    assert lines[-2].endswith("100 steps/s  left 5:00")
    assert lines[-1].endswith("100 steps/s  left 19:44")  # 299 s times 400 / 101


def test_samples_of_speed_stay_few_however_fast_updates_come():
    clock = _Clock()
    progress = ConsoleProgress(1e9, stream=io.StringIO(), clock=clock)
    for update in range(50_000):
        clock.now += 0.001
        progress.update(update, update, clock.now, {})
    assert len(progress._moments) <= 102


def test_a_budget_overshot_or_in_seconds_reads_well():
    clock, stream = _Clock(), io.StringIO()
    progress = ConsoleProgress(7200.0, unit="seconds", stream=stream, period_seconds=0, clock=clock)
    progress.update(0.0, 0, clock.now, {})
    clock.now += 10
    progress.update(10.4, 12_000, clock.now, {"return": -12345.6, "loss": float("nan")})
    progress.update(7201.0, 12_000, clock.now, {})
    lines = stream.getvalue().splitlines()
    assert lines[1] == "     10 / 7 200 seconds  0%  1 200 steps/s  return -12 346  loss nan  left 1:55:13"
    assert lines[2] == "  7 201 / 7 200 seconds  100%  1 200 steps/s  left 0:00"


def test_a_message_in_a_pipe_is_a_line():
    stream = io.StringIO()
    ConsoleProgress(10, stream=stream).line("Resuming from checkpoint-000000000010.pt")
    assert stream.getvalue() == "Resuming from checkpoint-000000000010.pt\n"


def test_a_terminal_gets_one_bar_that_messages_do_not_break():
    clock, stream = _Clock(), _Terminal()
    progress = ConsoleProgress(50_000, stream=stream, clock=clock)
    progress.update(0, 0, clock.now, {})
    clock.now += 2
    progress.update(12_500, 12_500, clock.now, {"return": 213.4})
    progress.line("hello")
    clock.now += 0.01
    progress.update(60_000, 60_000, clock.now, {})  # too soon to be drawn, and past the budget
    assert "100%" not in stream.getvalue()
    progress.close()
    text = stream.getvalue()
    assert " 25%|" in text
    assert "12 500 / 50 000 env steps  6 250 steps/s  return 213.4  left 0:06" in text
    assert "\rhello\n" in text or "\nhello\n" in text
    assert "100%|" in text.rsplit("\r", 1)[-1]
    assert "60 000 / 50 000" in text.rsplit("\r", 1)[-1]


def test_a_full_disk_ends_only_the_curves_with_a_warning(tmp_path, caplog, monkeypatch):
    writer = TensorBoardWriter(tmp_path / "events")
    writer.scalars({"loss": 1.0}, Counters(1, 1, 1, 1, 1.0))

    class Full(io.RawIOBase):
        def write(self, content):
            raise OSError(28, "No space left on device")

    writer._records._writer = Full()
    for step in (2, 3):
        writer.scalars({"loss": 1.0}, Counters(step, 1, 1, 1, 1.0))
    writer.text("config", "x", 3)
    writer.close()
    [record] = caplog.records
    assert (
        f"{tmp_path / 'events'} cannot be written to (No space left on device): its curves end here" in record.message
    )
    (tmp_path / "file").touch()
    TensorBoardWriter(tmp_path / "file" / "events").scalars({"loss": 1.0}, Counters(1, 1, 1, 1, 1.0))
    assert len(caplog.records) == 2


def test_a_row_that_does_not_fit_on_the_disk_is_an_error_once(tmp_path):
    writer = CSVWriter(tmp_path / "metrics.csv")
    writer._file.close()
    writer._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    with pytest.raises(DiskError, match=f"{tmp_path} cannot be written to: No space left on device .metrics.csv"):
        writer.scalars({}, Counters(1, 1, 1, 1, 1.0))
    writer.close()


@pytest.mark.parametrize("content", [b"\xff\xfe\n", b"steps,env_steps\n", b"a" * 200_000 + b"\n"])
def test_a_file_that_is_not_a_table_is_named(tmp_path, content):
    (tmp_path / "metrics.csv").write_bytes(content)
    with pytest.raises(UsageError, match="metrics.csv is not a table.*; .*move it away"):
        CSVWriter(tmp_path / "metrics.csv")
    assert (tmp_path / "metrics.csv").read_bytes() == content


@pytest.mark.parametrize(
    "rows, words",
    [
        ("9" * 5000 + ",7,0,0,0.0,0.8", "row 1, does not start with a count of steps"),
        ("8,7,0,0,0.0,0.8,9\n9,7,0,0,0.0,0.8", "row 1, has 7 cells instead of 6"),
        ("8,7,0\n9,7,0,0,0.0,0.8", "row 1, has 3 cells instead of 6"),
        ('8,7,0,0,0.0,"0.8\n9,7,0,0,0.0,0.8', "is not a table: unexpected end of data"),
    ],
)
def test_a_table_with_a_damaged_row_is_not_continued(tmp_path, rows, words):
    path = tmp_path / "metrics.csv"
    path.write_text(before := f"{HEADER},loss\n{rows}\n")
    with pytest.raises(UsageError, match=f"metrics.csv.*{words}"):
        CSVWriter(path, resume_steps=16)
    assert path.read_text() == before


def test_a_table_that_a_spreadsheet_has_saved_is_continued(tmp_path):
    (tmp_path / "metrics.csv").write_bytes(f"\ufeff{HEADER},loss\r\n8,7,0,0,0.0,0.8\r\n".encode())
    CSVWriter(tmp_path / "metrics.csv", resume_steps=8).close()
    assert _lines(tmp_path / "metrics.csv") == [HEADER + ",loss", "8,7,0,0,0.0,0.8"]


def test_a_histogram_has_a_bin_for_each_whole_number():
    histogram = Histogram.of(np.array([[0, 2], [2, np.nan]]))
    assert (histogram.counts.tolist(), histogram.edges.tolist()) == ([1, 0, 2], [-0.5, 0.5, 1.5, 2.5])
    assert (histogram.sum, histogram.sum_squares) == (4, 8)


@pytest.mark.parametrize(
    "values",
    [
        np.linspace(-1, 1, 1000),
        torch.linspace(0, 1, 50_001),
        np.full(3, 0.5),
        [np.inf],
        [1e17, 1e17 + 64],
        np.full(4, 1e18),
        np.full(5, 5e15),
    ],
)
def test_a_histogram_counts_finite_values_between_ascending_edges(values):
    histogram = Histogram.of(values)
    assert (np.diff(histogram.edges) > 0).all()
    assert len(histogram.edges) == len(histogram.counts) + 1
    assert (
        histogram.counts.sum() == {1000: 1000, 50_001: 8334, 3: 3, 1: 0, 2: 2, 4: 4, 5: 5}[len(values)]
    )  # every sixth of 50,001


def test_what_a_custom_summary_returns_is_a_number_a_histogram_or_an_image():
    frame = np.zeros((4, 5, 1), np.uint8)
    assert shown_value(np.float32(0.5)) == shown_value(torch.tensor([0.5])) == 0.5
    assert shown_value(frame).pixels.shape == (4, 5, 3)
    assert shown_value(torch.ones(7)).counts.sum() == 7
    for wrong in ("text", None, [], {"a": 1}):
        with pytest.raises(TypeError):
            shown_value(wrong)


def test_tensorboard_shows_histograms_and_images(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.histogram("action", Histogram.of(np.array([0, 1, 1])), 8)
    writer.image("frame", Image(np.arange(24, dtype=np.uint8).reshape(2, 4, 3)), 8)
    writer.close()
    events = _events(tmp_path)
    [shown] = events.Histograms("action")
    assert (shown.step, shown.histogram_value.num, shown.histogram_value.bucket) == (8, 3, [0, 1, 2])
    [picture] = events.Images("frame")
    assert (picture.width, picture.height) == (4, 2)
    pixels = imageio.imread(picture.encoded_image_string)
    assert pixels.tolist() == np.arange(24).reshape(2, 4, 3).tolist()


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
@pytest.mark.parametrize("when", ["before", "after"])
def test_progress_works_after_an_environment_closed_the_stream(kind, when):
    stream = kind()
    if when == "before":
        stream.close()
    progress = ConsoleProgress(10, unit="iterations", stream=stream, period_seconds=0)
    progress.update(1, 1, 1.0, {})
    stream.close()
    progress.update(2, 2, 2.0, {})
    progress.line("a line")
    progress.close()


def test_progress_works_without_standard_error(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    progress = ConsoleProgress(10, unit="iterations")
    progress.update(1, 1, 1.0, {})
    progress.line("a line")
    progress.close()
