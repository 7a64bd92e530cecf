"""Whole iterations in turns: sides wait for their turn, and the tables have the medians of the raw data."""

import io
import json

import pytest

from benchmarks import PROJECT, iteration, tables
from benchmarks.runs import turns


def test_a_side_works_for_the_seconds_of_each_line(monkeypatch, capsys):
    clock = iter(range(100))  # each reading of the clock is a second later
    monkeypatch.setattr(turns.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(turns.time, "process_time", lambda: 0.0)
    monkeypatch.setattr("sys.stdin", io.StringIO("2\n4\n"))
    turns.take_turns(lambda: 10, "torch")
    ready, *results = capsys.readouterr().out.splitlines()
    assert ready.startswith("ready torch ")
    assert [json.loads(result) for result in results] == [
        {"steps": 10, "seconds": 3.0, "cpu_seconds": 0.0},
        {"steps": 30, "seconds": 5.0, "cpu_seconds": 0.0},
    ]


@pytest.mark.slow
def test_alfish_takes_turns_as_a_process():
    side = iteration._Side("numpy-1", num_envs=4, layers=8)
    with side as take:
        assert take.versions.startswith("alfish ")
        for _ in range(2):
            result = take(0.01)
            assert result["steps"] > 2 * iteration.LENGTH and result["seconds"] >= 0.01
    assert side._process.poll() is not None


def test_the_tables_of_the_page_match_their_raw_data():
    rows = tables.read_rows(iteration.CSV)
    page = (PROJECT / "docs" / "results.md").read_text()
    for sides in (iteration.OWN, (*iteration.PEERS, iteration.BASELINE)):
        assert iteration.table(rows, sides) in page


def test_a_cell_is_a_median_and_is_empty_without_rows():
    rows = [
        {"side": "jax-2", "num_envs": "1024", "layers": "32", "device": device, "steps_per_second": str(n)}
        | {"steps_per_cpu_second": "7"}
        for n, device in ((1000, "cpu"), (3000, "cpu"), (9000, "cpu"), (90_000, "cuda"))
    ]
    *_, line = iteration.table(rows, ("jax-2", "rlox-1")).splitlines()
    assert line == "| 1,024 | 2 x 32 | 3,000 (7) |  |"
