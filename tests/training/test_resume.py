"""A resumed run continues: with the same bits where everything that is random can be saved, and never silently anew."""

import functools
import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from resuming import assert_same, run_killed_after_a_save, stop_after, tensors_of
from toys import Bandit, OneState

import alfish
from alfish import nest
from alfish.__main__ import main
from alfish.algorithms.ppg import PPG
from alfish.algorithms.ppo import PPO
from alfish.algorithms.reppo import REPPO
from alfish.algorithms.sac import SAC
from alfish.compiler import kernels
from alfish.environments import make_environment
from alfish.environments.toy import TensorPointMass
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, PhasicBatches, ReplayBatches
from alfish.learner.kl_adaptive import KLAdaptive
from alfish.learner.learner import Learner
from alfish.networks import (
    GRU,
    LSTM,
    MLP,
    ActorCritic,
    AttentionWindow,
    CriticEnsemble,
    MinGRU,
    PredictiveCritic,
    StackedMemory,
    Torso,
)
from alfish.parameters.schedules import Linear
from alfish.replay import AlignedRingBuffer
from alfish.runs.checkpoints import Checkpoints, Origin, run_id
from alfish.runs.stop_signals import Interrupted
from alfish.training.listener import Listener
from alfish.training.listeners import CheckpointSaver, Evaluate, Summaries
from alfish.training.trainer import Trainer
from alfish.transforms import ObservationNormalizer, RewardNormalizer

REPOSITORY = Path(alfish.__file__).parent.parent


def make(root_dir, env_id, env_kwargs, unroll_length, layers=(8,), listeners=(), **options):
    torso = functools.partial(Torso, mlp=functools.partial(MLP, layers=layers))
    network = functools.partial(ActorCritic, actor_torso=torso, critic_torso=torso)
    defaults = {
        "algorithm": functools.partial(PPO, network=network),
        "environment": functools.partial(make_environment, env_id, num_envs=4, env_kwargs=env_kwargs),
        "batches": functools.partial(EpochBatches, num_epochs=2, minibatch_size=2 * unroll_length),
        "learner": functools.partial(Learner, learning_rate=Linear(1e-2), max_grad_norm=0.5),
        "transforms": [ObservationNormalizer, RewardNormalizer],
        "listeners": [CheckpointSaver(0), Summaries()] if listeners == () else listeners,
        "unroll_length": unroll_length,
        "num_iterations": 8,
        "device": "cpu",
    }
    return Trainer(root_dir, **{**defaults, **options})


