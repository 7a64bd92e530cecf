"""The trainer: budgets, reports, signals, files. Without gin: every class is constructed with plain arguments."""

import contextlib
import csv
import errno
import functools
import json
import math
import os
import random
import shutil
import signal
import threading
import warnings
from importlib import metadata
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from absl import logging
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toys import Bandit, OneState, Stamped

import alfish
from alfish.__main__ import main
from alfish.algorithms.a2c import A2C
from alfish.algorithms.acting import ModeSwitch
from alfish.algorithms.appo import APPO
from alfish.algorithms.ppo import PPO
from alfish.algorithms.rl_algorithm import UnrollUse
from alfish.algorithms.sac import SAC
from alfish.compiler import kernels
from alfish.environments import VectorEnvironment, make_environment
from alfish.environments.toy import TensorPointMass
from alfish.errors import RunError, UsageError
from alfish.errors.user_code import CodeError
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.metrics import DEFAULT_METRICS, AverageReturn, EnvInfo, EnvironmentSteps
from alfish.networks import MLP, ActorCritic, CriticEnsemble, Torso
from alfish.parameters.schedules import Linear
from alfish.runs import files, process_settings
from alfish.runs.checkpoints import Checkpoints
from alfish.runs.files import DiskError
from alfish.training.evaluator import Evaluation
from alfish.training.listener import Listener
from alfish.training.listeners import (
    CheckpointSaver,
    Evaluate,
    Progress,
    StopAt,
    StopWithoutProgress,
    Summaries,
    checked_listeners,
)
from alfish.training.trainer import Trainer
from alfish.transforms import ObservationNormalizer, RewardNormalizer
from alfish.unrollers import SyncUnroller

torso = functools.partial(Torso, mlp=functools.partial(MLP, layers=(8,)))
network = functools.partial(ActorCritic, actor_torso=torso, critic_torso=torso)
through_torch = functools.partial(SyncUnroller, numpy_policy=None)


def make(root_dir, env_id="CartPole-v1", env_kwargs=None, num_envs=2, **options):
    environment = functools.partial(make_environment, env_id, num_envs=num_envs, env_kwargs=env_kwargs)
    if not {"num_env_steps", "num_iterations", "num_updates", "wall_seconds"} & options.keys():
        options["num_iterations"] = 3
    defaults = {
        "algorithm": functools.partial(PPO, network=network),
        "environment": environment,
        "batches": functools.partial(EpochBatches, num_epochs=2, minibatch_size=8),
        "listeners": [],
        "unroll_length": 8,
        "device": "cpu",
    }
    return Trainer(root_dir, **{**defaults, **options})


def weights(trainer):
    return torch.cat([parameter.detach().reshape(-1) for parameter in trainer.algorithm.parameters()])


class Recorder(Listener):
    """Keeps the reports, and does something after one of them."""

    def __init__(self, after=None, act=None):
        self.reports, self.closed, self._after, self._act = [], 0, after, act

    def after_iteration(self, trainer, report):
        self.reports.append(report)
        if report.iterations == self._after:
            self._after = None  # the last report may stand at the same iteration
            self._act(trainer)

    def close(self):
        self.closed += 1


# Budgets.


@pytest.mark.parametrize(
    "budget, spent",
    [({"num_iterations": 4}, "iterations"), ({"num_env_steps": 40}, "env_steps"), ({"num_updates": 10}, "updates")],
)
def test_each_budget_ends_a_run_and_the_last_report_names_it(tmp_path, budget, spent):
    recorder = Recorder()
    trainer = make(tmp_path, listeners=[recorder], **budget)
    report = trainer.train()
    [size] = budget.values()
    assert getattr(report, spent) >= size
    assert getattr(recorder.reports[-2], spent) < size  # and not an iteration later
    assert [r.finished for r in recorder.reports] == [False] * (len(recorder.reports) - 1) + [True]
    assert [r.progress for r in recorder.reports] == sorted(r.progress for r in recorder.reports)
    assert recorder.reports[-1].progress == 1 and recorder.closed == 1


def test_a_wall_clock_budget_ends_a_run(tmp_path):
    recorder = Recorder()
    report = make(tmp_path, listeners=[recorder], wall_seconds=0.1).train()
    assert 0.1 <= report.wall_seconds < 5 and report.finished
    assert [r.finished for r in recorder.reports].count(True) == 1
    assert all(r.wall_seconds < 0.1 for r in recorder.reports[:-1])


def test_there_is_exactly_one_budget(tmp_path):
    with pytest.raises(UsageError, match="exactly one budget: .* given: Trainer.num_env_steps = 5 and Trainer.num_upd"):
        make(tmp_path, num_env_steps=5, num_updates=3)
    with pytest.raises(UsageError, match="exactly one budget: .* given: none"):
        make(tmp_path, num_iterations=None)
    with pytest.raises(UsageError, match="num_iterations is 0; it must be an integer of at least 1"):
        make(tmp_path, num_iterations=0)
    with pytest.raises(UsageError, match="wall_seconds is 0; it must be a positive number"):
        make(tmp_path, num_iterations=1, wall_seconds=0)


def test_extra_listeners_and_metrics_stand_beside_the_defaults(tmp_path):
    recorder = Recorder()
    metric = EnvironmentSteps(name="again")
    trainer = make(tmp_path / "a", listeners=None, extra_listeners=[recorder], extra_metrics=[metric])
    names = [type(one).__name__ for one in trainer.listeners]
    assert names == ["Evaluate", "Summaries", "Progress", "Recorder", "CheckpointSaver"]
    assert {"again", "environment_steps", "episodes"} <= set(trainer.metrics.results())
    trainer.close()
    trainer = make(tmp_path / "b", listeners=[], extra_listeners=[recorder])
    assert trainer.listeners == [recorder]
    trainer.close()


@pytest.mark.parametrize("wall_seconds, iterations", [(1e-9, 1), (1e9, 3)])
def test_a_time_limit_may_stand_beside_a_budget(tmp_path, wall_seconds, iterations):
    trainer = make(tmp_path, num_iterations=3, wall_seconds=wall_seconds, listeners=[recorder := Recorder(), *saving()])
    report = trainer.train()
    assert report.iterations == iterations and report.finished and trainer.clock.finished
    assert report.progress == iterations / 3  # schedules follow the budget
    assert trainer.clock.budget[:2] == ("num_iterations", 3)
    assert [r.finished for r in recorder.reports] == [False] * (iterations - 1) + [True]
    again = make(tmp_path, num_iterations=3, wall_seconds=wall_seconds, listeners=saving())
    assert again.train() is None  # the limit holds over all resumes
    make(tmp_path, num_iterations=3, wall_seconds=2e9, listeners=[after := Recorder(), *saving()]).train()
    assert len(after.reports) == 3 - iterations


@pytest.mark.parametrize("length", [1, 2, 7])
def test_reset_rows_are_not_environment_steps(tmp_path, length):
    recorder = Recorder()
    trainer = make(tmp_path, OneState, {"length": length}, num_envs=3, num_iterations=5, listeners=[recorder])
    trainer.train()
    # Rows 1 ... 8 n, of which each that begins an episode is no step.
    for report in recorder.reports:
        rows = np.arange(1, 8 * report.iterations + 1)
        assert report.env_steps == 3 * int((rows % (length + 1) != 0).sum())
    assert trainer.metrics.results()["environment_steps"] == trainer.clock.env_steps


def test_rows_that_fill_up_an_unroll_are_not_steps(tmp_path):
    """Environments that reset in the same step, at ends that differ: a column waits while another resets."""

    def environment(seed=None):
        makers = [lambda: Stamped((2, 3)), lambda: Stamped((5,))]
        return VectorEnvironment(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP), [0, 1])

    trainer = make(
        tmp_path, environment=environment, batches=EpochBatches, metrics=[EnvironmentSteps()], num_iterations=6
    )
    report = trainer.train()
    trainer.close()
    assert report.env_steps == trainer.metrics.results()["environment_steps"] > 40


def test_updates_are_counted(tmp_path):
    trainer = make(tmp_path)
    assert trainer.train().updates == 3 * 2 * 2  # iterations, epochs, minibatches of 8 in 16 rows


# What is decided from the budget.


class PlannedLearner(Learner):
    def plan(self, num_updates, num_rows):
        self.planned = num_updates, num_rows
        super().plan(num_updates, num_rows)


