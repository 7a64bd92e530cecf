"""Leagues in one run: past selves that only snapshots change, and policies that train in turn."""

import functools
import re

import gin
import pytest
import torch
from toy_games import Kept

from alfish.algorithms.dqn import DQN
from alfish.algorithms.ppo import PPO
from alfish.environments import make_environment
from alfish.environments.games import make_games
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.policies.member import PolicySettings
from alfish.training.leagues import AlternateTraining, Snapshots
from alfish.training.listener import Listener
from alfish.training.listeners import CheckpointSaver
from alfish.training.trainer import Trainer
from alfish.transforms import ObservationNormalizer

EPOCHS = functools.partial(EpochBatches, num_epochs=1, minibatch_size=16)
REPLAY = functools.partial(ReplayBatches, batch_size=16, warmup_env_steps=60, capacity=1000, updates_per_env_step=0.1)
LEAGUE = {"main": "*", "past": ("*", 3)}


def trainer_of(root_dir, listeners, policies=LEAGUE, **changed):
    given = {"num_iterations": 14, "unroll_length": 16, "device": "cpu", "summary_period": 10**9}
    given |= {"algorithm": PPO, "batches": EPOCHS, "transforms": [ObservationNormalizer], **changed}
    learner = functools.partial(Learner, learning_rate=1e-3)
    environment = functools.partial(make_games, Kept, num_games=2)
    return Trainer(root_dir, environment=environment, policies=policies, learner=learner, listeners=listeners, **given)


def league(root_dir, *listeners, **changed):
    gin.bind_parameter("past/PolicySettings.snapshot_of", "main")
    return trainer_of(root_dir, [*listeners, Snapshots(period=30)], **changed)


def tensors_of(member):
    """A copy of the state of a policy's networks and transforms, without the progress of the run."""
    parts = {"algorithm": member.algorithm, "transforms": member.transforms}
    return {
        f"{part}.{name}": value.clone()
        for part, module in parts.items()
        for name, value in module.state_dict().items()
        if name != "progress" and isinstance(value, torch.Tensor)
    }


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class History(Listener):
    """Keeps the states of all policies after each iteration; in `extra_listeners`, behind those that change them."""

    def __init__(self):
        self.states, self.training, self.clocks = [], [], []

    def after_iteration(self, run, report):
        members = run.unroller.members
        self.states.append({member.name: tensors_of(member) for member in members})
        self.training.append([member.name for member in members if member.is_training])
        self.clocks.append(report.clock)


def test_snapshots_copy_main_only_at_their_clock(tmp_path):
    history = History()
    trainer = league(tmp_path, history)
    trainer.train()
    slots, taken = ("past0", "past1", "past2"), []
    before = {name: history.states[0][name] for name in slots}
    assert all(equal(before[name], before["past0"]) for name in slots)
    for clock, last, states in zip(history.clocks[1:], history.clocks, history.states[1:]):
        changed = [name for name in slots if not equal(states[name], before[name])]
        if clock // 30 == last // 30:
            assert changed == []
        else:
            assert changed == [slots[len(taken) % 3]] and equal(states[changed[0]], states["main"])
            taken += changed
        before = {name: states[name] for name in slots}
    assert len(taken) > 4
    log = (tmp_path / "log.txt").read_text()
    assert re.findall(r"(past\d) is now main of", log) == taken


def test_the_snapshots_of_a_new_run_are_the_new_policy(tmp_path):
    trainer = league(tmp_path)
    trainer.start()
    main, *slots = (tensors_of(member) for member in trainer.unroller.members)
    assert len(slots) == 3 and all(equal(slot, main) for slot in slots)
    trainer.close()


def check_equal_runs(one, other):
    for part in ("algorithm", "transforms", "learner"):
        states = (getattr(trainer, part).state_dict() for trainer in (one, other))
        torch.testing.assert_close(*states, rtol=0, atol=0)
    assert one.metrics.results() == other.metrics.results()
    assert one.clock.env_steps == other.clock.env_steps and one.clock.iterations == other.clock.iterations == 14
    states = [
        {member.name: member.seat.stream.state_dict() for member in each.unroller.members} for each in (one, other)
    ]
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_a_resumed_league_is_bit_identical(tmp_path):
    """After the last stop, at least one of the three snapshots is not written again."""
    gin.bind_parameter("Lineup.weights", {"main": 3.0, "past": 1.0})
    gin.bind_parameter("Lineup.requires", "main")
    saver, history = functools.partial(CheckpointSaver, period=10**9), History()
    whole = league(tmp_path / "whole", saver(), history)
    whole.train()
    for stop_at in (*(history.clocks[number - 1] for number in (2, 3, 12)), None):
        parts = league(tmp_path / "parts", saver(), stop_at=stop_at)
        parts.train()
        if stop_at is not None:
            states = {member.name: tensors_of(member) for member in parts.unroller.members}
            assert all(equal(states[name], history.states[parts.clock.iterations - 1][name]) for name in states)
    check_equal_runs(parts, whole)
    logs = [(tmp_path / name / "log.txt").read_text() for name in ("whole", "parts")]
    taken = [re.findall(r"past\d is now main of [\d,]+ steps", log) for log in logs]
    assert taken[0] == taken[1] and len(taken[0]) > 3