# (a) the environment's state is saved, so any moment will do; (b) it is not, but at the end of all episodes (two
# unrolls of 7 rows end at row 14, the LAST of the third episode of 4 actions) there is none beside the generators.
SETTINGS = {
    "saved_state": (TensorPointMass, {"length": 6}, 8, 3),
    "saved_state_same_step": (TensorPointMass, {"length": 6, "autoreset": "same_step"}, 8, 3),
    "episode_boundary": (Bandit, {"action": "box", "length": 4}, 7, 2),
    "episode_boundary_discrete": (Bandit, {"action": "discrete", "length": 4}, 7, 2),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_resumed_run_is_bit_identical(tmp_path, name):
    env_id, env_kwargs, unroll_length, stop = SETTINGS[name]
    whole = make(tmp_path / "whole", env_id, env_kwargs, unroll_length, num_iterations=5)
    whole.train()
    cut = make(tmp_path / "cut", env_id, env_kwargs, unroll_length, num_iterations=5)
    stop_after(cut, stop)
    assert not torch.equal(*(t.learner._plain.groups["all"].flat[0] for t in (whole, cut)))
    torch.manual_seed(99)  # another process would have other random states
    resumed = make(tmp_path / "cut", env_id, env_kwargs, unroll_length, num_iterations=5)
    assert resumed.train().iterations == 5
    assert_same(tensors_of(whole), tensors_of(resumed))
    assert json.loads((tmp_path / "cut" / "done").read_text()) == json.loads((tmp_path / "whole" / "done").read_text())


def test_a_resumed_actor_critic_run_is_bit_identical(tmp_path):
    """Two optimizers, learned weights, and an old policy that is made from the unroll."""
    mlp = functools.partial(MLP, layers=(8,), norm="rms", activation="silu")
    algorithm = functools.partial(REPPO, actor_mlp=mlp, critic=functools.partial(PredictiveCritic, mlp=mlp))
    make_reppo = functools.partial(make, env_id=TensorPointMass, env_kwargs={"length": 6}, unroll_length=8,
                                   algorithm=algorithm)  # fmt: skip
    whole = make_reppo(tmp_path / "whole")
    whole.train()
    stop_after(make_reppo(tmp_path / "cut"), 3)
    torch.manual_seed(99)
    resumed = make_reppo(tmp_path / "cut")
    assert resumed.train().iterations == 8
    assert_same(tensors_of(whole), tensors_of(resumed))


def test_a_resumed_run_with_an_aligned_replay_is_bit_identical(tmp_path):
    replay = {"capacity": 160, "batch_size": 8, "window_length": 3, "warmup_env_steps": 24, "updates_per_env_step": 0.2}
    mlp, critic = functools.partial(MLP, layers=(8,)), functools.partial(CriticEnsemble, layers=(8,))
    make_sac = functools.partial(
        make,
        env_id=TensorPointMass,
        env_kwargs={"length": 6, "autoreset": "same_step"},
        unroll_length=3,
        num_iterations=40,
        algorithm=functools.partial(SAC, actor_mlp=mlp, critic=critic),
        batches=functools.partial(ReplayBatches, **replay, buffer=AlignedRingBuffer),
    )
    whole = make_sac(tmp_path / "whole")
    whole.train()
    assert whole.batches.buffer.num_pushed == 480
    stop_after(make_sac(tmp_path / "cut"), 25)
    torch.manual_seed(99)
    resumed = make_sac(tmp_path / "cut")
    assert resumed.train().iterations == 40
    assert_same(tensors_of(whole), tensors_of(resumed))


@pytest.mark.parametrize(("memory", "stop"), [({}, 4), ({}, 6), ({"memory": functools.partial(GRU, size=6)}, 5)])
def test_a_resumed_run_makes_the_auxiliary_phases_of_one_that_never_stopped(tmp_path, memory, stop):
    """A phase ends the iterations 3 and 6; the run stops with one or two unrolls for the next phase, or after one."""
    torso = functools.partial(Torso, mlp=functools.partial(MLP, layers=(8,)), **memory)
    network = functools.partial(ActorCritic, actor_torso=torso, critic_torso=torso)
    batches = functools.partial(PhasicBatches, num_epochs=1, minibatch_size=16, num_unrolls=3, num_auxiliary_epochs=1)
    make_ppg = functools.partial(make, env_id=TensorPointMass, env_kwargs={"length": 6, "autoreset": "same_step"},
                                 unroll_length=8, batches=batches,
                                 algorithm=functools.partial(PPG, network=network))  # fmt: skip
    whole = make_ppg(tmp_path / "whole")
    whole.train()
    assert whole.learner.updates == 8 * 2 + 2 * 3 * 2
    stop_after(make_ppg(tmp_path / "cut"), stop)
    torch.manual_seed(99)
    resumed = make_ppg(tmp_path / "cut")
    resumed.train()
    assert len(tensors_of(whole)["batches"]["unrolls"]) == 3
    assert_same(tensors_of(whole), tensors_of(resumed))


def test_learning_rates_do_not_change_after_a_resume(tmp_path):
    learner = functools.partial(Learner, learning_rate=KLAdaptive(1e-3, target=1e-3))
    led = functools.partial(make, env_id=TensorPointMass, env_kwargs={"length": 6}, unroll_length=8, learner=learner)
    whole = led(tmp_path / "whole")
    whole.train()
    cut = stop_after(led(tmp_path / "cut"), 3)
    assert cut.learner.state_dict()["rates"]["all"].item() != pytest.approx(1e-3)
    torch.manual_seed(99)
    resumed = led(tmp_path / "cut")
    resumed.train()
    assert_same(tensors_of(whole), tensors_of(resumed))


# Pauses (`Trainer.stop_at`).


def make_pausing(root_dir, stop_at=None, **options):
    listeners = [Evaluate(64, num_episodes=2), CheckpointSaver(0), Summaries()]
    return make(root_dir, TensorPointMass, {"length": 6}, 8, listeners=listeners, stop_at=stop_at, **options)


def test_a_paused_run_continues_bit_for_bit(tmp_path):
    whole = make_pausing(tmp_path / "whole")
    whole.train()
    for stop_at in (64, 70, 150):
        paused = make_pausing(tmp_path / "cut", stop_at)
        report = paused.train()
        assert report.finished and report.env_steps >= stop_at and paused.interrupted_by is None
        assert report.progress == report.iterations / 8, "the schedules are those of the budget"
        assert not (tmp_path / "cut" / "done").exists()
        assert Checkpoints(tmp_path / "cut" / "checkpoints").steps()[-1] == report.env_steps
        assert f"(Trainer.stop_at = {stop_at})" in (tmp_path / "cut" / "log.txt").read_text().splitlines()[-1]
    again = make_pausing(tmp_path / "cut")
    again.train()
    assert_same(tensors_of(whole), tensors_of(again))
    whole_files, cut_files = (
        {p.name: p.read_text() for p in (tmp_path / n / "eval").iterdir()} for n in ("whole", "cut")
    )
    assert whole_files == cut_files and len(whole_files) >= 3


def test_a_stop_reached_earlier_prevents_training(tmp_path):
    first = make_pausing(tmp_path, 64)
    first.train()
    again = make_pausing(tmp_path, 32)
    assert again.train().iterations == first.clock.iterations
    assert_same(tensors_of(first), tensors_of(again))


def test_a_run_stopped_at_its_budget_is_finished(tmp_path):
    trainer = make_pausing(tmp_path, 64, num_iterations=None, num_env_steps=64)
    trainer.train()
    assert trainer.clock.finished and (tmp_path / "done").exists()
    assert "Paused" not in (tmp_path / "log.txt").read_text()


class Signalling(Listener):
    """Sends SIGTERM before the evaluation of the pause."""

    def after_iteration(self, run, report):
        if report.finished:
            os.kill(os.getpid(), signal.SIGTERM)


def test_an_evaluation_interrupted_at_a_pause_is_repeated_later(tmp_path):
    make_pausing(tmp_path / "whole", 64).train()
    stopped = make_pausing(tmp_path / "cut", 64)
    stopped.listeners.insert(0, Signalling())
    stopped.train()
    assert stopped.interrupted_by == signal.SIGTERM and not (tmp_path / "cut" / "eval").exists()
    make_pausing(tmp_path / "cut", 64).train()
    (path,) = (tmp_path / "whole" / "eval").iterdir()
    assert (tmp_path / "cut" / "eval" / path.name).read_text() == path.read_text()
    whole, cut = make_pausing(tmp_path / "whole", 100), make_pausing(tmp_path / "cut", 100)
    whole.train(), cut.train()
    assert_same(tensors_of(whole), tensors_of(cut))
    assert len(list((tmp_path / "cut" / "eval").iterdir())) == 1, "it is not repeated"


class SignalAtEvaluation(Listener):
    """Sends SIGTERM before an evaluation that is due in the middle of a run."""

    def after_iteration(self, run, report):
        if report.clock >= 64:
            os.kill(os.getpid(), signal.SIGTERM)


def test_an_evaluation_delayed_by_a_signal_uses_the_same_policy(tmp_path):
    """It is made up for before the resumed run trains."""
    make_pausing(tmp_path / "whole").train()
    stopped = make_pausing(tmp_path / "cut")
    stopped.listeners.insert(0, SignalAtEvaluation())
    last = stopped.train()
    assert 64 <= last.clock < 128 and not (tmp_path / "cut" / "eval").exists()
    resumed = make_pausing(tmp_path / "cut")
    reports = resumed_reports(resumed)
    assert reports[0].clock == last.clock < reports[1].clock and reports[0].evaluation is not None
    assert [report.finished for report in reports].count(True) == 1
    files = [{path.name: path.read_text() for path in (tmp_path / n / "eval").iterdir()} for n in ("whole", "cut")]
    assert files[0] == files[1] and len(files[0]) >= 2


def test_an_interrupted_last_evaluation_is_repeated_before_the_run_ends(tmp_path, monkeypatch):
    whole = make_pausing(tmp_path / "whole")
    whole.train()
    evaluate = Evaluate._evaluate

    def broken_off(self, run, report, stem):
        if not run.clock.finished:
            return evaluate(self, run, report, stem)
        os.kill(os.getpid(), signal.SIGTERM)
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(Evaluate, "_evaluate", broken_off)
        stopped = make_pausing(tmp_path / "cut")
        stopped.train()
    assert stopped.clock.finished and stopped.interrupted_by == signal.SIGTERM
    assert not (tmp_path / "cut" / "done").exists()
    resumed = make_pausing(tmp_path / "cut")
    report = resumed.train()
    assert report.finished and report.evaluation is not None and resumed.interrupted_by is None
    assert report.iterations == stopped.clock.iterations and (tmp_path / "cut" / "done").exists()
    files = [{path.name: path.read_text() for path in (tmp_path / n / "eval").iterdir()} for n in ("whole", "cut")]
    assert files[0] == files[1]
    assert_same(tensors_of(whole), tensors_of(resumed))
    assert make_pausing(tmp_path / "cut").train() is None, "it is not repeated"


def test_a_repeated_evaluation_is_not_repeated_again_after_a_kill(tmp_path):
    class Kill(Listener):
        def after_iteration(self, run, report):
            raise KeyboardInterrupt

    def training():
        listeners = [Evaluate(64, num_episodes=2), CheckpointSaver(0, keep_best=False), Summaries()]
        return make(tmp_path, TensorPointMass, {"length": 6}, 8, listeners=listeners)

    stopped = training()
    stopped.listeners.insert(0, SignalAtEvaluation())
    last = stopped.train()
    killed = training()
    killed.listeners.append(Kill())
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    reports = resumed_reports(training())
    assert reports[0].clock > last.clock
    rows = [line.split(",")[0] for line in (tmp_path / "metrics.csv").read_text().splitlines()[1:]]
    assert len(rows) == len(set(rows)), "each once"


def test_a_repeated_evaluation_is_not_repeated_after_a_second_signal(tmp_path, monkeypatch):
    def training():
        listeners = [Evaluate(64, num_episodes=2), CheckpointSaver(0, keep_best=False), Summaries()]
        return make(tmp_path, TensorPointMass, {"length": 6}, 8, listeners=listeners)

    evaluate = Evaluate._evaluate

    def signalled(self, run, report, stem):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, run, report, stem)

    stopped = training()
    stopped.listeners.insert(0, SignalAtEvaluation())
    stopped.train()
    with monkeypatch.context() as patch:
        patch.setattr(Evaluate, "_evaluate", signalled)
        training().train()
    training().train()
    header, *rows = (line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines())
    clocks = [row[0] for row in rows if row[header.index("evaluation/mean_return")]]
    assert len(clocks) == len(set(clocks)) >= 3