BUDGETS = {  # an iteration is 8 steps of 2 environments, and 4 updates of 8 rows
    "iterations": ({"num_iterations": 3}, 12),
    "env steps": ({"num_env_steps": 160}, 40),
    "updates": ({"num_updates": 40}, 40),
    "seconds": ({"wall_seconds": 299.0}, 0),
    "many seconds": ({"wall_seconds": 300.0}, math.inf),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_the_learner_knows_how_many_updates_the_run_makes(tmp_path, name):
    budget, num_updates = BUDGETS[name]
    trainer = make(tmp_path, learner=PlannedLearner, **budget)
    assert trainer.learner.planned == (num_updates, 8)
    assert trainer.learner.is_plain == (num_updates < math.inf)


@pytest.mark.parametrize("name", ["iterations", "env steps", "updates"])
def test_a_run_makes_the_announced_number_of_updates(tmp_path, name):
    budget, num_updates = BUDGETS[name]
    trainer = make(tmp_path, OneState, {"length": 1000}, **budget)
    trainer.train()
    assert (trainer.clock.updates, trainer.clock.env_steps) == (num_updates, 4 * num_updates)


READS_INFOS = [
    (None, False),
    ([], False),
    ([AverageReturn], False),
    ([EnvInfo], True),
    ([AverageReturn, EnvInfo], True),
]


@pytest.mark.parametrize(("metrics", "read"), READS_INFOS)
def test_infos_are_ignored_where_no_metric_reads_them(tmp_path, metrics, read):
    made = None if metrics is None else [metric() for metric in metrics]
    trainer = make(tmp_path, Stamped, metrics=made, num_iterations=4)
    trainer.train()
    assert ("env_info/episode" in trainer.metrics.results()) == read
    assert bool(trainer.unroller.records.infos) == read


# Stopping.


def test_a_listener_ends_a_run_and_every_listener_gets_one_final_report(tmp_path, capsys):
    before, after = Recorder(), Recorder(2, lambda trainer: (trainer.stop("solved"), trainer.stop("too late")))
    listeners = [Evaluate(1, 1), before, CheckpointSaver(0), after]
    trainer = make(tmp_path, num_iterations=50, listeners=listeners)
    report = trainer.train()
    for recorder in (before, after):
        assert [(r.iterations, r.finished) for r in recorder.reports] == [(1, False), (2, False), (2, True)]
    assert [bool(r.evaluation) for r in before.reports] == [True, True, False]  # the policy is the one evaluated
    assert report.finished and trainer.clock.finished and trainer.interrupted_by is None
    assert trainer.clock.stop_reason == "solved"
    assert Checkpoints(tmp_path / "checkpoints").steps()[-1] == report.clock
    done = json.loads((tmp_path / "done").read_text())
    counters = {"env_steps": report.env_steps, "iterations": 2, "updates": report.updates}
    assert done == counters | {"reason": "solved", "checkpoint": report.clock}
    assert f"Stopped at {report.clock} steps: solved\n" in capsys.readouterr().err

    # The same run again does nothing, with a larger budget too, until the mark is removed.
    again = make(tmp_path, num_iterations=60, listeners=[CheckpointSaver(0), recorder := Recorder()])
    assert again.train() is None and again.clock.stop_reason == "solved" and recorder.reports == []
    (tmp_path / "done").unlink()
    on = make(tmp_path, num_iterations=3, listeners=[CheckpointSaver(0), recorder := Recorder()])
    assert on.train().iterations == 3 and on.clock.stop_reason is None
    assert "reason" not in json.loads((tmp_path / "done").read_text())


def test_a_program_can_end_a_run_after_the_current_iteration(tmp_path):
    class Stopping(PPO):
        def after_iteration(self, experience):
            trainer.stop("enough")

    algorithm = functools.partial(Stopping, network=network)
    trainer = make(tmp_path, algorithm=algorithm, num_iterations=50, listeners=[recorder := Recorder()])
    trainer.train()
    assert [(r.iterations, r.finished) for r in recorder.reports] == [(1, True)]
    other, iterations = make(tmp_path / "other", num_iterations=50), []
    for report in other.iterate():
        iterations.append(report.iterations)
        if report.iterations == 2:
            other.stop("from the loop")
    other.close()
    assert iterations == [1, 2, 2]
    with pytest.raises(UsageError, match="requires a reason in words, such as 'solved', but was given ''"):
        trainer.stop("")


class Returns(Listener):
    """Reports these values, one an iteration, as Evaluate and the trainer do."""

    def __init__(self, *values, scalar="evaluation/mean_return"):
        self._values, self._scalar = values, scalar

    def after_iteration(self, trainer, report):
        if (value := self._values[report.iterations - 1]) is not None:
            report.scalars[self._scalar] = value


def stopped_at(tmp_path, values, stopper, num_iterations=8, name="run"):
    evaluate = Evaluate(0, 1)  # at the end only
    returns = Returns(*values)
    trainer = make(tmp_path / name, num_iterations=num_iterations, listeners=[evaluate, returns, stopper, *saving()])
    trainer.train()
    return trainer.clock.iterations, trainer.clock.stop_reason


def test_a_run_stops_at_a_return(tmp_path):
    values = [1.0, None, math.nan, 474.9, 475.0, 480.0, 1.0, 1.0]
    reached = "evaluation/mean_return is 475 (StopAt.return_ = 475)"
    assert stopped_at(tmp_path, values, StopAt(475)) == (5, reached)
    assert stopped_at(tmp_path, values, StopAt(481), name="other") == (8, None)


def test_a_run_stops_without_progress_and_counts_over_a_resume(tmp_path):
    values = [1.0, 3.0, 2.0, None, 3.0, math.nan, 4.0, 1.0]
    words = "evaluation/mean_return has not risen above 3 in 3 evaluations (StopWithoutProgress)"
    assert stopped_at(tmp_path, values, StopWithoutProgress(3)) == (6, words)
    assert stopped_at(tmp_path, values, StopWithoutProgress(4), name="patient") == (8, None)
    # An increase that is too small counts as none.
    risen = [1.0, 1.1, 1.2, 3.0] + 4 * [None]
    words = "evaluation/mean_return has not risen above 1 in 2 evaluations (StopWithoutProgress)"
    assert stopped_at(tmp_path, risen, StopWithoutProgress(2, 0.5), name="small") == (3, words)
    exactly = [1.0, 1.5, 1.5] + 4 * [None]
    assert stopped_at(tmp_path, exactly, StopWithoutProgress(2, 0.5), name="exactly")[0] == 3
    assert stopped_at(tmp_path, values, StopWithoutProgress(3), num_iterations=5, name="cut") == (5, None)
    assert stopped_at(tmp_path, values, StopWithoutProgress(3), name="cut")[0] == 6
    for options, word in [({"num_evaluations": 0}, "num_evaluations is 0"), ({"min_increase": -1}, "increase is -1")]:
        with pytest.raises(UsageError, match=word):
            StopWithoutProgress(**options)


def test_checkpoints_are_saved_after_all_other_listeners_have_seen_the_iteration():
    listeners = checked_listeners([CheckpointSaver(), Summaries([]), Evaluate()], [StopWithoutProgress()])
    assert [type(each) for each in listeners] == [Evaluate, Summaries, StopWithoutProgress, CheckpointSaver]


class Evaluated(Listener):
    """Reports evaluations with these returns, one an iteration."""

    changes_algorithm = True  # and so comes first

    def __init__(self, *returns):
        self._returns = returns

    def after_iteration(self, run, report):
        report.evaluation = Evaluation(report.env_steps, 0, (self._returns[report.iterations - 1],), (1,))


@pytest.mark.parametrize("error", [KeyboardInterrupt, DiskError])
def test_a_resume_marks_the_best_checkpoint_if_it_was_not_marked(tmp_path, monkeypatch, error):
    def training():
        listeners = [Evaluated(1.0, 2.0, 10.0, 5.0, 5.0, 5.0), CheckpointSaver(1)]
        return make(tmp_path, num_iterations=6, listeners=listeners)

    marked, mark_best = [], Checkpoints.mark_best

    def mark(self, step):
        marked.append(step)
        if len(marked) == 3:
            raise error("here")
        mark_best(self, step)

    monkeypatch.setattr(Checkpoints, "mark_best", mark)
    with pytest.raises(error):
        training().train()
    resumed = training()
    resumed.train()
    assert resumed.clock.iterations == 6
    assert resumed.directory.checkpoints.best() == marked[2] in resumed.directory.checkpoints.steps()


def test_a_custom_summary_that_hangs_is_interrupted_by_a_signal(tmp_path):
    def hangs(run):
        if run.clock.iterations == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(60)
        return {}

    trainer = make(tmp_path, num_iterations=5, listeners=[Summaries([], custom_summary=hangs)], summary_period=1)
    report = trainer.train()
    assert report.finished and trainer.interrupted_by == signal.SIGTERM
    assert "Summaries was interrupted by SIGTERM" in (tmp_path / "log.txt").read_text()


def test_an_unreported_scalar_cannot_stop_a_run(tmp_path):
    with pytest.raises(UsageError, match="StopAt.scalar is 'evaluation/mean_return'; it must be one of train/"):
        make(tmp_path, listeners=[StopAt(1)]).train()
    words = "must be one of evaluation/mean_return, .*evaluation/mean_length, evaluation/env_info/..., train/..., "
    for scalar in ("test/mean_return", "evaluation/return"):
        with pytest.raises(UsageError, match=f"'{scalar}'.*{words}"):
            make(tmp_path, listeners=[Evaluate(), StopAt(1, scalar)]).train()
    trainer = make(tmp_path, listeners=[StopAt(1, "metrics/average_return")], summary_period=1)
    trainer.train()
    assert trainer.clock.stop_reason.startswith("metrics/average_return is ")


class Succeeding(OneState):
    """Episodes of one step. Each has a lower return than the one before, and those from the third on succeed."""

    num_steps = 0

    def step(self, action):
        self.num_steps += 1
        return np.ones(1, np.float32), 50.0 - self.num_steps, True, False, {"success": self.num_steps > 2}


def test_success_in_infos_stops_a_run_and_chooses_the_best_checkpoint(tmp_path):
    stop = StopAt(1.0, "evaluation/env_info/success")
    listeners = [Evaluate(16, 1, 1), stop, CheckpointSaver(0, best_of="env_info/success")]
    run = make(tmp_path, Succeeding, num_env_steps=160, listeners=listeners)
    run.train()
    assert run.clock.stop_reason == "evaluation/env_info/success is 1 (StopAt.return_ = 1)"
    assert run.directory.checkpoints.best() == run.clock.value  # the return fell in each evaluation


def test_a_best_checkpoint_by_another_number_is_chosen_anew(tmp_path):
    make(tmp_path, Succeeding, num_env_steps=32, listeners=[Evaluate(16, 1, 1), CheckpointSaver(0)]).train()
    saver = CheckpointSaver(0, best_of="env_info/success")
    run = make(tmp_path, Succeeding, num_env_steps=160, listeners=[Evaluate(16, 1, 1), saver])
    run.train()
    assert run.directory.checkpoints.best() == run.clock.value  # success rose while the return fell


def test_a_metric_of_infos_may_stop_a_run(tmp_path):
    listeners = [Evaluate(16, 1, 1), StopAt(1.0, "metrics/env_info/success")]
    metrics = [EnvInfo(window=1)]
    run = make(tmp_path, Succeeding, num_env_steps=80, listeners=listeners, metrics=metrics, summary_period=8)
    run.train()
    assert run.clock.stop_reason.startswith("metrics/env_info/success is 1")
    assert "StopAt.scalar names" not in (tmp_path / "log.txt").read_text()


def test_a_missing_success_is_reported_once(tmp_path, capsys):
    stop = StopAt(1.0, "evaluation/env_info/is_success")
    listeners = [Evaluate(16, 1, 1), stop, CheckpointSaver(0, best_of="env_info/succes")]
    make(tmp_path, Succeeding, num_env_steps=80, listeners=listeners).train()
    logged = (tmp_path / "log.txt").read_text()
    words = "but the infos at the ends of episodes have success"
    assert logged.count(f"StopAt.scalar names env_info/is_success, {words}") == 1
    assert logged.count(f"CheckpointSaver.best_of names env_info/succes, {words}") == 1


def test_evaluation_infos_are_a_list(tmp_path):
    with pytest.raises(UsageError, match=r"evaluation_infos is the string 'success'; write .* as in \['success'\]"):
        make(tmp_path, evaluation_infos="success")


def test_evaluations_are_written_wherever_they_stand_among_the_listeners(tmp_path):
    listeners = [CheckpointSaver(), Summaries([]), Evaluate(0, num_episodes=2)]
    trainer = make(tmp_path, listeners=listeners, extra_listeners=[Evaluate(0, num_episodes=1, name="seldom")])
    trainer.train()
    header = (tmp_path / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"evaluation/mean_return", "seldom/mean_return"} <= set(header)
    assert trainer.directory.checkpoints.best() is not None


def test_sampled_actions_are_evaluated_beside_the_mode_on_the_same_episodes(tmp_path, capsys):
    """With the returns of `alfish evaluate --sample`, and without a change of what is trained or best."""
    given = ["Trainer.num_env_steps=500", "Trainer.unroll_length=32", "Evaluate.num_episodes=4", "Evaluate.seed=3"]
    given += ["EpochBatches.num_epochs=1"]
    for name, more in (("plain", []), ("both", ["Trainer.extra_listeners=[@EvaluateSampled()]"])):
        flags = [f"--gin_param={one}" for one in given + more]
        assert main(["train", "--gin_file=ppo_cartpole.gin", f"--root_dir={tmp_path / name}", *flags]) == 0
    returns = {}
    for how, flags in (("evaluation", []), ("sampled", ["--sample"])):
        capsys.readouterr()
        options = ["--num_episodes=4", "--seed=3", "--json", *flags]
        assert main(["evaluate", f"--root_dir={tmp_path / 'both'}", *options]) == 0
        returns[how] = json.loads(capsys.readouterr().out)["returns"]
        (path,) = (tmp_path / "both" / "eval").glob(f"{how}-*.csv")
        assert [float(row["return"]) for row in rows_of(path)] == returns[how]
    assert returns["sampled"] != returns["evaluation"]
    assert "steps, sampled actions: return" in (tmp_path / "both" / "log.txt").read_text()
    plain, both = (Checkpoints(tmp_path / name / "checkpoints").best() for name in ("plain", "both"))
    assert plain == both is not None
    weights = [alfish.load(tmp_path / name).algorithm.state_dict() for name in ("plain", "both")]
    assert all(torch.equal(one, other) for one, other in zip(*(each.values() for each in weights), strict=True))


@pytest.mark.parametrize("name", ["eval/greedy", "", "train", "a b", "évaluation", ".hidden"])
def test_evaluations_have_names_that_files_and_scalars_may_have(name):
    with pytest.raises(UsageError, match=f"Evaluate.name is '{name}'; it is part of the names of files and scalars"):
        Evaluate(name=name)


# Signals.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_in_a_listener_ends_the_run_with_one_finished_report(tmp_path, number):
    recorder = Recorder(2, lambda trainer: os.kill(os.getpid(), number))
    before = signal.getsignal(number)
    trainer = make(tmp_path, num_iterations=50, listeners=[CheckpointSaver(0), recorder])
    report = trainer.train()
    assert [r.finished for r in recorder.reports] == [False, False, True]
    assert trainer.interrupted_by == number and report.finished and not trainer.clock.finished
    assert not (tmp_path / "done").exists() and recorder.closed == 1
    assert Checkpoints(tmp_path / "checkpoints").steps() == [report.env_steps]
    assert signal.getsignal(number) == before


def test_a_signal_during_an_iteration_ends_the_run_with_that_iteration(tmp_path):
    class Signalling(PPO):
        def after_iteration(self, experience):
            os.kill(os.getpid(), signal.SIGTERM)

    recorder = Recorder()
    trainer = make(tmp_path, algorithm=functools.partial(Signalling, network=network), listeners=[recorder])
    trainer.train()
    assert [(r.iterations, r.finished) for r in recorder.reports] == [(1, True)]


def test_a_signal_during_the_last_report_has_no_effect(tmp_path):
    recorder = Recorder(3, lambda trainer: os.kill(os.getpid(), signal.SIGTERM))
    trainer = make(tmp_path, listeners=[recorder])
    assert trainer.train().finished and (tmp_path / "done").exists()
    assert [r.finished for r in recorder.reports] == [False, False, True]
    assert trainer.interrupted_by is None  # the budget is spent: nothing was interrupted


def test_a_second_interrupt_exits_at_once(tmp_path):
    def twice(trainer):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)  # a shell's background jobs ignore it
    recorder = Recorder(1, twice)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, listeners=[recorder]).train()
    assert recorder.closed == 1 and signal.getsignal(signal.SIGINT) == before


