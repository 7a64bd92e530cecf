"""Runs whose settings follow measured numbers."""

import functools

import pytest
import torch
from resuming import assert_same, tensors_of
from toys import Bandit

from alfish.algorithms.dqn import DQN
from alfish.algorithms.ppo import PPO
from alfish.environments import make_environment
from alfish.environments.toy import TensorPointMass
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, ActorCritic, QNetwork, Torso
from alfish.parameters.measured import Feedback, MeasuredLinear
from alfish.training.listener import Listener
from alfish.training.listeners import CheckpointSaver, Evaluate, Summaries
from alfish.training.measured_schedules import MeasuredSchedules
from alfish.training.trainer import Trainer
from alfish.unrollers import AsyncUnroller

SMALL = functools.partial(Torso, mlp=functools.partial(MLP, layers=(8,)))
NETWORK = functools.partial(ActorCritic, actor_torso=SMALL, critic_torso=SMALL)


class Recorder(Listener):
    """Keeps a scalar of each report, and the value of a schedule after it."""

    def __init__(self, schedule_of, *names):
        self.schedule_of, self.names, self.seen, self.scalars = schedule_of, names, [], {}

    def after_iteration(self, run, report):
        self.scalars |= report.scalars
        measured = [report.scalars[name] for name in self.names if name in report.scalars]
        self.seen.append((*measured, float(self.schedule_of(run).value)))


def make(root_dir, listeners, entropy_coef=0.0, learning_rate=1e-3, compile=False, **options):
    options = {"num_iterations": 10, "unroll_length": 5, "summary_period": 20, **options}
    return Trainer(
        root_dir,
        algorithm=functools.partial(PPO, network=NETWORK, entropy_coef=entropy_coef),
        environment=functools.partial(make_environment, TensorPointMass, num_envs=2, env_kwargs={"length": 6}),
        batches=functools.partial(EpochBatches, num_epochs=1),
        learner=functools.partial(Learner, learning_rate=learning_rate, compile=compile),
        listeners=listeners,
        device="cpu",
        **options,
    )


def entropy_feedback():
    return Feedback(scalar="train/entropy", target=0.0, initial=0.1, rate=0.1)


def test_a_coefficient_follows_the_summaries_of_training(tmp_path):
    schedule = entropy_feedback()
    recorder = Recorder(lambda run: run.algorithm._entropy_coef, "train/entropy")
    make(tmp_path, [recorder, Summaries([])], entropy_coef=schedule).train()
    value, changes = 0.1, 0
    for *measured, found in recorder.seen:
        if measured:
            value, changes = schedule.next_value(value, measured[0]), changes + 1
        assert found == pytest.approx(value)
    assert 2 <= changes < len(recorder.seen)
    assert recorder.scalars["schedule/entropy_coef"] == pytest.approx(value)
    assert "schedule/entropy_coef" in (tmp_path / "metrics.csv").read_text()


def test_a_learning_rate_follows_evaluations_of_the_same_report(tmp_path):
    schedule = MeasuredLinear(scalar="evaluation/mean_return", start=1e-3, end=1e-5, begin=-100.0, finish=0.0)
    recorder = Recorder(lambda run: run.learner.learning_rates["all"], "evaluation/mean_return")
    trainer = make(tmp_path, [recorder, Evaluate(40, num_episodes=2)], learning_rate=schedule)
    trainer.train()
    with_evaluation = [each for each in recorder.seen if len(each) == 2]
    assert len(with_evaluation) >= 2
    for measured, value in with_evaluation:
        assert value == pytest.approx(schedule.next_value(0.0, measured))
    assert recorder.scalars["train/learning_rate"] < 1e-3


@pytest.mark.parametrize("setting", ["entropy_coef", "learning_rate"])
def test_a_resumed_run_is_bit_identical(tmp_path, setting):
    def run(directory, **options):
        schedule = Feedback(scalar="train/value_loss", target=0.0, initial=1e-3, rate=0.1)
        return make(tmp_path / directory, [CheckpointSaver(0)], **{setting: schedule}, **options)

    whole = run("whole")
    whole.train()
    run("cut", stop_at=50).train()
    torch.manual_seed(99)
    resumed = run("cut")
    resumed.train()
    assert_same(tensors_of(whole), tensors_of(resumed))
    one, other = (each.state_dict()["listeners"]["MeasuredSchedules"] for each in (whole, resumed))
    assert one == other


