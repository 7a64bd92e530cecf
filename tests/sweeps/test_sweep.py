"""Sweeps with runs that cost nothing: what is started, pruned and told, and that a kill changes nothing."""

import csv
import dataclasses
import json
import random
import shutil
from types import SimpleNamespace

import pytest

from alfish.errors import UsageError
from alfish.runs.stop_signals import StopSignals
from alfish.sweeps.base import BASE
from alfish.sweeps.jobs import OUTPUT, JobEnded
from alfish.sweeps.sweep import Sweep, SweepSpecification, trials_of
from alfish.sweeps.table import CSV, PICTURE, interval, table, write_csv, write_picture
from alfish.sweeps.trials import PRUNED, TRIAL

SPECIFICATION = SweepSpecification(
    search={"a.x": "uniform(0, 1)", "a.kind": "choice('one', 'two')"},
    sampler="random",
    sampler_seed=3,
    seed=5,
    seeds=1,
    last=1,
    prune=False,
    trials=12,
)
BUDGET, PERIOD = 400, 100


class Killed(BaseException):
    pass


class Jobs:
    """Runs whose curves are known functions of their bindings. Each `wait` gives every run one more evaluation.

    Args:
      size: as in `Jobs`.
      calls: of methods until `Killed` is raised; None: for ever.
    """

    def __init__(self, size=1, calls=None):
        self.size, self._calls = size, calls
        self._arguments, self._stopped = {}, set()
        self.started, self.most = [], 0

    @property
    def running(self):
        return list(self._arguments)

    def start(self, directory, arguments):
        self._live()
        assert not (directory / "done").exists() and not (directory / PRUNED).exists()
        assert (directory / TRIAL).is_file() and directory not in self._arguments
        self._arguments[directory] = arguments
        self.started.append(directory.name)
        self.most = max(self.most, len(self._arguments))

    def stop(self, directory):
        self._live()
        self._stopped.add(directory)

    def wait(self, timeout):
        self._live()
        ended = []
        for directory, arguments in list(self._arguments.items()):
            status = 143 if directory in self._stopped else evaluate(directory, arguments)
            if status is not None:
                ended.append(JobEnded(directory, status))
                del self._arguments[directory]
        return ended

    def close(self):
        pass

    def _live(self):
        if self._calls is not None:
            self._calls -= 1
            if self._calls < 0:
                raise Killed


def evaluate(directory, arguments):
    """Writes the next evaluation of a run; returns its exit status, or None while it runs."""
    words = dict(argument.removeprefix("--gin_param=").split("=", 1) for argument in arguments[1:])
    x, seed = float(words["a.x"]), int(words["Trainer.seed"])
    if x > 0.95:
        (directory / OUTPUT).write_text("alfish train: loss or gradient was not finite\n")
        return 1
    (directory / "eval").mkdir(exist_ok=True)
    clock = PERIOD * (1 + len(list((directory / "eval").iterdir())))
    if clock <= BUDGET:
        value = (1 - abs(x - 0.6)) * clock + seed + (words["a.kind"] == "'one'")
        rows = f"episode,seed,return,length\n0,0,{value!r},1\n1,1,{value + 1!r},1\n"
        (directory / "eval" / f"evaluation-{clock:012d}.csv").write_text(rows)
        return None
    (directory / "done").write_text("{}")
    return 0


def run(directory, specification=SPECIFICATION, jobs=None, log=lambda line: None):
    """Runs a sweep without a configuration; returns its table."""
    directory.mkdir(exist_ok=True)
    jobs = jobs or Jobs()
    Sweep(directory, specification, jobs, StopSignals(lambda: None), log).run()
    trials = trials_of(directory, specification).read()
    write_csv(directory, list(specification.search), trials)
    return (directory / CSV).read_text()


def rows(text):
    return list(csv.DictReader(text.splitlines()))


def test_every_trial_is_trained_with_its_bindings_and_seed_and_has_a_row(tmp_path):
    jobs = Jobs()
    found = rows(run(tmp_path / "s", jobs=jobs))
    assert jobs.started == [f"{k:03d}" for k in range(12)] and jobs.most == 1
    for row in found:
        content = json.loads((tmp_path / "s" / f"{int(row['trial']):03d}" / TRIAL).read_text())
        assert content["bindings"] == {"a.x": row["a.x"], "a.kind": row["a.kind"]} and content["seed"] == 5
        assert row["seeds"] == "5"
        if row["state"] == "complete":
            expected = (1 - abs(float(row["a.x"]) - 0.6)) * BUDGET + 5.5 + (row["a.kind"] == "'one'")
            assert float(row["mean"]) == pytest.approx(expected) and row["steps"] == str(BUDGET)
            assert float(row["ci_low"]) <= float(row["mean"]) <= float(row["ci_high"])
        assert (row["state"] == "failed") == (float(row["a.x"]) > 0.95)