def test_it_trains_outside_the_main_thread_too(tmp_path):
    reports = []
    thread = threading.Thread(target=lambda: reports.append(make(tmp_path).train()))
    thread.start()
    thread.join()
    assert reports[0].finished


# The beginning and the end of a run.


class Broken(Recorder):
    """Raises when it starts, or when it closes."""

    def __init__(self, at):
        super().__init__()
        self._at = at

    def start(self, trainer):
        if self._at == "start":
            raise ZeroDivisionError("start")

    def close(self):
        super().close()
        if self._at == "close":
            raise ZeroDivisionError("close")


def test_all_parts_are_closed_when_a_listener_raises(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(SyncUnroller, "close", lambda self: closed.append("unroller"))
    monkeypatch.setattr(EpochBatches, "close", lambda self: closed.append("batches"))
    broken, recorder = Broken("close"), Recorder()
    with pytest.raises(CodeError, match="^Broken.close raised ZeroDivisionError: close"):
        make(tmp_path, listeners=[broken, recorder]).train()
    assert closed == ["unroller", "batches"] and broken.closed == recorder.closed == 1
    assert (tmp_path / "done").exists()
    make(tmp_path, num_iterations=4).train()  # the directory is free


def test_what_was_not_started_is_not_closed(tmp_path):
    listeners = [Recorder(), Broken("start"), Recorder()]
    trainer = make(tmp_path, listeners=listeners)
    trainer.close()
    assert [listener.closed for listener in listeners] == [0, 0, 0]
    with pytest.raises(CodeError, match="^Broken.start raised ZeroDivisionError: start"):
        make(tmp_path, listeners=listeners).train()
    assert [listener.closed for listener in listeners] == [1, 0, 0]


def test_lines_of_stderr_are_also_in_the_log(tmp_path, capsys):
    class Warns(Listener):
        def after_iteration(self, trainer, report):
            logging.warning("absl %d", report.iterations)
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.warn("python's", stacklevel=1)

    root_dir = tmp_path / "run"
    trainer = make(root_dir, num_iterations=1, listeners=[Warns()])
    trainer.log("before the start")
    assert not root_dir.exists()
    trainer.train()
    trainer.log("after the end")
    logging.warning("of no run")
    lines = [line[20:] for line in (root_dir / "log.txt").read_text().splitlines()]
    said = [line.rpartition(": ")[2] for line in lines if "PPO on CartPole" not in line and "An unroll" not in line]
    assert said == ["before the start", "absl 1", "python's", "after the end"]
    assert "before the start" in capsys.readouterr().err
    Fragile.count = 1000
    with pytest.raises(CodeError) as caught:
        make(tmp_path / "failing", Fragile).train()
    log = (tmp_path / "failing" / "log.txt").read_text()
    assert log.endswith(f"CodeError: {caught.value}\n") and 'raise ZeroDivisionError("the physics exploded")' in log


# Runs that were there before.


def saving(**options):
    return [CheckpointSaver(0, **options), Summaries()]


def test_a_finished_run_is_marked_and_not_repeated(tmp_path):
    trainer = make(tmp_path, listeners=saving())
    trainer.train()
    done = json.loads((tmp_path / "done").read_text())
    steps = trainer.clock.env_steps
    assert done == {"env_steps": steps, "iterations": 3, "updates": 12, "checkpoint": steps}
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again = make(tmp_path, listeners=[*saving(), recorder := Recorder()])
    assert again.train() is None
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert recorder.reports == [] and torch.equal(weights(again), weights(trainer))


def test_a_finished_run_whose_checkpoints_are_missing_is_not_trained_again(tmp_path):
    make(tmp_path, listeners=saving()).train()
    shutil.rmtree(tmp_path / "checkpoints")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "log.txt"}
    with pytest.raises(
        UsageError, match=("is finished, but its checkpoints are missing; restore .*checkpoints from a copy")
    ):
        make(tmp_path, listeners=saving()).train()
    assert {path: path.read_bytes() for path in before} == before
    (tmp_path / "done").unlink()
    assert make(tmp_path, listeners=saving()).train().finished