def evaluated(root_dir, period, num_env_steps, **options):
    """Trains a run; returns the text of each evaluation and the clocks of their rows."""
    listeners = [Evaluate(period, num_episodes=2), CheckpointSaver(0), Summaries()]
    budget = {"num_iterations": None, "num_env_steps": num_env_steps}
    make(root_dir, TensorPointMass, {"length": 6}, 8, listeners=listeners, **budget, **options).train()
    header, *rows = (line.split(",") for line in (root_dir / "metrics.csv").read_text().splitlines())
    clocks = [int(row[0]) for row in rows if row[header.index("evaluation/mean_return")]]
    files = {int(path.stem.rpartition("-")[2]): path.read_text() for path in (root_dir / "eval").iterdir()}
    return dict(sorted(files.items())), clocks


def test_a_budget_below_the_last_evaluation_ends_the_run(tmp_path):
    before, _ = evaluated(tmp_path, 50, 700, stop_at=630)
    after, clocks = evaluated(tmp_path, 50, 600)  # a budget that the run exceeds by less than `LARGEST_EXCESS`
    assert 600 in before and all(after[clock] == text for clock, text in before.items())
    assert list(after) == clocks and clocks[-1] >= 630


def test_evaluations_keep_their_due_clock_if_the_period_changes(tmp_path):
    before, _ = evaluated(tmp_path, 50, 500, stop_at=230)
    after, clocks = evaluated(tmp_path, 200, 500)
    assert list(before) == [50, 100, 150, 200] and all(after[clock] == text for clock, text in before.items())
    assert list(after) == clocks == [50, 100, 150, 200, 250, 400, 500]