def test_a_failed_trial_is_described_in_the_table_and_others_continue(tmp_path):
    specification = dataclasses.replace(SPECIFICATION, sampler_seed=1, trials=30)
    found, lines = rows(run(tmp_path / "s", specification)), []
    failed = [row for row in found if row["state"] == "failed"]
    assert failed and len(failed) < 10 and len(found) == 30
    for row in failed:
        assert row["reason"] == "loss or gradient was not finite" and not row["mean"] and float(row["a.x"]) > 0.95
    # It is not tried again, until its marker is removed.
    jobs = Jobs()
    run(tmp_path / "s", specification, jobs, lines.append)
    assert not jobs.started and lines == ["30 trials of 30 have already finished"]
    name = f"{int(failed[0]['trial']):03d}"
    (tmp_path / "s" / name / "failed").unlink()
    run(tmp_path / "s", specification, jobs)
    assert jobs.started == [name]
    # Its user may have trained it to its end.
    (tmp_path / "s" / name / "done").touch()
    (tmp_path / "s" / name / "eval").mkdir()
    (tmp_path / "s" / name / "eval" / "evaluation-000000000400.csv").write_text("episode,seed,return,length\n0,0,7,1\n")
    row = rows(run(tmp_path / "s", specification))[int(name)]
    assert (row["state"], row["mean"], row["reason"]) == ("complete", "7.0", "")


def test_the_number_of_jobs_does_not_change_the_table(tmp_path):
    jobs = Jobs(3)
    assert run(tmp_path / "three", jobs=jobs) == run(tmp_path / "one")
    assert jobs.most == 3


def test_a_trial_of_several_seeds_is_several_runs_and_their_mean(tmp_path):
    specification = dataclasses.replace(SPECIFICATION, seeds=3, trials=2)
    jobs = Jobs()
    found = rows(run(tmp_path / "s", specification, jobs))
    assert jobs.started == ["000-0", "000-1", "000-2", "001-0", "001-1", "001-2"]
    for row in found:
        expected = (1 - abs(float(row["a.x"]) - 0.6)) * BUDGET + 6.5 + (row["a.kind"] == "'one'")
        assert float(row["mean"]) == pytest.approx(expected) and row["seeds"] == "5 6 7"
        # Student's t with two degrees of freedom: 4.303 x 1 / sqrt(3).
        assert float(row["ci_high"]) - float(row["mean"]) == pytest.approx(2.484, abs=0.001)


def test_the_value_may_be_the_mean_of_several_evaluations(tmp_path):
    specification = dataclasses.replace(SPECIFICATION, last=3, trials=1)
    row = rows(run(tmp_path / "s", specification))[0]
    expected = (1 - abs(float(row["a.x"]) - 0.6)) * 300 + 5.5 + (row["a.kind"] == "'one'")
    assert float(row["mean"]) == pytest.approx(expected)


def test_more_trials_extend_a_sweep(tmp_path):
    short = run(tmp_path / "s", dataclasses.replace(SPECIFICATION, trials=5))
    whole = run(tmp_path / "s")
    assert whole.startswith(short) and whole == run(tmp_path / "other")


def test_a_pruned_run_keeps_the_value_of_its_evaluation(tmp_path):
    specification = dataclasses.replace(SPECIFICATION, prune=True, trials=20)
    lines = []
    found = rows(run(tmp_path / "s", specification, log=lines.append))
    pruned = [row for row in found if row["state"] == "pruned"]
    complete = [row for row in found if row["state"] == "complete"]
    assert 3 <= len(pruned) <= 12 and len(complete) >= 5
    for row in pruned:
        directory = tmp_path / "s" / f"{int(row['trial']):03d}"
        assert not (directory / "done").exists() and int(row["steps"]) < BUDGET
        assert json.loads((directory / PRUNED).read_text()) == {"clock": int(row["steps"])}
        assert f"Trial {row['trial']} was pruned at {row['steps']} steps" in lines


def test_pruning_does_not_depend_on_the_moment_of_a_look(tmp_path):
    class Fast(Jobs):
        """Runs that are over before the sweep looks at their evaluations."""

        def wait(self, timeout):
            while not (ended := super().wait(timeout)):
                pass
            return ended

    specification = dataclasses.replace(SPECIFICATION, prune=True, trials=20)
    expected = run(tmp_path / "slow", specification)
    assert run(tmp_path / "fast", specification, Fast()) == expected
    assert "pruned" in expected


