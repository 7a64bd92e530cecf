"""The page of a run: what it says, of which runs, and that it needs nothing else."""

import csv
import html.parser
import json
import os
import re
import shutil
import subprocess

import pytest

from alfish.__main__ import main
from alfish.runs.run_log import RunLog, warnings_in

VOID = {"meta", "link", "img", "br"}


class Nesting(html.parser.HTMLParser):
    """Checks that each element of HTML is closed where it should be."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def run(make_run):
    """A run that has ended, with all files that a run can have."""
    directory = make_run("ppo <1>", (100.0, 300.0, 200.0))
    command = ["/x/bin/alfish", "train", "--gin_file=confs/ppo_cartpole.gin", "--gin_param=PPO.clip_range = 0.1"]
    entry = {"steps": 0, "command": command, "versions": {"torch": "9.9.9"}, "machine": "a <machine>"}
    (directory / "provenance.json").write_text(json.dumps([entry]))
    (directory / "done").write_text('{"env_steps": 3000, "iterations": 3, "updates": 300}')
    log = RunLog(directory / "log.txt")
    log.write("PPO on CartPole-v1")
    log.write("warning: the <physics> are slow")
    (directory / "film.mp4").write_bytes(b"film")
    log.open(), log.close()
    return directory


@pytest.fixture
def page(tmp_path, capsys):
    """Returns the page of a run, after its form was checked."""

    def page(directory):
        output = tmp_path / "report.html"
        assert main(["report", f"--root_dir={directory}", f"--output={output}"]) == 0
        assert capsys.readouterr().out == f"written: {output}\n"
        nesting = Nesting()
        nesting.feed(output.read_text())
        assert nesting.open == []
        return output.read_text()

    return page


def test_the_page_states_the_task_and_the_end_of_the_run(run, page):
    text = page(run)
    facts = dict(re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", text))
    assert facts["algorithm"] == "PPO" and facts["environment"] == "CartPole-v1" and facts["seed"] == "0"
    assert facts["end"] == "the budget is spent: 3,000 env steps, 3 iterations, 300 updates"
    assert facts["last evaluation"].startswith("200 [199, 201] over 2 episodes at 3,000 steps")
    assert facts["best evaluation"].startswith("300 [299, 301] at 2,000 steps")
    assert facts["training"] == "2 s, 2,000 env steps/s" and facts["versions"] == "torch 9.9.9"


def test_the_page_has_numbers_from_infos(run, page):
    with open(run / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    evaluated = [row for row in rows if row["evaluation/mean_return"]]
    for row, rate in zip(evaluated, ("0.25", "0.75", "0.5")):
        row["evaluation/env_info/success"] = rate
    with open(run / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, dict.fromkeys(name for row in rows for name in row))
        writer.writeheader()
        writer.writerows(rows)
    assert "0.5 in the last evaluation that reports it; the largest is 0.75" in page(run)


def test_the_page_has_curves_episodes_command_films_and_warnings(run, page):
    text = page(run)
    assert text.count("<svg") == 2 and "99 (6), 101 (8)" in text
    words = ["alfish train", "--gin_file=confs/ppo_cartpole.gin", "&#x27;--gin_param=PPO.clip_range = 0.1&#x27;"]
    assert " \\\n    ".join(words) in text
    assert '<video controls src="data:video/mp4;base64,ZmlsbQ=="' in text
    assert "<h2>Warnings</h2>\n<p>warning: the &lt;physics&gt; are slow</p>" in text
    assert "a &lt;machine&gt;" in text and "ppo &lt;1&gt;" in text


def test_a_page_shows_the_newest_films_and_names_the_rest(run, page, monkeypatch):
    (run / "film.mp4").unlink()
    (run / "films").mkdir()
    for k, name in enumerate(("old", "newest", "middle")):
        path = run / "films" / f"{name}.mp4"
        path.write_bytes(name.encode())
        os.utime(path, (k, 100 if name == "newest" else k))
    (run / "films" / ".film.7.tmp.mp4").write_bytes(b"half")
    monkeypatch.setattr("alfish.analysis.report.MAX_FILMS", 12)
    text = page(run)
    shown = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    assert shown == ["films/newest.mp4", "films/middle.mp4"]
    assert "at most 0 MiB of films: films/old.mp4</p>" in text


def test_the_page_shows_the_difference_from_the_shipped_conf(run, page):
    text = page(run)
    assert "Compared with ppo_cartpole.gin" in text and "- PPO.entropy_coef = 0.0" in text.replace("-PPO", "- PPO")
    assert "+Trainer.seed = 0" in text


def test_the_page_works_offline_and_executes_nothing(run, page):
    text = page(run)
    links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')>\s]*)""", text)
    assert links and all(link.startswith(("#", "data:")) for link in links) and "<script" not in text


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_shows_the_pages_without_a_message(run, page, tmp_path):
    page(run)
    assert main(["plot", str(run), f"--output={tmp_path / 'curves.html'}"]) == 0
    for name in ("report", "curves"):
        picture, address = tmp_path / f"{name}.png", f"file://{tmp_path / name}.html"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--screenshot={picture}"]
        shown = subprocess.run(["chromium", *flags, address], capture_output=True, text=True, timeout=100)
        assert shown.returncode == 0 and picture.stat().st_size > 10_000
        # What a page says appears as `INFO:CONSOLE`; a film of four bytes cannot be played, which is not said there.
        assert "CONSOLE" not in shown.stderr


def test_young_and_foreign_runs_have_a_page(make_run, page):
    text = page(make_run("young", returns=()))
    assert "<td>none yet</td>" in text and "<td>not finished</td>" in text and "<svg" not in text
    stopped = make_run("stopped", offline=True)
    (stopped / "done").write_text('{"env_steps": 0, "iterations": 3, "updates": 3000, "reason": "solved"}')
    (stopped / "provenance.json").write_text('{"command": ["mine.py", "--gin_file=mine.gin"]}')
    text = page(stopped)
    assert "solved: 0 env steps, 3 iterations, 3,000 updates" in text and "updates/s" in text
    assert "<pre>python mine.py \\\n" in text and "Compared with" not in text


def test_invalid_runs_and_outputs_are_named(make_run, tmp_path, capsys):
    run = make_run("run")
    for words, *arguments in (
        ("--root_dir is missing", f"--output={tmp_path / 'x.html'}"),
        ("is not a run", f"--root_dir={tmp_path}", f"--output={tmp_path / 'x.html'}"),
        ("there is no directory", f"--root_dir={run}", f"--output={tmp_path / 'no' / 'x.html'}"),
        ("must end in .html", f"--root_dir={run}", f"--output={tmp_path / 'x.pdf'}"),
    ):
        assert main(["report", *arguments]) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1
    (run / "provenance.json").write_text("{")
    assert main(["report", f"--root_dir={run}", f"--output={tmp_path / 'x.html'}"]) == 2
    assert "provenance.json is not JSON" in capsys.readouterr().err


def test_warnings_of_a_log_are_each_listed_once():
    log = (
        "2026-01-01 00:00:00 PPO on CartPole-v1\n2026-01-01 00:00:01 warning: slow\n"
        "2026-01-01 00:00:02 warning: slow\n2026-01-01 00:00:03 x.py:3: UserWarning: old\n"
    )
    assert warnings_in(log) == ["warning: slow", "x.py:3: UserWarning: old"]