def test_evaluations_follow_a_shorter_period_at_once(tmp_path):
    evaluated(tmp_path, 200, 500, stop_at=230)
    _, clocks = evaluated(tmp_path, 50, 500)
    assert clocks == [200, 250, 300, 350, 400, 450, 500]


def test_the_first_of_several_evaluations_chooses_the_best_checkpoint(tmp_path):
    listeners = [Evaluate(64, num_episodes=2, name="long"), Evaluate(32, num_episodes=1, name="quick")]
    reports = resumed_reports(make(tmp_path, TensorPointMass, {"length": 6}, 8, listeners=listeners))
    found = {report.clock // 32: report for report in reports}
    assert found[1].evaluation is None and "quick/mean_return" in found[1].scalars
    assert found[2].evaluation.mean == found[2].scalars["long/mean_return"]


def test_interrupted_summaries_still_write_evaluations(tmp_path):
    def breaks(run):
        if 64 <= run.clock.value < 96:
            os.kill(os.getpid(), signal.SIGTERM)
            raise Interrupted
        return {}

    def training(summary):
        listeners = [Evaluate(64, num_episodes=2), Summaries(custom_summary=summary), CheckpointSaver(0)]
        return make(tmp_path, TensorPointMass, {"length": 6}, 8, listeners=listeners, summary_period=1)

    stopped = training(breaks)
    stopped.train()
    assert stopped.interrupted_by == signal.SIGTERM
    training(None).train()
    header, *rows = (line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines())
    clocks = [int(row[0]) for row in rows if row[header.index("evaluation/mean_return")]]
    assert clocks == [int(path.stem.rpartition("-")[2]) for path in sorted((tmp_path / "eval").iterdir())]
    assert clocks[0] == 64 and len(clocks) >= 3


def resumed_reports(trainer):
    """Reports that listeners receive."""
    reports = []

    class Notes(Listener):
        def after_iteration(self, run, report):
            reports.append(report)

    trainer.listeners.append(Notes())
    trainer.train()
    return reports


@pytest.mark.parametrize(
    ("name", "memories"),
    [
        ("saved_state", (GRU, LSTM)),
        ("saved_state_same_step", (functools.partial(StackedMemory, layers=[MinGRU, GRU]), AttentionWindow)),
    ],
    ids=["gated", "others"],
)
def test_a_run_with_memory_resumes_bit_for_bit_in_mid_episode(tmp_path, name, memories):
    env_id, env_kwargs, unroll_length, stop = SETTINGS[name]
    torso = functools.partial(Torso, mlp=functools.partial(MLP, layers=(8,)))
    actor, critic = (functools.partial(torso, memory=memory) for memory in memories)
    network = functools.partial(ActorCritic, actor_torso=actor, critic_torso=critic)
    settings = {"algorithm": functools.partial(PPO, network=network), "num_iterations": 5}
    whole = make(tmp_path / "whole", env_id, env_kwargs, unroll_length, **settings)
    whole.train()
    cut = make(tmp_path / "cut", env_id, env_kwargs, unroll_length, **settings)
    stop_after(cut, stop)
    assert all(leaf.any() for leaf in nest.leaves(cut.state_dict()["unroller"]["state"]))
    resumed = make(tmp_path / "cut", env_id, env_kwargs, unroll_length, **settings)
    resumed.train()
    assert_same(tensors_of(whole), tensors_of(resumed))


def test_without_an_environment_state_a_resumed_run_starts_new_episodes(tmp_path):
    env_id, env_kwargs, unroll_length, _ = SETTINGS["episode_boundary"]
    cut = make(tmp_path, env_id, env_kwargs, unroll_length)
    stop_after(cut, 1)  # in mid-episode
    episodes = cut.metrics.results()["episodes"]
    resumed = make(tmp_path, env_id, env_kwargs, unroll_length)
    assert resumed.train().iterations == 8
    results = resumed.metrics.results()
    assert results["episodes"] > episodes and results["average_episode_length"] == 4  # no stump is an episode
    assert results["environment_steps"] == resumed.clock.env_steps


def test_the_thread_count_of_the_run_is_restored(tmp_path):
    env_id, env_kwargs, unroll_length, _ = SETTINGS["saved_state"]
    stop_after(make(tmp_path, env_id, env_kwargs, unroll_length, num_threads=2), 1)
    trainer = make(tmp_path, env_id, env_kwargs, unroll_length)
    assert torch.get_num_threads() == 1
    try:
        trainer.start()
        assert torch.get_num_threads() == 2
    finally:
        trainer.close()
        torch.set_num_threads(1)


def test_an_explicit_thread_count_overrides_the_run(tmp_path):
    env_id, env_kwargs, unroll_length, _ = SETTINGS["saved_state"]
    stop_after(make(tmp_path, env_id, env_kwargs, unroll_length, num_threads="auto"), 1)
    trainer = make(tmp_path, env_id, env_kwargs, unroll_length, num_threads=2)
    try:
        trainer.start()
        assert torch.get_num_threads() == 2
    finally:
        trainer.close()
        kernels.set_num_threads(1)


def test_idle_cores_change_no_thread_count_of_a_run(tmp_path):
    """A run of one thread may go on with 'auto', which has the same results; a run of two keeps its two."""
    env_id, env_kwargs, unroll_length, _ = SETTINGS["saved_state"]
    try:
        for count, expected in ((1, "auto"), (2, 2)):
            stop_after(make(tmp_path / str(count), env_id, env_kwargs, unroll_length, num_threads=count), 1)
            trainer = make(tmp_path / str(count), env_id, env_kwargs, unroll_length, num_threads="auto")
            kernels.use_helpers(3)
            assert kernels.num_threads() == "auto"
            trainer.start()
            assert kernels.num_threads() == expected
            trainer.close()
    finally:
        kernels.set_num_threads(1)


def test_a_truncated_newest_checkpoint_falls_back_to_the_previous(tmp_path, caplog, capsys):
    env_id, env_kwargs, unroll_length, _ = SETTINGS["saved_state"]
    whole = make(tmp_path / "whole", env_id, env_kwargs, unroll_length)
    whole.train()
    cut = make(tmp_path / "cut", env_id, env_kwargs, unroll_length)
    cut.start()
    for report in cut.iterate():
        if report.iterations in (2, 4):
            cut.save()
        if report.iterations == 4:
            break
    cut.close()
    older, newest = cut.directory.checkpoints.steps()
    path = tmp_path / "cut" / "checkpoints" / f"checkpoint-{newest:012d}.pt"
    path.write_bytes(path.read_bytes()[:1000])
    resumed = make(tmp_path / "cut", env_id, env_kwargs, unroll_length)
    resumed.train()
    assert f"FALLING BACK to checkpoint-{older:012d}.pt" in caplog.text
    assert f"Resuming from {tmp_path / 'cut' / 'checkpoints'} at {older} steps" in capsys.readouterr().err
    assert_same(tensors_of(whole), tensors_of(resumed))


def stopped_twice(root_dir):
    """A run with checkpoints after 1 and 2 iterations, and the paths of both."""
    env_id, env_kwargs, unroll_length, _ = SETTINGS["saved_state"]
    trainer = make(root_dir, env_id, env_kwargs, unroll_length)
    trainer.start()
    paths = []
    for report in trainer.iterate():
        paths.append(trainer.save())
        if report.iterations == 2:
            break
    trainer.close()
    return paths


def test_files_of_further_learners_stay_until_a_checkpoint_without_them(tmp_path):
    """A start with too few learners that ends before it has saved loses nothing."""
    settings = TensorPointMass, {"length": 6}, 8
    stop_after(make(tmp_path, *settings), 2)
    rank = tmp_path / "ranks" / "rank-001"
    rank.mkdir(parents=True)
    trainer = make(tmp_path, *settings)
    trainer.start()
    assert rank.is_dir()
    trainer.save()
    trainer.close()
    assert not rank.exists() and rank.with_name("rank-001.superseded").is_dir()


def test_a_run_keeps_its_id_and_knows_its_own_checkpoints(tmp_path):
    env_id, env_kwargs, unroll_length, _ = SETTINGS["saved_state"]
    again = functools.partial(make, env_id=env_id, env_kwargs=env_kwargs, unroll_length=unroll_length)
    one, other = stopped_twice(tmp_path / "one"), stopped_twice(tmp_path / "other")
    ids = [run_id(path.parents[1]) for path in (one[0], other[0])]
    assert ids[0] != ids[1] and all(ids)
    assert Checkpoints(one[0].parent).header(28).run == ids[0]
    (tmp_path / "one" / "run_id").unlink()  # as a copy of its checkpoints alone
    assert again(tmp_path / "one", num_iterations=3).train().iterations == 3
    assert run_id(tmp_path / "one") == ids[0]

    shutil.copy(one[1], other[1])  # of another run, at the same steps

    def content():
        paths = [path for path in (tmp_path / "other").rglob("*") if path.is_file() and path.name != "log.txt"]
        return {path: path.read_bytes() for path in paths}

    before = content()
    for start in ("train", "load_policy"):
        with pytest.raises(UsageError, match=f"is a checkpoint of another run .{ids[0]}, .*move it away"):
            getattr(again(tmp_path / "other"), start)()
    assert content() == before
    other[1].unlink()
    assert again(tmp_path / "other", num_iterations=3).train().iterations == 3


def wrong_counters(state):
    state["counters"]["env_steps"] = "56"


def no_counters(state):
    del state["counters"]


def wrong_listeners(state):
    state["listeners"]["CheckpointSaver"] = {"next": "soon", "best": None}


def wrong_moments(state):
    state["learner"]["optimizers"]["all"]["first"] = [torch.zeros(3)]


def wrong_metrics(state):
    state["metrics"] = [1, 2]


def wrong_environments(state):
    state["unroller"] = "unroller"


OTHER_CONTENT = [wrong_counters, no_counters, wrong_listeners, wrong_moments, wrong_metrics, wrong_environments]


def test_a_foreign_checkpoint_is_named_and_the_previous_is_used(tmp_path, caplog):
    env_id, env_kwargs, unroll_length, _ = SETTINGS["saved_state"]
    whole = make(tmp_path / "whole", env_id, env_kwargs, unroll_length, num_iterations=3)
    whole.train()
    stopped_twice(tmp_path / "cut")
    for change in OTHER_CONTENT:
        root_dir = tmp_path / change.__name__
        shutil.copytree(tmp_path / "cut", root_dir)
        checkpoints = Checkpoints(root_dir / "checkpoints", origin=Origin(run_id(root_dir)))
        _, state = checkpoints.load()
        change(state)
        newest = checkpoints.save(56, state)
        resumed = make(root_dir, env_id, env_kwargs, unroll_length, num_iterations=3)
        resumed.train()
        [warning] = [record.getMessage() for record in caplog.records if "FALLING BACK" in record.getMessage()]
        assert f"{newest} does not have the contents that this version of alfish saves" in warning, change
        assert "checkpoint-000000000028.pt" in warning, change
        assert_same(tensors_of(whole), tensors_of(resumed))
        caplog.clear()


def test_a_renamed_old_checkpoint_is_refused_by_its_steps(tmp_path):
    env_id, env_kwargs, unroll_length, _ = SETTINGS["saved_state"]
    _, newest = stopped_twice(tmp_path)
    checkpoints = Checkpoints(newest.parent, origin=Origin(run_id(tmp_path)))
    checkpoints.save(96, checkpoints.load()[1])
    with pytest.raises(UsageError, match="at 96 steps in .* was saved at 56 and has been renamed"):
        make(tmp_path, env_id, env_kwargs, unroll_length).train()


def test_a_run_without_a_readable_checkpoint_never_starts_from_scratch(tmp_path):
    env_id, env_kwargs, unroll_length, _ = SETTINGS["saved_state"]
    stop_after(make(tmp_path, env_id, env_kwargs, unroll_length), 1)
    [path] = (tmp_path / "checkpoints").glob("*.pt")
    path.write_bytes(b"")
    with pytest.raises(UsageError, match="None of the 1 checkpoints .* is readable"):
        make(tmp_path, env_id, env_kwargs, unroll_length).train()


@pytest.mark.parametrize("start", ["train", "load_policy"])
def test_a_checkpoint_of_another_architecture_is_refused_with_parameter_names(tmp_path, start):
    env_id, env_kwargs, unroll_length, _ = SETTINGS["saved_state"]
    stop_after(make(tmp_path, env_id, env_kwargs, unroll_length), 1)
    content = {path: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()}
    other = make(tmp_path, env_id, env_kwargs, unroll_length, layers=(16,))
    words = (
        r"does not fit the PPO .*network\.actor_torso\S* is \[8, 2\] float32 in the checkpoint and \[16, 2\] .*"
        r"and \d+ more"
    )
    with pytest.raises(UsageError, match=words):
        getattr(other, start)()
    assert {path: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()} == content


def test_a_checkpoint_of_another_number_of_environments_is_refused(tmp_path):
    env_id, env_kwargs, unroll_length, _ = SETTINGS["saved_state"]
    stop_after(make(tmp_path, env_id, env_kwargs, unroll_length), 1)
    environment = functools.partial(make_environment, env_id, num_envs=2, env_kwargs=env_kwargs)
    with pytest.raises(UsageError, match="4 environments, not 2"):
        make(tmp_path, env_id, env_kwargs, unroll_length, environment=environment).train()


# The command line.

TINY = [
    "Trainer.num_env_steps=2000",
    "MLP.layers=(8,)",
    "EpochBatches.num_epochs=1",
    "Evaluate.num_episodes=2",
]  # fmt: skip


def command(root_dir, *parameters, conf="ppo_cartpole.gin"):
    return ["train", f"--gin_file={conf}", f"--root_dir={root_dir}", *(f"--gin_param={one}" for one in parameters)]


def wait_for_a_checkpoint(root_dir):
    deadline = time.monotonic() + 60
    while not list(Path(root_dir).glob("checkpoints/checkpoint-*.pt")):
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_run_resumes_and_ends_at_the_same_budget(tmp_path, capsys):
    parameters = [*TINY, "CheckpointSaver.period=500", "Trainer.num_env_steps=3000", "Trainer.summary_period=500"]
    run_killed_after_a_save(command(tmp_path, *parameters))
    assert not (tmp_path / "done").exists()
    assert main(command(tmp_path, *parameters)) == 0
    assert "Resuming from" in capsys.readouterr().err
    done = json.loads((tmp_path / "done").read_text())
    assert 3000 <= done["env_steps"] < 3000 + 256
    lines = (tmp_path / "metrics.csv").read_text().splitlines()[1:]
    steps = [int(line.split(",")[0]) for line in lines]
    assert steps == sorted(set(steps)) and len(steps) >= 5  # nothing twice, nothing missing
    assert main(command(tmp_path, *parameters)) == 0
    assert "is finished: Trainer.num_env_steps = 3,000 is spent" in capsys.readouterr().err


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 75)])
def test_a_signal_saves_a_checkpoint_and_stops(tmp_path, capsys, number, status):
    def send():
        wait_for_a_checkpoint(tmp_path)
        os.kill(os.getpid(), number)

    endless = [
        "CheckpointSaver.period=500",
        "Trainer.num_env_steps=100_000_000",
        "Learner.compile=False",
        "Trainer.wall_seconds=60",
    ]
    threading.Thread(target=send).start()
    assert main(command(tmp_path, *TINY, *endless)) == status
    errors = capsys.readouterr().err
    assert f"{number.name}: stopped at" in errors and "run the same command again to continue" in errors
    assert "Traceback" not in errors and not (tmp_path / "done").exists()
    newest = Checkpoints(tmp_path / "checkpoints").steps()[-1]
    assert f"stopped at {newest:,} steps" in errors