@pytest.mark.parametrize("sampler, seeds, prune", [("random", 2, False), ("tpe", 2, True)])
def test_a_killed_sweep_equals_an_uninterrupted_sweep(tmp_path, sampler, seeds, prune):
    specification = dataclasses.replace(SPECIFICATION, sampler=sampler, seeds=seeds, prune=prune, trials=14)
    expected = run(tmp_path / "whole", specification)
    draw = random.Random(seeds + 2 * prune)
    kills = 0
    while True:
        try:
            found = run(tmp_path / "killed", specification, Jobs(calls=draw.randrange(1, 25)))
            break
        except Killed:
            kills += 1
    assert kills > 3
    assert found == expected
    states = {row["state"] for row in rows(found)}
    assert ("pruned" in states) == prune


def test_with_several_jobs_kills_do_not_change_random_proposals(tmp_path):
    expected, draw, kills = run(tmp_path / "whole", jobs=Jobs(3)), random.Random(0), 0
    while True:
        try:
            assert run(tmp_path / "killed", jobs=Jobs(3, calls=draw.randrange(1, 12))) == expected
            break
        except Killed:
            kills += 1
    assert kills > 3


@pytest.mark.parametrize("prune", [False, True])
def test_a_finished_sweep_is_not_changed(tmp_path, prune):
    """Pruning depends on what had been seen, which trial.json keeps."""
    specification = dataclasses.replace(SPECIFICATION, prune=prune)
    expected, jobs = run(tmp_path / "s", specification, Jobs(3)), Jobs(3)
    assert run(tmp_path / "s", specification, jobs) == expected and not jobs.started


def test_other_seeds_of_a_finished_trial_stay_stopped(tmp_path):
    class First(Jobs):
        """The first seed of each trial fails at its second evaluation."""

        def wait(self, timeout):
            ended = super().wait(timeout)
            for directory in [one for one in self._arguments if one.name.endswith("-0")]:
                if len(list((directory / "eval").iterdir())) == 2:
                    del self._arguments[directory]
                    ended.append(JobEnded(directory, 1))
            return ended

    lines, jobs = [], First(4)
    run(tmp_path / "s", dataclasses.replace(SPECIFICATION, seeds=2, trials=2), jobs, lines.append)
    assert sorted(jobs.started) == ["000-0", "000-1", "001-0", "001-1"]
    assert not any("continued" in line for line in lines)
    assert not (tmp_path / "s" / "000-1" / "done").exists()


def test_a_kill_between_two_files_leaves_no_partial_trial(tmp_path):
    specification = dataclasses.replace(SPECIFICATION, seeds=2, trials=2)
    expected = run(tmp_path / "whole", specification)
    (tmp_path / "s" / "000-0").mkdir(parents=True)
    text = (tmp_path / "whole" / "000-0" / TRIAL).read_text()
    (tmp_path / "s" / "000-0" / TRIAL).write_text(text)
    (tmp_path / "s" / "001-1").mkdir()  # before its file was written
    assert run(tmp_path / "s", specification) == expected


def test_a_removed_trial_is_proposed_again_as_it_was(tmp_path):
    import shutil

    specification = dataclasses.replace(SPECIFICATION, sampler="tpe", trials=14)
    expected = run(tmp_path / "s", specification)
    shutil.rmtree(tmp_path / "s" / "012")
    assert run(tmp_path / "s", specification) == expected


def test_a_run_that_ends_without_its_budget_fails(tmp_path):
    class Stops(Jobs):
        def wait(self, timeout):
            return [JobEnded(self._arguments.popitem()[0], 0)]

    found = rows(run(tmp_path / "s", dataclasses.replace(SPECIFICATION, trials=1), Stops()))
    assert found[0]["reason"] == "ended before its budget was spent"


def test_no_process_starts_after_a_signal(tmp_path):
    jobs, signals = Jobs(2), StopSignals(lambda: None)

    def log(line):
        signals.number = 15

    (tmp_path / "s").mkdir()
    Sweep(tmp_path / "s", SPECIFICATION, jobs, signals, log).run()
    assert jobs.started == ["000"]


def test_copies_of_trials_are_unchanged(tmp_path):
    run(tmp_path / "s", SPECIFICATION)
    before = [trial.number for trial in trials_of(tmp_path / "s", SPECIFICATION).read()]
    for name in ("001_old", "001.bak", "1", "001-old"):
        shutil.copytree(tmp_path / "s" / "001", tmp_path / "s" / name)
    assert [trial.number for trial in trials_of(tmp_path / "s", SPECIFICATION).read()] == before