def test_a_trainer_that_refuses_its_settings_closes_its_environment(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(VectorEnvironment, "close", lambda self: closed.append(self))
    with pytest.raises(UsageError, match="Trainer.batches made an object"):
        make(tmp_path, batches=lambda: object())
    assert len(closed) == 1


def test_a_larger_budget_extends_a_finished_run(tmp_path, capsys):
    make(tmp_path, listeners=saving()).train()
    trainer = make(tmp_path, num_iterations=5, listeners=[*saving(), recorder := Recorder()])
    report = trainer.train()
    assert [r.iterations for r in recorder.reports] == [4, 5] and report.updates == 20
    assert json.loads((tmp_path / "done").read_text())["iterations"] == 5
    assert "Resuming from" in capsys.readouterr().err and "Resuming from" in (tmp_path / "log.txt").read_text()


def test_an_unfinished_run_is_not_marked_done(tmp_path):
    make(tmp_path, listeners=saving()).train()
    marked = []
    recorder = Recorder(4, lambda trainer: marked.append((tmp_path / "done").exists()))
    make(tmp_path, num_iterations=5, listeners=[*saving(), recorder]).train()
    assert marked == [False]


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_without_a_checkpoint_leaves_no_rows(tmp_path):
    def die(trainer):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, summary_period=1, listeners=[Summaries(), Recorder(2, die)]).train()
    assert len(rows_of(tmp_path / "metrics.csv")) == 2
    make(tmp_path, summary_period=1, listeners=[Summaries()]).train()
    assert [row["iterations"] for row in rows_of(tmp_path / "metrics.csv")] == ["1", "2", "3"]


def test_schedules_and_the_learning_rate_continue_after_a_resume(tmp_path):
    def options():
        learner = functools.partial(Learner, learning_rate=Linear(1e-3))
        return {"num_iterations": 8, "learner": learner, "summary_period": 1}

    whole = make(tmp_path / "whole", listeners=saving(), **options())
    whole.train()
    stop = Recorder(3, lambda trainer: os.kill(os.getpid(), signal.SIGTERM))
    make(tmp_path / "cut", listeners=[*saving(), stop], **options()).train()
    cut = make(tmp_path / "cut", listeners=[*saving(), Recorder()], **options())
    cut.train()
    rates = [[float(row["train/learning_rate"]) for row in rows_of(tmp_path / name / "metrics.csv")]
             for name in ("whole", "cut")]  # fmt: skip
    assert rates[0] == rates[1] == pytest.approx([1e-3 * (1 - i / 8) for i in range(8)])
    assert cut.algorithm.progress == whole.algorithm.progress == 7 / 8


def test_metric_windows_and_counters_continue_after_a_resume(tmp_path):
    options = {"num_iterations": 8, "env_id": OneState, "env_kwargs": {"length": 3}, "unroll_length": 8}
    stop = Recorder(4, lambda trainer: os.kill(os.getpid(), signal.SIGTERM))
    first = make(tmp_path, listeners=[*saving(), stop], **options)
    first.train()
    before = first.metrics.results()
    second = make(tmp_path, listeners=[*saving(), Recorder()], **options)
    second.start()
    assert second.metrics.results() == before
    assert (second.clock.env_steps, second.clock.iterations, second.clock.updates) == (first.clock.env_steps, 4, 16)
    assert second.clock.wall_seconds == pytest.approx(first.clock.wall_seconds)
    second.close()


# Reproducibility.


def test_equal_seeds_give_equal_bits_and_other_seeds_do_not(tmp_path):
    def run(name, seed):
        torch.manual_seed(len(name))  # whatever was drawn before
        trainer = make(tmp_path / name, seed=seed, transforms=[ObservationNormalizer, RewardNormalizer])
        report = trainer.train()
        return weights(trainer), report.env_steps

    one, other, third = run("one", 1), run("other", 1), run("third", 2)
    assert torch.equal(one[0], other[0]) and one[1] == other[1]
    assert not torch.equal(one[0], third[0])


def test_a_training_before_does_not_disturb_the_next(tmp_path):
    alone = make(tmp_path / "alone", seed=4)
    alone.train()
    make(tmp_path / "before", "Pendulum-v1", seed=9, transforms=[ObservationNormalizer]).train()
    after = make(tmp_path / "after", seed=4)
    after.train()
    assert torch.equal(weights(alone), weights(after))


def test_listeners_do_not_change_what_is_learned(tmp_path):
    bare = make(tmp_path / "bare", summary_period=1)
    bare.train()
    listeners = [Evaluate(8, num_episodes=2), CheckpointSaver(8), Summaries(), Progress()]
    watched = make(tmp_path / "watched", summary_period=1, listeners=listeners)
    watched.train()
    assert torch.equal(weights(bare), weights(watched))


# Failing.


class Fragile(OneState):
    """Raises in its 20th step."""

    count = 0

    def step(self, action):
        Fragile.count += 1
        if Fragile.count > 30:
            raise ZeroDivisionError("the physics exploded")
        return super().step(action)


def test_an_environment_error_ends_the_run_with_a_checkpoint(tmp_path, capsys):
    Fragile.count = 0
    recorder = Recorder()
    trainer = make(tmp_path, Fragile, num_envs=1, num_iterations=50, listeners=[CheckpointSaver(0), recorder])
    with pytest.raises(CodeError, match="^Fragile.step raised ZeroDivisionError: the physics exploded"):
        trainer.train()
    last = recorder.reports[-1]
    assert not last.finished and recorder.closed == 1 and not (tmp_path / "done").exists()
    assert Checkpoints(tmp_path / "checkpoints").steps() == [last.env_steps]
    assert f"After the error, a checkpoint was saved at {last.env_steps} steps" in capsys.readouterr().err
    Fragile.count = -1000
    again = make(tmp_path, Fragile, num_envs=1, num_iterations=last.iterations + 2, listeners=[CheckpointSaver(0)])
    assert again.train().iterations == last.iterations + 2


def test_an_error_before_the_first_iteration_saves_nothing(tmp_path):
    Fragile.count = 1000
    with pytest.raises(CodeError, match="^Fragile.step raised"):
        make(tmp_path, Fragile, listeners=[CheckpointSaver(0)]).train()
    assert Checkpoints(tmp_path / "checkpoints").steps() == []


def test_a_broken_update_is_not_saved(tmp_path):
    class Breaks(PPO):
        def after_update(self):
            if self.progress > 0:
                raise ZeroDivisionError

    with pytest.raises(CodeError, match="^Breaks.after_update raised ZeroDivisionError"):
        make(tmp_path, algorithm=functools.partial(Breaks, network=network), listeners=[CheckpointSaver(0)]).train()
    assert Checkpoints(tmp_path / "checkpoints").steps() == []


class Spoiled(OneState):
    def step(self, action):
        observation, reward, *rest = super().step(action)
        Fragile.count += 1
        return observation, np.nan if Fragile.count > 30 else reward, *rest


def test_a_non_finite_reward_ends_the_run_before_training_on_it(tmp_path):
    Fragile.count = 0
    trainer = make(tmp_path, Spoiled, num_envs=1, num_iterations=50, listeners=[CheckpointSaver(0)])
    with pytest.raises(RunError, match="environment 0 returned a reward that is not finite"):
        trainer.train()
    assert torch.isfinite(weights(trainer)).all()
    assert len(Checkpoints(tmp_path / "checkpoints").steps()) == 1