def test_a_second_interrupt_says_where_the_same_command_begins(tmp_path, capsys, monkeypatch):
    def interrupted(trainer):
        raise KeyboardInterrupt

    assert main(command(tmp_path, *TINY)) == 0
    monkeypatch.setattr("alfish.training.trainer.Trainer.train", interrupted)
    assert main(command(tmp_path, *TINY)) == 130
    newest = Checkpoints(tmp_path / "checkpoints").steps()[-1]
    line = f"SIGINT twice: stopped at once; the same command continues from the checkpoint at {newest:,} steps"
    assert line in capsys.readouterr().err


def test_another_configuration_is_shown_and_stops(tmp_path, capsys):
    assert main(command(tmp_path, *TINY)) == 0
    capsys.readouterr()
    assert main(command(tmp_path, *TINY, "PPO.gamma=0.5")) == 2
    words = capsys.readouterr().err
    assert "is a run with another configuration" in words
    assert "\n-PPO.gamma = 0.98\n+PPO.gamma = 0.5\n" in words
    assert "lambda_" not in words and "--on_config_change=old or =new" in words
    assert "PPO.gamma = 0.98" in (tmp_path / "config.gin").read_text()


def test_another_configuration_can_be_taken_or_left(tmp_path, caplog):
    assert main(command(tmp_path, *TINY)) == 0
    more = [*TINY, "Trainer.num_env_steps=3000", "PPO.gamma=0.5"]
    assert main([*command(tmp_path, *more), "--on_config_change=old"]) == 0
    words = caplog.text
    assert "without these changes" in words and "+PPO.gamma = 0.5" in words and "+Trainer.num_env_steps = 3000" in words
    assert "PPO.gamma = 0.98" in (tmp_path / "config.gin").read_text()
    assert main([*command(tmp_path, *more), "--on_config_change=new"]) == 0
    text = (tmp_path / "config.gin").read_text()
    assert "PPO.gamma = 0.5" in text and "num_env_steps = 3000" in text
    assert json.loads((tmp_path / "done").read_text())["env_steps"] >= 3000