@pytest.mark.parametrize("values", [(-5.0, 0.0, -9.0), (0.0, None)])
def test_the_best_trial_of_the_picture_may_have_a_value_of_0(tmp_path, monkeypatch, values):
    drawn = []
    monkeypatch.setattr("alfish.sweeps.table._draw_curves", lambda axis, trials, best: drawn.append(best.value))
    trials = [SimpleNamespace(state="complete", value=value) for value in values]
    write_picture(tmp_path, [], trials)
    assert drawn == [0.0]


def test_table_and_picture_show_every_state(tmp_path):
    specification = dataclasses.replace(SPECIFICATION, prune=True, trials=40, sampler_seed=1)
    run(tmp_path / "s", specification)
    (tmp_path / "s" / "001" / "done").unlink()
    (tmp_path / "s" / "001" / PRUNED).unlink(missing_ok=True)
    trials = trials_of(tmp_path / "s", specification).read()
    assert {trial.state for trial in trials} == {"complete", "pruned", "failed", "running"}
    shown = table(list(specification.search), trials)
    best = max((trial for trial in trials if trial.state == "complete"), key=lambda trial: trial.value)
    assert shown.splitlines()[1].split()[0] == str(best.number)
    assert "failed: loss or gradient was not finite" in shown and "complete trials more" in shown
    write_picture(tmp_path / "s", specification.parameters, trials)
    assert (tmp_path / "s" / PICTURE).read_bytes().startswith(b"\x89PNG")
    # Also of a sweep in which nothing has happened.
    write_picture(tmp_path / "s", specification.parameters, [])
    assert len(table([], []).splitlines()) == 1
    assert interval(next(trial for trial in trials if trial.state == "failed")) == (None, None)


GIVEN = {
    "search": ["Learner.learning_rate=grid(1e-3, 1e-2)"],
    **dict.fromkeys(["sampler", "sampler_seed", "seeds", "last", "prune", "trials"]),
}


def opened(directory, toy, bindings=(), **given):
    return SweepSpecification.open(directory, [str(toy)] if toy else [], list(bindings), GIVEN | given)


def test_a_new_sweep_is_checked_and_then_written(toy, tmp_path):
    found = opened(tmp_path / "s", toy, ["Trainer.seed=4"], seeds=2)
    expected = {"sampler": "grid", "sampler_seed": 0, "seed": 4, "seeds": 2, "last": 1, "prune": False, "trials": 2}
    assert found == SweepSpecification(search={"Learner.learning_rate": "grid(1e-3, 1e-2)"}, **expected)
    assert SweepSpecification.read(tmp_path / "s") == found
    for given in ({"search": ["PPO.gama=grid(1)"]}, {"search": ["PPO.gamma=grid(0.9, 2)"]}, {"search": []}):
        with pytest.raises(UsageError):
            opened(tmp_path / "other", toy, **given)
    with pytest.raises(UsageError, match="--gin_file is missing"):
        opened(tmp_path / "other", None)
    assert not (tmp_path / "other").exists()


def test_an_equal_specification_continues_and_omitted_flags_keep_values(toy, tmp_path):
    directory = tmp_path / "s"
    first = opened(directory, toy, seeds=2, last=3)
    assert opened(directory, toy, seeds=2, last=3) == first
    assert opened(directory, toy) == opened(directory, None, search=[]) == first
    assert opened(directory, None, search=[], trials=1).trials == 1
    assert SweepSpecification.read(directory).trials == 1


@pytest.mark.parametrize(
    "bindings, given, lines",
    [
        ((), {"seeds": 3}, ["-seeds = 2", "+seeds = 3"]),
        ((), {"sampler": "random"}, ["-sampler = grid", "+sampler = random"]),
        ((), {"search": ["PPO.gamma=grid(0.9)"]}, ["{'Learner.learning_rate': 'grid(1e-3, 1e-2)'}", "PPO.gamma"]),
        (["Trainer.num_env_steps=2001"], {}, ["-Trainer.num_env_steps = 2000", "+Trainer.num_env_steps = 2001"]),
        (["PPO.gamma=0.5"], {}, ["+PPO.gamma = 0.5"]),
    ],
)
def test_another_specification_is_refused_with_the_difference(toy, tmp_path, bindings, given, lines):
    directory = tmp_path / "s"
    opened(directory, toy, seeds=2)
    before = (directory / "sweep.json").read_text()
    with pytest.raises(UsageError) as error:
        opened(directory, toy, bindings, **given)
    assert all(line in str(error.value) for line in lines) and "another specification" in str(error.value)
    assert (directory / "sweep.json").read_text() == before