def test_settings_that_do_not_fit_are_refused_before_any_step(tmp_path):
    with pytest.raises(
        UsageError, match=r"minibatch_size is 7, which does not divide the 16 rows .* are 8 and 4|4 and 8"
    ):
        make(tmp_path, batches=functools.partial(EpochBatches, minibatch_size=7))
    with pytest.raises(
        UsageError, match="Trainer.unroll_length is 0, which only AsyncUnroller supports; it must be positive"
    ):
        make(tmp_path, unroll_length=0)
    with pytest.raises(UsageError, match="unroll_length is 1.5; on-policy it must be an integer of at least 1"):
        make(tmp_path, unroll_length=1.5)

    class OffPolicy(PPO):
        on_policy = False

    with pytest.raises(UsageError, match="OffPolicy is off-policy, but Trainer.batches is EpochBatches"):
        make(tmp_path, algorithm=OffPolicy)


def test_a_run_takes_subnormal_numbers_as_zero(tmp_path):
    with process_settings.subnormals_preserved():
        torch.set_flush_denormal(False)
        make(tmp_path).close()
        assert process_settings.subnormals_are_flushed()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(tmp_path):
    with pytest.raises(UsageError, match="torch finds no GPU here; set it to 'cpu'"):
        make(tmp_path, device="cuda")
    assert make(tmp_path, device="auto").device.type == "cpu"


# What listeners do.


class FakeEvaluation(Listener):
    def __init__(self, returns):
        self._returns = returns

    def after_iteration(self, trainer, report):
        value = self._returns[report.iterations - 1]
        report.evaluation = None if value is None else Evaluation(report.env_steps, 0, (value,), (1,))


def test_the_best_and_the_last_checkpoints_are_kept(tmp_path):
    returns = [1.0, 7.0, None, 2.0, 7.0, 3.0, 4.0, 5.0]
    listeners = [FakeEvaluation(returns), CheckpointSaver(1, keep_last=2), recorder := Recorder()]
    make(tmp_path, num_iterations=8, listeners=listeners).train()
    steps = [report.env_steps for report in recorder.reports]
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.steps() == [steps[4], steps[6], steps[7]]
    assert checkpoints.load("best")[0] == steps[4]  # of equals, the newest
    assert checkpoints.load()[1]["counters"]["iterations"] == 8


def test_the_best_so_far_is_remembered_over_a_resume(tmp_path):
    def run(returns, iterations):
        listeners = [FakeEvaluation(returns), CheckpointSaver(1, keep_last=1)]
        make(tmp_path, num_iterations=iterations, listeners=listeners).train()

    run([1.0, 9.0, 2.0], 3)
    best = Checkpoints(tmp_path / "checkpoints").load("best")[0]
    run([None] * 3 + [5.0, 6.0], 5)
    assert Checkpoints(tmp_path / "checkpoints").load("best")[0] == best


def test_checkpoints_are_saved_each_period_and_at_the_end(tmp_path):
    saved = []
    recorder = Recorder()
    trainer = make(tmp_path, OneState, {"length": 100}, num_iterations=7, listeners=[CheckpointSaver(40), recorder])
    save = trainer.save
    trainer.save = lambda **options: (saved.append(trainer.clock.env_steps), save(**options))[1]
    trainer.train()
    assert [r.env_steps for r in recorder.reports] == [16, 32, 48, 64, 80, 96, 112]
    assert saved == [48, 80, 112]


class Slow(Listener):
    """Makes each iteration as long as it says, in minutes."""

    def __init__(self, minutes):
        self._minutes = minutes

    def after_iteration(self, trainer, report):
        trainer.clock.wall_seconds += 60 * self._minutes[report.iterations - 1]
        report.wall_seconds = trainer.clock.wall_seconds


@pytest.mark.parametrize(
    ("minutes", "options", "expected"),
    [
        ([4] * 7, {}, [48, 96, 112]),
        ([4] * 7, {"period": 64}, [48, 64, 112]),
        ([25] * 4, {}, [16, 32, 48, 64]),  # iterations that are longer than the period
        ([4] * 7, {"period_minutes": 20.0}, [80, 112]),
        ([25] * 4, {"period_minutes": None}, [64]),
        ([25] * 4, {"period": 0}, [64]),
        ([1] * 9, {}, [144]),  # short runs are as they were
    ],
)
def test_checkpoints_can_follow_minutes(tmp_path, minutes, options, expected):
    saved = []
    listeners = [Slow(minutes), CheckpointSaver(**options)]
    trainer = make(tmp_path, OneState, {"length": 100}, num_iterations=len(minutes), listeners=listeners)
    save = trainer.save
    trainer.save = lambda **given: (saved.append((trainer.clock.env_steps, given["rows"])), save(**given))[1]
    trainer.train()
    assert saved == [(steps, True) for steps in expected]
    kept = [int(path.stem.rpartition("-")[2]) for path in sorted((tmp_path / "checkpoints").glob("checkpoint-*.pt"))]
    assert kept == expected[-3:]