def test_a_checkpoint_of_another_configuration_is_refused_unless_it_is_requested(tmp_path, capsys):
    """`config.gin` alone does not tell, since it can be copied or edited."""
    assert main(command(tmp_path, *TINY)) == 0
    path = tmp_path / "config.gin"
    path.write_text(path.read_text().replace("PPO.gamma = 0.98", "PPO.gamma = 0.5"))
    more = [*TINY, "PPO.gamma=0.5", "Trainer.num_env_steps=2600"]
    capsys.readouterr()
    assert main(command(tmp_path, *more)) == 2
    words = capsys.readouterr().err
    assert words.count("\n") == 1 and "was saved with a configuration other than this run's" in words
    assert main([*command(tmp_path, *more), "--on_config_change=new"]) == 0
    assert main(command(tmp_path, *more, "Trainer.num_env_steps=3200")) == 0


def test_a_larger_budget_is_not_another_configuration(tmp_path, capsys):
    assert main(command(tmp_path, *TINY)) == 0
    assert main(command(tmp_path, *TINY, "Trainer.num_env_steps=2600")) == 0
    assert "Resuming from" in capsys.readouterr().err
    assert json.loads((tmp_path / "done").read_text())["env_steps"] >= 2600


def test_the_saved_configuration_suffices_to_continue(tmp_path, capsys):
    assert main(command(tmp_path, *TINY)) == 0
    assert main(["train", f"--root_dir={tmp_path}"]) == 0
    assert "is finished" in capsys.readouterr().err
    assert main(["train", f"--root_dir={tmp_path}", "--gin_param=Trainer.num_env_steps=2600"]) == 0
    assert json.loads((tmp_path / "done").read_text())["env_steps"] >= 2600


