"""`DeviceUnroller`: the rows of `SyncUnroller`, and their records one unroll later."""

import functools

import pytest
import torch
from fakes import StampedSimulator
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from scripted import ScriptedOffPolicy, assert_equal
from toys import OneState

from alfish import nest
from alfish.algorithms.acting import changing_tensors
from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.environments import VectorEnvironment, make_environment
from alfish.environments.functional.tasks import Pendulum
from alfish.environments.simulator import SimulatorEnvironment
from alfish.errors import RunError, UsageError
from alfish.learner.batches import ReplayBatches
from alfish.learner.learner import Learner
from alfish.metrics import AverageReturn, EnvironmentSteps, NumberOfEpisodes
from alfish.networks import MLP, CriticEnsemble
from alfish.replay import AlignedRingBuffer
from alfish.training.listeners import CheckpointSaver, Summaries
from alfish.training.trainer import Trainer
from alfish.transforms import Transforms
from alfish.unrollers import DeviceUnroller, SyncUnroller

SMALL = functools.partial(
    SAC, actor_mlp=functools.partial(MLP, layers=(8,)), critic=functools.partial(CriticEnsemble, layers=(8,))
)
CARTPOLE = "alfish/CartPole-v1"


class ShortPendulum(Pendulum):
    max_episode_steps = 7


SAME_STEP = functools.partial(SyncVectorEnv, [OneState] * 3, autoreset_mode=AutoresetMode.SAME_STEP)


def unroller_of(kind, algorithm=ScriptedOffPolicy, env_id=CARTPOLE):
    environment = make_environment(env_id, 3, seed=0)
    transforms = Transforms((), environment.observation_spec, environment.reward_spec)
    torch.manual_seed(0)
    return kind(
        environment,
        algorithm(transforms.observation_spec, environment.action_spec, environment.reward_spec),
        transforms,
    )


def assert_same(found, expected):
    assert_equal(nest.leaves(nest.tensors(found)), nest.leaves(nest.tensors(expected)))


def test_rows_are_those_of_the_sync_unroller_and_records_come_one_unroll_later():
    late, plain = unroller_of(DeviceUnroller), unroller_of(SyncUnroller)
    previous = None
    for length in (3, 1, 40, 2):
        assert_same(late.unroll(length), plain.unroll(length))
        assert late.num_steps == plain.num_steps
        assert (late.records is None) == (previous is None)
        assert_same(late.records, previous)
        previous = plain.records
    assert_same(late.late_records(), previous)
    assert late.late_records() is None


def trainer_of(root_dir, unroller, **settings):
    return Trainer(
        root_dir,
        algorithm=SMALL,
        environment=functools.partial(make_environment, ShortPendulum, 2),
        unroller=unroller,
        batches=functools.partial(
            ReplayBatches,
            capacity=100,
            batch_size=8,
            warmup_env_steps=8,
            buffer=functools.partial(AlignedRingBuffer, end_fraction=0.5),
        ),
        learner=functools.partial(Learner, compile=False),
        metrics=[AverageReturn(), EnvironmentSteps(), NumberOfEpisodes()],
        unroll_length=1,
        num_env_steps=64,
        summary_period=16,
        listeners=[CheckpointSaver(16), Summaries()],
        seed=3,
        device="cpu",
        **settings,
    )


def rows_of(root_dir):
    header, *rows = (line.split(",") for line in (root_dir / "metrics.csv").read_text().splitlines())
    kept = [k for k, name in enumerate(header) if "time" not in name and "seconds" not in name]
    return [[row[k] for k in kept] for row in (header, *rows)]


@pytest.mark.parametrize("stop_at", [32, 40])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, stop_at):
    states = []
    for name, stops in (("whole", [None]), ("parts", [stop_at, None])):
        for stop in stops:
            trainer = trainer_of(tmp_path / name, DeviceUnroller, stop_at=stop)
            trainer.train()
        states.append([*changing_tensors(trainer.algorithm, trainer.transforms)])
    assert_equal(*states)
    whole, parts = rows_of(tmp_path / "whole"), rows_of(tmp_path / "parts")
    assert [row for row in parts if row in whole] == whole


def test_metrics_lag_one_unroll_until_the_end_of_the_run(tmp_path):
    found = []
    for name, kind in (("plain", functools.partial(SyncUnroller, numpy_policy=None)), ("late", DeviceUnroller)):
        trainer_of(tmp_path / name, kind).train()
        found.append(rows_of(tmp_path / name))
    (header, *plain), (_, *late) = found
    column = header.index("metrics/environment_steps")
    assert [float(row[column]) for row in plain] == [16, 32, 48, 64]
    assert [float(row[column]) for row in late] == [14, 30, 46, 64]
    assert late[-1] == plain[-1]


def test_a_row_that_is_not_finite_ends_the_run_one_unroll_later():
    unroller = unroller_of(DeviceUnroller)
    unroller.unroll(1)
    unroller.environment.episodes[0].position.fill_(float("nan"))
    unroller.unroll(1)
    with pytest.raises(RunError, match="not finite"):
        unroller.unroll(1)


def test_the_last_unroll_of_a_run_and_that_before_a_checkpoint_are_checked():
    for call in ("late_records", "state_dict"):
        unroller = unroller_of(DeviceUnroller)
        unroller.unroll(1)
        unroller.environment.episodes[0].position.fill_(float("nan"))
        unroller.unroll(1)
        assert unroller.may_save
        with pytest.raises(RunError, match="not finite"):
            getattr(unroller, call)()
        assert not unroller.may_save


def test_a_step_in_which_all_environments_reset_is_not_counted():
    counts = []
    for kind in (SyncUnroller, DeviceUnroller):
        environment = SimulatorEnvironment(StampedSimulator(3, "cpu", final="always", lengths=(5, 3)), seed=0)
        transforms = Transforms((), environment.observation_spec, environment.reward_spec)
        specs = environment.observation_spec, environment.action_spec, environment.reward_spec
        unroller = kind(environment, ScriptedOffPolicy(*specs), transforms)
        found = []
        for number in range(6):
            if number == 3:
                environment.load_state_dict({})  # the next step resets, as after an evaluation in this simulator
                unroller.truncate_episodes()
            unroller.unroll(2)
            found.append(unroller.num_steps)
        counts.append(found)
    assert counts[0] == counts[1] == [6, 6, 6, 3, 6, 6]


@pytest.mark.parametrize(("algorithm", "env_id"), [(PPO, CARTPOLE), (ScriptedOffPolicy, OneState)])
def test_refuses_other_algorithms_and_environments(algorithm, env_id):
    with pytest.raises(UsageError, match=r"DeviceUnroller is for off-policy .* bind Trainer.unroller = @SyncUnroller"):
        unroller_of(DeviceUnroller, algorithm, env_id)


def test_refuses_environments_of_arrays_that_reset_in_the_same_step():
    environment = VectorEnvironment(SAME_STEP(), seeds=[1, 2, 3])
    transforms = Transforms((), environment.observation_spec, environment.reward_spec)
    specs = environment.observation_spec, environment.action_spec, environment.reward_spec
    with pytest.raises(UsageError, match="environments of tensors"):
        DeviceUnroller(environment, ScriptedOffPolicy(*specs), transforms)