def test_snapshots_have_the_networks_of_their_policy_and_no_optimizer(tmp_path):
    gin.parse_config("main/MLP.layers = (24,)\nmain/PolicySettings.algorithm = @DQN")
    gin.bind_parameter("main/PolicySettings.batches", REPLAY)
    trainer = league(tmp_path)
    trainer.train()
    sizes = {name: value.shape for name, value in tensors_of(trainer.unroller.members[0]).items()}
    assert any(24 in shape for shape in sizes.values())
    for member in trainer.unroller.members[1:]:
        assert isinstance(member.algorithm, DQN) and not member.trains
        assert {name: value.shape for name, value in tensors_of(member).items()} == sizes
    assert trainer.learner.state_dict()["policies"].keys() == {"main"}
    assert trainer.batches.stored().keys() == {"main"}  # and no replay of the others takes memory


def test_neighbouring_slots_may_have_different_policies(tmp_path):
    for slot, source in (("past0", "x"), ("past1", "y")):
        gin.bind_parameter(f"{slot}/PolicySettings.snapshot_of", source)
    trainer = trainer_of(tmp_path, [Snapshots(period=60)], {"x": "*", "y": "*", "past": ("*", 2)})
    trainer.train()
    states = {member.name: tensors_of(member) for member in trainer.unroller.members}
    assert not equal(states["x"], states["y"]) and not equal(states["past0"], states["past1"])


@pytest.mark.parametrize(
    "bound, policies, listener, sentence",
    [
        ({}, LEAGUE, Snapshots, "Snapshots has no snapshots to write"),
        (
            {"past": "main"},
            LEAGUE,
            AlternateTraining,
            "past0 is a snapshot of main, and nothing writes the snapshot",
        ),
        (
            {"past": "man"},
            LEAGUE,
            Snapshots,
            "the other policies with these spaces are main, past1, past2",
        ),
        ({"past": "past0"}, LEAGUE, Snapshots, "snapshot_of is 'past0', which is a snapshot too"),
        ({}, None, AlternateTraining, "needs two policies that train, and here there is shared only"),
    ],
)
def test_leagues_that_cannot_be_are_refused(tmp_path, bound, policies, listener, sentence):
    for name, source in bound.items():
        gin.bind_parameter(f"{name}/PolicySettings.snapshot_of", source)
    with pytest.raises(UsageError, match=sentence):
        trainer_of(tmp_path, [listener(period=60)], policies).train()


@pytest.mark.parametrize(("name", "value"), [("algorithm", PPO), ("trains", True)])
def test_settings_of_a_snapshot_that_would_have_no_effect_are_refused(name, value):
    with pytest.raises(UsageError, match=f"PolicySettings.{name} is set, but the policy is a snapshot of 'main'"):
        PolicySettings(snapshot_of="main", **{name: value})


@pytest.mark.parametrize("listener", [Snapshots, AlternateTraining])
def test_leagues_need_several_policies(tmp_path, listener):
    with pytest.raises(UsageError, match=f"{listener.__name__} is for several policies, and this run has one"):
        given = {"algorithm": PPO, "environment": functools.partial(make_environment, "CartPole-v1")}
        Trainer(tmp_path, listeners=[listener(period=5)], num_iterations=1, **given).train()


def alternating(root_dir, *listeners, **changed):
    gin.bind_parameter("b/PolicySettings.algorithm", DQN)
    gin.bind_parameter("b/PolicySettings.batches", REPLAY)
    return trainer_of(root_dir, [*listeners, AlternateTraining(period=70)], "each", **changed)


def test_one_policy_trains_at_a_time(tmp_path):
    history = History()
    trainer = alternating(tmp_path, history, num_iterations=40)
    trainer.train()
    turns = []
    # A listener changes whose turn it is after an iteration, so the turn of iteration k is what iteration k - 1 left.
    for before, after, training in zip(history.states, history.states[1:], history.training):
        changed = [name for name in after if not equal(before[name], after[name])]
        assert len(training) == 1 and set(changed) <= set(training)
        turns += changed
    order = [name for k, name in enumerate(turns) if k == 0 or turns[k - 1] != name]
    assert order[:5] == ["a", "b", "c", "a", "b"]
    members = {member.name: member for member in trainer.unroller.members}
    assert trainer.clock.env_steps == sum(member.num_steps for member in members.values())
    # The updates of DQN follow the steps of its own turns.
    assert members["b"].learner.updates == (members["b"].num_steps - 60) // 10 > 0


def test_a_resumed_alternation_is_bit_identical(tmp_path):
    saver = functools.partial(CheckpointSaver, period=10**9)
    whole = alternating(tmp_path / "whole", saver())
    whole.train()
    for stop_at in (50, 71, 150, None):
        parts = alternating(tmp_path / "parts", saver(), stop_at=stop_at)
        parts.train()
    check_equal_runs(parts, whole)


def test_a_run_resumed_in_its_last_turn_reports_policies_that_trained_before(tmp_path):
    for stop_at in (150, None):
        listeners = [CheckpointSaver(period=10**9), AlternateTraining(period=120)]
        given = {"num_iterations": 12, "unroll_length": 8, "stop_at": stop_at}
        report = trainer_of(tmp_path, listeners, {"p": ("*", 2)}, **given).train()
    assert report.scalars["train/p0/learning_rate"] == report.scalars["train/p1/learning_rate"] == 1e-3