def test_a_later_stop_is_not_another_configuration(tmp_path, capsys):
    assert main(command(tmp_path, *TINY, "Trainer.stop_at=500")) == 0
    said = capsys.readouterr().err
    assert re.search(r"Paused at \d{3} steps \(Trainer.stop_at = 500\)", said) and not (tmp_path / "done").exists()
    assert main(command(tmp_path, *TINY, "Trainer.stop_at=1000")) == 0
    assert "(Trainer.stop_at = 1,000)" in capsys.readouterr().err
    assert main(command(tmp_path, *TINY)) == 0
    assert json.loads((tmp_path / "done").read_text())["env_steps"] >= 2000


class Bounded(OneState):
    """Has actions between -1 and `high`."""

    high = 1.0

    def __init__(self):
        super().__init__()
        self.action_space = spaces.Box(-1, self.high, (1,), np.float32)


def test_a_run_whose_actions_have_other_bounds_is_not_continued(tmp_path, monkeypatch, caplog):
    one = functools.partial(make, tmp_path / "run", Bounded, {}, 8)
    one(num_iterations=1, listeners=[CheckpointSaver()]).train()
    assert alfish.evaluate(tmp_path / "run", 1) and caplog.text == ""
    monkeypatch.setattr(Bounded, "high", 5.0)
    words = r"the environment has the actions Box\(-1.0, 5.0, .*, but the policy was trained with Box\(-1.0, 1.0, "
    with pytest.raises(UsageError, match=f"{words}.*; continue with the bounds of the training"):
        one(num_iterations=2).train()
    alfish.evaluate(tmp_path / "run", 1)
    assert re.search(f"{words}.*, so its actions mean something else here", caplog.text)