def test_the_minutes_before_a_resume_do_not_count_again(tmp_path, monkeypatch):
    saved = []

    def note(trainer, save, **options):
        saved.append(trainer.clock.iterations)
        return save(**options)

    for num_iterations in (2, 4):
        listeners = [Slow([9] * 4), CheckpointSaver()]
        trainer = make(tmp_path, OneState, {"length": 100}, num_iterations=num_iterations, listeners=listeners)
        monkeypatch.setattr(trainer, "save", functools.partial(note, trainer, trainer.save))
        trainer.train()
    assert saved == [2, 4]


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_checkpoints_change_no_bits_of_training(tmp_path, algorithm):
    found = []
    for name, listeners in (("none", []), ("each", [CheckpointSaver(1)])):
        if algorithm == "ppo":
            trainer = make(tmp_path / name, num_iterations=5, listeners=listeners)
        else:
            batches = functools.partial(
                ReplayBatches, capacity=500, batch_size=8, warmup_env_steps=20, updates_per_env_step=0.5
            )
            mlp, critic = functools.partial(MLP, layers=(8,)), functools.partial(CriticEnsemble, layers=(8,))
            sac = functools.partial(SAC, actor_mlp=mlp, critic=critic)
            options = {"batches": batches, "unroll_length": 4, "algorithm": sac, "num_iterations": 12}
            trainer = make(tmp_path / name, "Pendulum-v1", listeners=listeners, **options)
        trainer.train()
        found.append([*trainer.algorithm.parameters(), *trainer.algorithm.buffers(), torch.rand(2)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_evaluations_run_each_period_and_at_the_end(tmp_path):
    recorder = Recorder()
    options = {"num_iterations": 7, "summary_period": 10**9}
    listeners = [Evaluate(40, 3, 2, seed=5), recorder, Summaries()]
    trainer = make(tmp_path, OneState, {"length": 9}, listeners=listeners, **options)
    trainer.train()
    evaluated = [r.env_steps for r in recorder.reports if r.evaluation]
    assert evaluated == sorted(set(evaluated)) and len(evaluated) == 3
    assert evaluated[-1] == trainer.clock.env_steps and 40 < evaluated[0] < 80 < evaluated[1]
    nominal = [40, 80, trainer.clock.env_steps]  # at which evaluations of all seeds stand
    assert sorted(path.name for path in (tmp_path / "eval").iterdir()) == [
        f"evaluation-{steps:012d}.csv" for steps in nominal
    ]
    for path in (tmp_path / "eval").iterdir():
        assert path.read_text() == "episode,seed,return,length\n0,5,9.0,9\n1,6,9.0,9\n2,7,9.0,9\n"
    [report] = [r for r in recorder.reports if r.env_steps == evaluated[0]]
    assert report.scalars["evaluation/mean_return"] == 9 and report.scalars["evaluation/mean_length"] == 9
    rows = [row for row in rows_of(tmp_path / "metrics.csv") if row["evaluation/mean_return"]]
    assert [int(row["steps"]) for row in rows] == nominal and [int(row["env_steps"]) for row in rows] == evaluated
    assert "Evaluation at 40 steps: return 9 [9, 9] over 3 episodes" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("evaluation", [None, "alfish/CartPole-v1"])
def test_an_environment_may_be_an_id(tmp_path, evaluation):
    trainer = Trainer(
        tmp_path,
        algorithm=PPO,
        environment="CartPole-v1",
        evaluation_environment=evaluation,
        num_iterations=1,
        unroll_length=16,
        listeners=[Evaluate(0, 1)],
    )
    assert trainer.train().evaluation is not None and trainer.environment.env_spec.id == "CartPole-v1"


def test_a_function_that_makes_a_single_environment_is_refused_with_the_remedy(tmp_path):
    words = "Trainer.environment made an OneState; it must be .*; give functools.partial.make_environment, make_env"
    with pytest.raises(UsageError, match=words):
        Trainer(tmp_path, algorithm=PPO, environment=lambda **_: OneState(), num_iterations=1)


def test_the_last_evaluation_stands_at_a_budget_of_steps(tmp_path):
    trainer = make(tmp_path, num_env_steps=75, listeners=[Evaluate(30, 1), Summaries()], summary_period=25)
    trainer.train()
    assert trainer.clock.value > 75
    assert sorted(int(path.stem.removeprefix("evaluation-")) for path in (tmp_path / "eval").iterdir()) == [30, 60, 75]
    rows = rows_of(tmp_path / "metrics.csv")
    steps = [int(row["steps"]) for row in rows]
    assert steps == sorted(set(steps)) and {30, 60, 75} < set(steps)
    assert all(bool(row["evaluation/mean_return"]) == (int(row["steps"]) in (30, 60, 75)) for row in rows)


def test_the_first_line_of_a_log_names_algorithm_environment_and_budget(tmp_path):
    trainer = make(tmp_path, num_env_steps=10_000, num_envs=3)
    trainer.start()
    trainer.close()
    count = sum(parameter.numel() for parameter in trainer.algorithm.parameters())
    line = f"PPO on CartPole-v1: 3 environments in one loop, {count} parameters on cpu, Trainer.num_env_steps = 10,000"
    assert (tmp_path / "log.txt").read_text().splitlines()[0].endswith(f" {line}")


def test_a_period_of_0_evaluates_and_saves_at_the_end_only(tmp_path):
    recorder = Recorder()
    make(tmp_path, listeners=[Evaluate(0, 2), CheckpointSaver(0), recorder]).train()
    assert [bool(r.evaluation) for r in recorder.reports] == [False, False, True]
    assert len(Checkpoints(tmp_path / "checkpoints").steps()) == 1


def test_evaluation_may_have_an_environment_of_its_own(tmp_path):
    for elsewhere, length in ((None, 9), (functools.partial(make_environment, OneState, env_kwargs={"length": 5}), 5)):
        trainer = make(tmp_path, OneState, {"length": 9}, evaluation_environment=elsewhere)
        evaluator = trainer.evaluator(2)
        assert evaluator.evaluate(2).lengths == (length, length)
        evaluator.close()
        trainer.close()


def test_each_evaluation_may_have_environments_of_its_own(tmp_path):
    long = functools.partial(make_environment, OneState, env_kwargs={"length": 7})
    listeners = [Evaluate(0, 2), Evaluate(0, 3, name="long", environment=long)]
    make(tmp_path, OneState, {"length": 4}, listeners=listeners).train()
    lengths = {name: lengths_of(tmp_path, name) for name in ("evaluation", "long")}
    assert lengths == {"evaluation": [4, 4], "long": [7, 7, 7]}


def lengths_of(directory, name):
    (path,) = (directory / "eval").glob(f"{name}-*.csv")
    return [int(row["length"]) for row in rows_of(path)]


@pytest.mark.parametrize("name", ["observation_spec", "action_spec", "reward_spec"])
def test_an_environment_of_other_spaces_cannot_evaluate(tmp_path, monkeypatch, name):
    closed = []

    def elsewhere(**options):
        environment = make_environment(OneState, **options)
        setattr(environment, name, spaces.Box(0, 7, (5,)))
        monkeypatch.setattr(environment, "close", lambda: closed.append(environment))
        return environment

    trainer = make(tmp_path, OneState, evaluation_environment=elsewhere)
    with pytest.raises(UsageError, match=rf"Evaluate.environment\) have the {name} Box\(0.0, 7.0, \(5,\).*on "):
        trainer.evaluator(2)
    assert len(closed) == 1
    trainer.close()


def test_evaluation_never_touches_the_training_environment(tmp_path):
    built = []

    class Counted(OneState):
        def __init__(self):
            super().__init__()
            self.steps = self.resets = self.closed = 0
            built.append(self)

        def reset(self, **options):
            self.resets += 1
            return super().reset(**options)

        def step(self, action):
            self.steps += 1
            return super().step(action)

        def close(self):
            self.closed += 1

    trainer = make(tmp_path, Counted, num_envs=2)
    trainer.unroller.unroll(3)
    training = list(built)
    before = [(env.steps, env.resets, env.closed) for env in training]
    evaluator = trainer.evaluator(5, 3)
    evaluator.evaluate(5)
    evaluator.close()
    assert [(env.steps, env.resets, env.closed) for env in training] == before
    assert len(built) == 2 + 3 and all(env.closed == 1 for env in built[2:])
    trainer.close()


TAGS = {
    "train/loss", "train/grad_norm", "train/learning_rate", "train/nonfinite_updates", "train/policy_loss",
    "train/value_loss", "train/entropy", "train/kl", "train/clip_fraction",
    "metrics/episodes", "metrics/environment_steps", "metrics/average_return", "metrics/average_return/n",
    "metrics/average_episode_length", "metrics/average_reward", "metrics/average_discounted_return",
    "metrics/start_discounted_return", "time/unroll_ms", "time/train_ms", "time/env_steps_per_second",
    "evaluation/mean_return", "evaluation/std_return", "evaluation/min_return", "evaluation/max_return",
    "evaluation/mean_length", "counters/iterations", "counters/updates", "counters/wall_seconds",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's own reader
def test_every_promised_summary_is_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    listeners = [Evaluate(1, 2), CheckpointSaver(0), Summaries()]
    trainer = make(tmp_path, OneState, {"length": 5}, summary_period=1, listeners=listeners)
    trainer.directory.config = {"config.gin": "Trainer.seed = 0"}
    trainer.train()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= TAGS
    assert [event.step for event in events.Scalars("train/loss")] == [14, 28, 40]
    assert events.Scalars("metrics/average_return")[-1].value == 5
    assert any("config.gin" in tag for tag in events.Tags()["tensors"])
    assert (tmp_path / "config.gin").read_text() == "Trainer.seed = 0"
    header = set(rows_of(tmp_path / "metrics.csv")[0])
    assert {tag for tag in TAGS if not tag.startswith("counters/")} <= header
    assert {"env_steps", "iterations", "updates", "wall_seconds"} <= header


def test_every_default_metric_shows_up_in_metrics_csv(tmp_path):
    make(tmp_path, OneState, {"length": 2}, listeners=[Summaries()]).train()
    row = rows_of(tmp_path / "metrics.csv")[-1]
    for metric in DEFAULT_METRICS:
        assert np.isfinite(float(row[f"metrics/{metric().name}"]))


def test_summaries_come_at_their_period_and_at_the_end(tmp_path):
    recorder = Recorder()
    make(tmp_path, OneState, {"length": 100}, num_iterations=7, summary_period=40, listeners=[recorder]).train()
    assert [r.env_steps for r in recorder.reports if r.scalars] == [48, 80, 112]
    make(tmp_path, OneState, {"length": 100}, num_iterations=2, summary_period=10**6, listeners=[recorder]).train()
    assert recorder.reports[-1].scalars


@pytest.mark.parametrize("budget", [{"num_iterations": 1}, {"num_iterations": None, "num_env_steps": 10},
                                    {"num_iterations": None, "num_updates": 1}])  # fmt: skip
def test_a_run_without_summaries_reports_losses_at_its_end(tmp_path, budget):
    found = []
    for period in (1, 10**6):
        trainer = make(tmp_path / str(period), summary_period=period, listeners=[recorder := Recorder()], **budget)
        trainer.train()
        (report,) = recorder.reports
        found.append({name: report.scalars.get(name) for name in ("train/loss", "train/grad_norm")})
    assert found[0] == found[1] and None not in found[0].values()


def test_the_default_listeners_make_a_whole_run_directory(tmp_path):
    make(tmp_path, OneState, listeners=None).train()
    names = {path.name for path in tmp_path.iterdir()}
    records = {"config.gin", "metrics.csv", "log.txt", "provenance.json", "run_id", "done"}
    assert names == records | {"checkpoints", "tensorboard", "eval"}
    [provenance] = json.loads((tmp_path / "provenance.json").read_text())
    assert provenance["versions"]["torch"] == metadata.version("torch")
    assert provenance["num_threads"] == kernels.num_threads()
    assert provenance["seed"] == 0 and provenance["device"] == "cpu"


def test_a_policy_can_be_taken_out_and_loaded_back(tmp_path):
    trainer = make(tmp_path, "Pendulum-v1", listeners=[CheckpointSaver(0)], transforms=[ObservationNormalizer])
    trainer.train()
    observation = np.ones(3, np.float32)
    expected = trainer.policy().act(observation)
    fresh = make(tmp_path, "Pendulum-v1", transforms=[ObservationNormalizer], seed=3)
    assert fresh.load_policy() == trainer.clock.env_steps == fresh.policy().env_steps
    assert fresh.policy().act(observation) == expected


@pytest.mark.parametrize("kind", ["discrete", "box", "multi_discrete", "multi_binary"])
def test_every_kind_of_action_trains(tmp_path, kind):
    trainer = make(tmp_path, Bandit, {"action": kind}, num_iterations=2)
    before = weights(trainer)
    trainer.train()
    assert not torch.equal(before, weights(trainer)) and torch.isfinite(weights(trainer)).all()


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_tensor_environments_train_with_every_listener(tmp_path, mode):
    kwargs = {"length": 5, "autoreset": mode}
    listeners = [Evaluate(16, 4), CheckpointSaver(16), Summaries()]
    make(tmp_path, TensorPointMass, kwargs, num_envs=4, listeners=listeners).train()
    row = rows_of(tmp_path / "metrics.csv")[-1]
    assert float(row["evaluation/mean_length"]) == float(row["metrics/average_episode_length"]) == 5


def test_statistics_see_every_row_once(tmp_path):
    trainer = make(tmp_path, "Pendulum-v1", transforms=[ObservationNormalizer])
    trainer.train()
    [count] = [value for name, value in trainer.transforms.state_dict().items() if name.endswith("count")]
    assert count in (3 * 8 * 2, 3 * 8 * 2 + 2)  # unrolls overlap by a row; the run's very first one may count or not


def test_statistics_change_once_an_iteration_after_it_was_trained_on(tmp_path):
    """So the first minibatch's ratio is exactly 1: rollout and training see the same numbers."""
    ratios = []

    class Watching(PPO):
        def calc_loss(self, experience, info):
            log_prob = info.policy.log_prob(experience.action)
            ratios.append((log_prob - experience.info.log_prob).exp().detach())
            return super().calc_loss(experience, info)

    make(
        tmp_path,
        "Pendulum-v1",
        algorithm=functools.partial(Watching, network=network),
        batches=functools.partial(EpochBatches, num_epochs=2),
        transforms=[ObservationNormalizer, RewardNormalizer],
    ).train()
    for first, second in zip(ratios[::2], ratios[1::2], strict=True):
        torch.testing.assert_close(first, torch.ones_like(first), rtol=0, atol=1e-5)
        assert (second - 1).abs().max() > 1e-4


def test_the_trainer_seeds_everything(tmp_path):
    make(tmp_path, seed=3)
    drawn = random.random(), np.random.rand(), torch.rand(()).item()
    make(tmp_path, seed=3)
    assert drawn == (random.random(), np.random.rand(), torch.rand(()).item())


# Acting and training.


class Watched(torch.nn.Sequential):
    """An MLP that says in which mode it ran."""

    def __init__(self, input_size):
        super().__init__(torch.nn.Linear(input_size, 4), torch.nn.Dropout(0.0))
        self.output_size, self.seen = 4, set()

    def forward(self, x):
        self.seen.add((torch.is_grad_enabled(), *(module.training for module in self.modules())))
        return super().forward(x)


class Frozen(Watched):
    """Stays in evaluation, whatever it is told, as frozen encoders do."""

    def train(self, mode=True):
        return super().train(False)


@pytest.mark.parametrize("kind", [Watched, Frozen])
def test_modules_are_in_training_mode_only_during_training(tmp_path, kind):
    watched_torso = functools.partial(Torso, mlp=kind)
    watched = functools.partial(ActorCritic, actor_torso=watched_torso, critic_torso=watched_torso)
    trainer = make(tmp_path, algorithm=functools.partial(PPO, network=watched), unroller=through_torch)
    trainer.train()
    modes = [module for module in trainer.algorithm.modules() if isinstance(module, Watched)]
    assert len(modes) == 2
    trains = kind is Watched
    for module in modes:
        module.seen -= {(False, trains, trains, trains)}  # values for the advantages
        assert module.seen <= {(False, False, False, False), (True, trains, trains, trains)}
    assert (False, False, False, False) in modes[0].seen or not trains
    assert all((True, trains, trains, trains) in module.seen for module in modes)
    assert trainer.algorithm.training and modes[0][1].training == trains


def test_modes_are_switched_everywhere():
    algorithm = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.Dropout(0.5)))
    modes = ModeSwitch(algorithm)
    for training in (False, True, True, False):
        modes.switch(training)
        assert [module.training for module in algorithm.modules()] == [training] * 4
    algorithm.append(Frozen(1))
    modes = ModeSwitch(algorithm)
    for training in (True, False):
        modes.switch(training)
        assert [module.training for module in algorithm.modules()] == [training] * 4 + [False] * 3


@pytest.mark.parametrize(
    ("algorithm", "updates"),
    [(A2C, 1), (functools.partial(APPO, loss="impala"), 1), (functools.partial(APPO, loss="clipped"), 10), (PPO, 10)],
)
def test_unrolls_train_once_without_ratio_correction(tmp_path, algorithm, updates):
    made = functools.partial(algorithm, network=network)
    trainer = make(tmp_path, algorithm=made, batches=EpochBatches, num_iterations=1)
    assert trainer.batches.updates_per_iteration == updates
    trainer.train()
    assert trainer.clock.updates == updates


class RatioOfOnesOwn(A2C):
    unroll_use = UnrollUse(single_epoch=False)


@pytest.mark.parametrize(
    ("algorithm", "name"), [(A2C, "A2C"), (functools.partial(APPO, loss="impala"), "APPO"), (RatioOfOnesOwn, None)]
)
def test_more_epochs_are_refused_where_no_ratio_corrects_for_them(tmp_path, algorithm, name):
    algorithm, batches = functools.partial(algorithm, network=network), functools.partial(EpochBatches, num_epochs=4)
    if name is None:
        make(tmp_path, algorithm=algorithm, batches=batches, num_iterations=1).close()
        return
    with pytest.raises(UsageError) as error:
        make(tmp_path, algorithm=algorithm, batches=batches, num_iterations=1)
    assert str(error.value).splitlines()[0] == (  # gin adds where
        f"EpochBatches.num_epochs is 4, but {name} can train on an unroll only once: no ratio in its loss "
        "corrects for earlier updates; set num_epochs to 1, or train with PPO (your own algorithm with such a "
        "ratio, or without a "
        "policy gradient, sets unroll_use = UnrollUse(single_epoch=False))"
    )


class Starts(OneState):
    """Notes with which random numbers its episodes begin, and raises once."""

    starts: ClassVar[list] = []
    raises_at: ClassVar[int | None] = None
    count: ClassVar[int] = 0

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed)
        self.starts.append(self.np_random.random())
        return result

    def step(self, action):
        Starts.count += 1
        if Starts.count == Starts.raises_at:
            raise ValueError("broken")
        return super().step(action)