def test_a_sweep_of_another_user_is_not_trusted(toy, tmp_path):
    """As the configuration of a saved run: it may not import what the user has not allowed."""
    directory, copy = tmp_path / "s", tmp_path / "s" / "base" / "config.gin"
    opened(directory, toy)
    mine = copy.read_text()
    copy.write_text("import zipapp\n" + mine)
    with pytest.raises(UsageError, match="zipapp.*allow"):
        opened(directory, None, search=[])
    copy.write_text("# part: some_module\n" + mine)
    opened(directory, toy)
    assert copy.read_text() == mine
    trial = tmp_path / "s" / "000" / TRIAL
    trial.parent.mkdir()
    for bindings in ({"Learner.learning_rate": "1e-3\nimport x"}, {"PPO.gamma": "1"}, {}, "text", None):
        trial.write_text(json.dumps({"bindings": bindings, "seen": []}))
        with pytest.raises(
            UsageError, match="trial.json (does not belong to a trial of this sweep|is not what alfish writes there)"
        ):
            trials_of(directory, SweepSpecification.read(directory)).read()
    trial.write_text(json.dumps({"bindings": {"Learner.learning_rate": "1e-3"}, "seen": []}))
    assert len(trials_of(directory, SweepSpecification.read(directory)).read()) == 1


def test_a_parameter_is_searched_once_and_a_sweep_needs_one(toy, tmp_path):
    with pytest.raises(UsageError, match="--search has PPO.gamma 2 times"):
        opened(tmp_path / "s", toy, search=["PPO.gamma=grid(0.9)", "PPO.gamma=uniform(0, 1)"])
    with pytest.raises(UsageError, match="--search is missing"):
        opened(tmp_path / "s", toy, search=[])


def test_a_directory_of_something_else_is_refused(toy, tmp_path):
    directory = tmp_path / "s"
    (directory / BASE).mkdir(parents=True)
    (directory / ".sweep.json.7.tmp").touch()
    for name, words in (("x", "other files"), ("population.json", "a population"), ("run_id", "a run")):
        (directory / name).touch()
        with pytest.raises(UsageError, match=f"is .*{words}.*; choose another --root_dir"):
            opened(directory, toy)
        (directory / name).unlink()
    opened(directory, toy)
    (directory / "000").mkdir()
    opened(directory, toy)


def test_the_objective_may_be_a_number_in_the_infos(tmp_path):
    with_success = dataclasses.replace(SPECIFICATION, trials=2, last=2, objective="evaluation/env_info/success")
    (tmp_path / "s").mkdir()
    trials = trials_of(tmp_path / "s", with_success)
    for number in range(2):
        trials.write(number, {"a.x": "0.5", "a.kind": "'one'"}, [])
        for clock, cells in ((100, ("", "")), (200, ("1.0", "")), (300, ("0.0", "1.0"))):
            directory = tmp_path / "s" / f"{number:03d}" / "eval"
            directory.mkdir(exist_ok=True)
            rows = [f"{k},{k},7.0,1,{cell if number == 0 else ''}" for k, cell in enumerate(cells)]
            header = "episode,seed,return,length,env_info/success"
            (directory / f"evaluation-{clock:012d}.csv").write_text("\n".join([header, *rows]) + "\n")
        (directory.parent / "done").touch()
    first, second = trials.read()
    assert first.value == 0.75 and first.steps == 300  # means of the last two evaluations that have the number
    words = "has an evaluation without env_info/success (Trainer.evaluation_infos)"
    assert second.state == "failed" and second.failure == words
    (tmp_path / "s/000/eval/evaluation-000000000400.csv").write_text("episode,seed,return,length\n0,0,7.0,1\n")
    (late,) = trials_of(tmp_path / "s", with_success).read()[:1]
    assert late.failure == words and late.runs[0].state.means == {200: 1.0, 300: 0.5}


@pytest.mark.parametrize(
    "objective, column",
    [
        ("evaluation/mean_return", "return"),
        ("evaluation/mean_return/cost", "return/cost"),
        ("evaluation/env_info/a.b/c", "env_info/a.b/c"),
    ],
)
def test_an_objective_is_a_column_of_the_evaluations(objective, column):
    assert dataclasses.replace(SPECIFICATION, objective=objective).column == column


@pytest.mark.parametrize(
    "objective", ["return", "evaluation/", "evaluation/mean_return/", "evaluation/env_info/", "other/mean_return"]
)
def test_an_unknown_objective_is_refused(objective):
    with pytest.raises(UsageError, match="--objective is .*; it must be evaluation/mean_return, "):
        dataclasses.replace(SPECIFICATION, objective=objective)