@pytest.mark.parametrize("stops", [(15,), (15, 25, 35, 65)])
def test_pauses_are_no_measurements(tmp_path, stops):
    def trained(root_dir, *stops):
        for stop_at in (*stops, None):
            schedule = Feedback(scalar="metrics/average_return", target=-3.0, initial=0.1, rate=0.1)
            trainer = make(root_dir, [CheckpointSaver()], entropy_coef=schedule, stop_at=stop_at)
            trainer.train()
        return tensors_of(trainer)

    assert_same(trained(tmp_path / "paused", *stops), trained(tmp_path / "whole"))


def test_each_of_several_runs_begins_with_the_initial_value(tmp_path):
    coef, rate = entropy_feedback(), Feedback(scalar="train/entropy", target=0.0, initial=1e-3, rate=0.1)
    runs = []
    for name in ("first", "second"):
        runs.append(make(tmp_path / name, [], entropy_coef=coef, learning_rate=rate))
        runs[-1].train()
    assert_same(*map(tensors_of, runs))
    assert coef.value == pytest.approx(0.1) and runs[0].algorithm._entropy_coef.value > 0.1


def test_compiled_updates_read_the_value(tmp_path, interpreted):
    runs = []
    for is_compiled in (False, True):
        runs.append(make(tmp_path / str(is_compiled), [], entropy_coef=entropy_feedback(), compile=is_compiled))
        runs[-1].train()
    plain, compiled = runs
    assert not compiled.learner.is_plain
    for one, other in zip(plain.algorithm.parameters(), compiled.algorithm.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def choices(experience):
    """The actions that were taken for each observation, most of them for one."""
    found = {}
    for observation, action in zip(experience.time_step.observation.reshape(-1, 4), experience.action.reshape(-1)):
        found.setdefault(tuple(observation.tolist()), set()).add(int(action))
    return max(map(len, found.values()))


def test_workers_act_with_the_value(tmp_path):
    """An epsilon of 1 that falls to 0 at the first return: then an observation has one action."""
    schedule = MeasuredLinear(scalar="metrics/average_return", start=1.0, end=0.0, begin=-1000.0, finish=-999.0)
    trainer = Trainer(
        tmp_path,
        algorithm=functools.partial(DQN, q_network=functools.partial(QNetwork, torso=SMALL), epsilon=schedule),
        environment=functools.partial(make_environment, Bandit, num_envs=2, env_kwargs={"length": 4}),
        batches=functools.partial(ReplayBatches, capacity=400, batch_size=8, warmup_env_steps=10),
        unroller=functools.partial(AsyncUnroller, num_workers=1, mode="lockstep"),
        listeners=[],
        num_iterations=8,
        unroll_length=16,
        summary_period=10,
        device="cpu",
    )
    most, add = [], trainer.batches.add
    trainer.batches.add = lambda experience: (most.append(choices(experience)), add(experience))
    trainer.train()
    assert float(trainer.algorithm._epsilon.value) == 0.0
    assert most[1] > 1 and most[-1] == 1


def test_an_unreported_scalar_is_refused(tmp_path):
    schedule = MeasuredLinear(scalar="evaluation/return", start=1.0, finish=2.0)
    with pytest.raises(
        UsageError, match=r"MeasuredLinear.scalar \(of entropy_coef\) is 'evaluation/return'; it must be"
    ):
        make(tmp_path, [Evaluate(0)], entropy_coef=schedule).train()


def test_a_run_without_measured_schedules_has_no_listener_for_them(tmp_path):
    trainer = make(tmp_path, [])
    assert not any(isinstance(each, MeasuredSchedules) for each in trainer.listeners)
    trainer.close()