def test_a_run_resumed_after_an_error_has_new_episodes(tmp_path):
    Starts.starts, Starts.count, Starts.raises_at = [], 0, 100
    with pytest.raises(CodeError, match="^Starts.step raised ValueError: broken"):
        make(tmp_path, Starts, num_envs=1, num_iterations=30).train()
    before = list(Starts.starts)
    Starts.starts, Starts.raises_at = [], None
    make(tmp_path, Starts, num_envs=1, num_iterations=30).train()
    # The first reset of all is that of a new environment; what is trained on comes after it.
    assert len(before) > 5 and not set(before[1:]) & set(Starts.starts[1:])


def test_listeners_of_one_class_keep_their_own_state_and_files(tmp_path):
    def listeners():
        return [Evaluate(period, num_episodes=1, name=name) for period, name in ((24, "often"), (40, "seldom"))]

    options = {"num_envs": 1, "env_id": OneState}
    cut = make(tmp_path, listeners=[*listeners(), CheckpointSaver(0)], num_iterations=4, **options)
    cut.train()
    resumed = make(tmp_path, listeners=[*listeners(), CheckpointSaver(0)], num_iterations=9, **options)
    resumed.start()
    assert [listener._next for listener in resumed.listeners[:2]] == [listener._next for listener in cut.listeners[:2]]
    assert resumed.listeners[0]._next != resumed.listeners[1]._next
    resumed.train()
    names = {path.name.partition("-")[0] for path in (tmp_path / "eval").iterdir()}
    assert names == {"often", "seldom"}
    with pytest.raises(UsageError, match=r"2 Evaluate listeners are called 'evaluation'.*Evaluate\.name"):
        make(tmp_path / "other", listeners=[Evaluate(), Evaluate()]).train()


def test_an_evaluation_that_is_not_finite_is_never_the_best(tmp_path):
    means = [math.nan, 1.0, math.inf, 5.0]
    trainer = make(tmp_path, listeners=[FakeEvaluation(means), CheckpointSaver(0)], num_iterations=4)
    trainer.train()
    assert trainer.directory.checkpoints.load("best")[1]["counters"]["iterations"] == 4
    trainer = make(tmp_path / "other", listeners=[FakeEvaluation(means[:3]), CheckpointSaver(0)], num_iterations=3)
    trainer.train()
    assert trainer.directory.checkpoints.load("best")[1]["counters"]["iterations"] == 2


def test_only_one_run_trains_in_a_directory(tmp_path):
    first = make(tmp_path)
    first.start()
    with pytest.raises(UsageError, match="is already used for training"):
        make(tmp_path).train()
    first.close()
    make(tmp_path).train()


def test_a_run_from_the_command_line_that_saves_nothing_reports_it(tmp_path, capsys):
    for k, listeners in enumerate(([], [CheckpointSaver(0)])):
        trainer = make(tmp_path / str(k), listeners=listeners)
        trainer.directory.config = {"config.gin": ""}
        trainer.train()
        assert ("Nothing of this run will be saved" in capsys.readouterr().err) == (k == 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"summary_period": 0}, "Trainer.summary_period is 0; it must be an integer of at least 1"),
        ({"seed": -1}, "Trainer.seed is -1; it must be an integer in .0, 9223372036854775807"),
        ({"seed": 1.5}, "Trainer.seed is 1.5"),
        ({"num_threads": 0}, "Trainer.num_threads is 0"),
        ({"algorithm": functools.partial(PPO, gamma=2.0)}, r"PPO.gamma is 2.0; it must be a number in \[0, 1\]"),
        ({"algorithm": functools.partial(PPO, lambda_=1.5)}, "PPO.lambda_ is 1.5"),
        ({"learner": functools.partial(Learner, max_grad_norm=-1.0)}, "Learner.max_grad_norm is -1.0"),
        ({"learner": functools.partial(Learner, learning_rate=-1.0)}, "Learner.learning_rate is -1.0"),
        ({"learner": functools.partial(Learner, learning_rate={"all": -1.0})}, "each value a number of at least 0"),
        ({"algorithm": functools.partial(PPO, network=functools.partial(ActorCritic, actor_torso=functools.partial(
            Torso, mlp=functools.partial(MLP, layers=(0,)))))}, r"MLP.layers is \(0,\)"),
    ],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(tmp_path, options, words):
    with pytest.raises(UsageError, match=words):
        make(tmp_path, **options)


OWN_FILES = ["metrics.csv", "log.txt", "provenance.json", "run_id", "done", "config.gin"]
OWN_DIRECTORIES = ["checkpoints", "replay", "eval", "tensorboard"]


@pytest.mark.parametrize("name", OWN_FILES + OWN_DIRECTORIES)
def test_wrong_file_types_in_a_run_directory_are_named_before_training(tmp_path, name):
    others = [Path.mkdir, os.mkfifo] if name in OWN_FILES else [Path.touch, os.mkfifo]
    for make_another in others:
        make_another(tmp_path / name)
        with pytest.raises(UsageError) as caught:  # a pipe is not waited for either
            trainer = make(tmp_path)
            trainer.directory.config = {"config.gin": ""}
            trainer.train()
        words = str(caught.value)
        assert (
            words.startswith(f"{tmp_path / name}") and "\n" not in words and ("move it" in words or "remove" in words)
        )
        assert [path.name for path in tmp_path.iterdir()] == [name]
        (tmp_path / name).rmdir() if (tmp_path / name).is_dir() else (tmp_path / name).unlink()


def test_a_directory_instead_of_a_checkpoint_is_named(tmp_path):
    (tmp_path / "checkpoints" / "checkpoint-000000000016.pt").mkdir(parents=True)
    trainer = make(tmp_path, OneState, {"length": 100}, num_iterations=1, listeners=[CheckpointSaver()])
    with pytest.raises(UsageError, match="None of the 1 checkpoints .*it is not a regular file"):
        trainer.train()
    trainer = make(tmp_path / "new", OneState, {"length": 100}, num_iterations=1, listeners=[CheckpointSaver()])
    trainer.start()
    (tmp_path / "new" / "checkpoints" / "checkpoint-000000000016.pt").mkdir(parents=True)
    with pytest.raises(UsageError, match="000016.pt is a directory, but .*000016.pt must be written there; move it"):
        trainer.train()


def test_a_full_disk_does_not_hide_an_environment_error(tmp_path, monkeypatch, capsys):
    replace = os.replace

    def full(source, target):
        if str(target).endswith(".pt"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DiskError, match=f"^{tmp_path}/a/checkpoints cannot be written to: No space left on device"):
        make(tmp_path / "a", OneState, listeners=[CheckpointSaver(1)]).train()
    assert "No checkpoint was saved at" in capsys.readouterr().err
    with pytest.raises(CodeError, match="^Spoiling.after_iteration raised ValueError: spoiled"):
        make(tmp_path / "b", OneState, listeners=[Spoiling()]).train()
    assert "No checkpoint was saved at" in (tmp_path / "b" / "log.txt").read_text()


class Spoiling(Listener):
    def after_iteration(self, trainer, report):
        if report.iterations == 2:
            raise ValueError("spoiled")


def test_an_unwritable_log_is_reported_without_ending_the_run(tmp_path, monkeypatch, capsys):
    trainer = make(tmp_path)
    trainer.start()
    monkeypatch.setattr(files, "writing", lambda path: full_disk(path))
    trainer.log("a line")
    assert "a line [" in capsys.readouterr().err
    trainer.close()


@contextlib.contextmanager
def full_disk(path):
    raise DiskError(f"{path} cannot be written to")
    yield


def test_each_start_of_a_run_is_added_to_its_provenance(tmp_path):
    path = tmp_path / "provenance.json"
    for num_iterations in (1, 2, 2):  # the last has nothing left to do
        make(tmp_path, OneState, num_iterations=num_iterations, listeners=[CheckpointSaver()], seed=3).train()
    first, second = json.loads(path.read_text())
    assert first["steps"] == 0 < second["steps"] and first["seed"] == 3 and first["time"] <= second["time"]
    path.write_text(json.dumps(second))  # as older versions wrote it
    make(tmp_path, OneState, num_iterations=3, listeners=[CheckpointSaver()]).train()
    assert json.loads(path.read_text())[0] == second and len(json.loads(path.read_text())) == 2
    path.write_text("[")
    with pytest.raises(UsageError, match="provenance.json is not JSON .*move it away"):
        make(tmp_path, OneState, num_iterations=4, listeners=[CheckpointSaver()]).train()


def test_times_and_rates_are_averages_since_the_last_summary(tmp_path, monkeypatch):
    """Iterations take 1, 2, 3, ... seconds, of which all but half a second is collecting."""
    recorder = Recorder()
    options = {"env_kwargs": {"length": 1000}, "num_envs": 1, "num_iterations": 8, "summary_period": 32}
    trainer = make(tmp_path, OneState, listeners=[recorder], **options)
    clock = [0.0]
    monkeypatch.setattr("alfish.runs.timer.time.perf_counter", lambda: clock[0])
    unroll, train = trainer.unroller.unroll, trainer.learner.train

    def slow_unroll(*arguments):
        clock[0] += trainer.clock.iterations + 0.5
        return unroll(*arguments)

    def slow_train(*arguments):
        clock[0] += 0.5
        return train(*arguments)

    monkeypatch.setattr(trainer.unroller, "unroll", slow_unroll)
    monkeypatch.setattr(trainer.learner, "train", slow_train)
    trainer.train()
    first, second = [report.scalars for report in recorder.reports if "time/train_ms" in report.scalars]
    assert first["time/env_steps_per_second"] == pytest.approx(32 / (1 + 2 + 3 + 4))
    assert second["time/env_steps_per_second"] == pytest.approx(32 / (5 + 6 + 7 + 8))
    assert second["time/train_ms"] == pytest.approx(500) and second["time/unroll_ms"] == pytest.approx(6000)


class Unsavable(Listener):
    def state_dict(self):
        return {"seen": {1, 2}}


def test_unsaveable_state_is_named_after_the_first_iteration(tmp_path):
    """And not when the first checkpoint is due."""
    recorder = Recorder()
    listeners = [Unsavable(), recorder, CheckpointSaver(10**6)]
    with pytest.raises(UsageError, match=r"leaf 'listeners\.Unsavable\.seen' is a builtins\.set"):
        make(tmp_path / "saving", OneState, num_iterations=3, listeners=listeners).train()
    assert recorder.reports == []
    make(tmp_path / "not", OneState, num_iterations=3, listeners=[Unsavable()]).train()  # saves nothing


class ChangesDirectory(OneState):
    """Works in a directory of its own, from its constructor or its first reset on."""

    def __init__(self, place, in_reset):
        super().__init__()
        self._place, self._in_reset = place, in_reset
        if not in_reset:
            os.chdir(place)

    def reset(self, **arguments):
        os.chdir(self._place)
        return super().reset(**arguments)


FEW = {"Trainer.unroll_length": 64, "EpochBatches.num_epochs": 1, "Evaluate.num_episodes": 2}


@pytest.mark.parametrize("in_reset", [True, False])
def test_a_changed_working_directory_does_not_harm_the_run(tmp_path, monkeypatch, in_reset):
    (tmp_path / "place").mkdir()
    monkeypatch.chdir(tmp_path)
    kwargs = {"place": str(tmp_path / "place"), "in_reset": in_reset}
    alfish.train(
        "PPO",
        functools.partial(ChangesDirectory, **kwargs),
        num_env_steps=1000,
        root_dir="runs/a",
        **FEW,
    )
    assert not list((tmp_path / "place").iterdir())
    names = {path.name for path in (tmp_path / "runs" / "a").iterdir()}
    assert {"checkpoints", "config.gin", "done", "log.txt", "metrics.csv", "eval"} <= names


def test_the_home_directory_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    alfish.train("PPO", "CartPole-v1", num_env_steps=500, root_dir="~/runs/a", **FEW)
    assert (tmp_path / "home" / "runs" / "a" / "done").exists()
    assert main(["evaluate", "--root_dir=~/runs/a", "--num_episodes=1"]) == 0
    assert main(["pack", "--root_dir=~/runs/a", "--output=~/a.zip"]) == 0
    assert (tmp_path / "home" / "a.zip").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]


def test_a_trainers_directory_stays_where_it_was(tmp_path, monkeypatch):
    (tmp_path / "place").mkdir()
    monkeypatch.chdir(tmp_path)
    make = functools.partial(ChangesDirectory, str(tmp_path / "place"), False)
    environment = functools.partial(make_environment, make)
    Trainer("runs/a", algorithm=PPO, environment=environment, num_env_steps=300).train()
    assert (tmp_path / "runs" / "a" / "done").exists() and not list((tmp_path / "place").iterdir())


def test_a_setting_that_is_given_twice_is_refused(tmp_path):
    with pytest.raises(UsageError, match="both num_env_steps and Trainer.num_env_steps; give one of them"):
        alfish.train("PPO", "CartPole-v1", root_dir=tmp_path, num_env_steps=200, **{"Trainer.num_env_steps": 300})
