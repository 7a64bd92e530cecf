"""The unroller that steps environments in groups: the rows of each group, their order, and what overlaps."""

import functools

import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv
from scripted import FIRST, Scripted, ScriptedOffPolicy, assert_equal
from toys import NestedBandit, OneState, Stamped
from worker_parts import Curriculum, Levels, Remembering

from alfish import nest
from alfish.algorithms.ppo import PPO
from alfish.environments import VectorEnvironment, make_environment
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches
from alfish.metrics import EnvInfo
from alfish.training.trainer import Trainer
from alfish.transforms import ObservationNormalizer, Transforms
from alfish.unrollers import DoubleBufferedUnroller, SyncUnroller

STAMPED = functools.partial(Stamped, (3, 5, 1, 8), True)
EXACT = functools.partial(make_environment, "alfish/CartPole-v1")  # saves its episodes


def unroller_of(factory, algorithm=Scripted, factories=(), num_envs=4, seed=7, **settings):
    """Builds an unroller whose environments are made by `factory`."""
    here = factory(seed=seed, num_envs=num_envs)
    transforms = Transforms(factories, here.observation_spec, here.reward_spec)
    torch.manual_seed(0)
    made = algorithm(transforms.observation_spec, here.action_spec, here.reward_spec)
    unroller = DoubleBufferedUnroller(here, made, transforms, **settings)
    unroller.bind(factory, 4, seed)
    unroller.check_learners()
    return unroller


def factory_of(env_id, vectorization="sync", **settings):
    return functools.partial(make_environment, env_id, vectorization=vectorization, **settings)


def unrolls(unroller, count=4, length=4):
    torch.manual_seed(1)
    try:
        return [nest.map(torch.clone, nest.tensors(unroller.unroll(length))) for _ in range(count)]
    finally:
        unroller.close()


@pytest.mark.parametrize("algorithm", [Scripted, ScriptedOffPolicy, PPO, Remembering])
def test_overlapping_steps_make_the_same_rows(algorithm):
    env_id = NestedBandit if algorithm is PPO else STAMPED
    found, expected = (
        unrolls(unroller_of(factory_of(env_id, vectorization), algorithm)) for vectorization in ("async", "sync")
    )
    assert_equal(found, expected)


def test_columns_are_those_of_groups_that_step_alone():
    unroller = unroller_of(EXACT, num_envs=6, num_groups=3)
    unroller.unroll(4)
    states = [group.state_dict() for group in unroller._groups]
    whole = nest.tensors(unroller.unroll(4))
    assert whole.time_step.env_id[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert len(whole.time_step.observation[0].unique(dim=0)) == 6  # each group has seeds of its own
    for index, (group, state) in enumerate(zip(unroller._groups, states)):
        alone = SyncUnroller(group.environment, group._algorithm, group._transforms)
        alone.load_state_dict(state)
        own = nest.map(lambda leaf, i=index: leaf[:, 2 * i : 2 * i + 2], whole.time_step)
        assert_equal(nest.tensors(alone.unroll(4)).time_step, own)


@pytest.mark.parametrize("numpy_policy", [None, 0])
def test_discrete_actions_equal_those_of_one_group(numpy_policy):
    """The groups act in turn, so they draw what one group draws for all columns."""
    factory = factory_of(OneState)
    found = unroller_of(factory, PPO, num_envs=6, num_groups=3, numpy_policy=numpy_policy)
    given = found._algorithm, found._transforms
    one_group = SyncUnroller(factory(seed=7, num_envs=6), *given, numpy_policy=numpy_policy)
    actions, expected = [[one.action for one in unrolls(each)] for each in (found, one_group)]
    assert_equal(actions, expected)
    assert len(expected[0].unique()) > 1


def test_a_group_steps_while_the_next_group_acts(monkeypatch):
    events = []

    def recorded(name):
        original = getattr(AsyncVectorEnv, name)

        def call(env, *arguments, **keywords):
            events.append((name, env))
            return original(env, *arguments, **keywords)

        monkeypatch.setattr(AsyncVectorEnv, name, call)

    recorded("step_async")
    recorded("step_wait")
    unroller = unroller_of(factory_of(STAMPED, "async"))
    unroller.unroll(3)
    first, second = (group.environment.env for group in unroller._groups)
    unroller.close()
    both = [("step_async", first), ("step_async", second)]
    between = [("step_wait", first), ("step_async", first), ("step_wait", second), ("step_async", second)]
    assert events == both + 2 * between + [("step_wait", first), ("step_wait", second)]


def test_a_step_of_one_vector_environment_may_be_made_in_halves():
    def rows(halves):
        environment = make_environment(STAMPED, 2, vectorization="async", seed=5)
        found = [environment.reset()]
        for t in range(12):
            action = np.array([t % 3, 1])
            if halves:
                environment.begin(action)
            found.append(environment.step(action))
        environment.close()
        return nest.tensors(found)

    assert_equal(rows(halves=True), rows(halves=False))


def test_environments_that_are_in_a_step_are_closed_without_waiting():
    environment = make_environment(functools.partial(Stamped, seconds=600.0), 2, vectorization="async", seed=5)
    environment.reset()
    environment.begin(np.zeros(2, np.int64))
    environment.close()
    assert not any(process.is_alive() for process in environment.env.processes)


@pytest.mark.parametrize("algorithm", [Scripted, Remembering])
def test_a_resumed_unroller_continues_bit_for_bit(algorithm):
    unroller = unroller_of(EXACT, algorithm)
    unroller.unroll(5)
    state = unroller.state_dict()
    expected = nest.map(torch.clone, nest.tensors(unroller.unroll(5)))
    resumed = unroller_of(EXACT, algorithm)
    resumed.load_state_dict(state)
    assert_equal(nest.tensors(resumed.unroll(5)), expected)


@pytest.mark.parametrize("num_groups", [2, 4])
def test_states_of_other_unrollers_begin_new_episodes(num_groups):
    unroller = unroller_of(factory_of(STAMPED), num_groups=2)
    unroller.policy_version = 3
    unroller.unroll(5)
    other = unroller_of(factory_of(STAMPED), num_groups=4)
    other.load_state_dict(unroller.state_dict())
    assert other.policy_version == 3
    assert (other.unroll(2).time_step.step_type[0] == FIRST).all()


def test_calls_and_progress_reach_every_group_also_after_a_resume():
    unroller = unroller_of(factory_of(functools.partial(Levels, (2,))))
    unroller.unroll(1)
    unroller.environment.call("set_level", 3.0)
    rows = unroller.unroll(1)
    assert (rows.time_step.observation[1, :, 1] == 3).all()
    state = unroller.state_dict()
    resumed = unroller_of(factory_of(functools.partial(Levels, (2,))))
    resumed.load_state_dict(state)
    resumed.unroll(4)
    assert (resumed.unroll(1).time_step.observation[0, :, 0] == 3).all()

    curriculum = unroller_of(factory_of(Curriculum))
    curriculum._algorithm.progress.fill_(0.25)
    assert (curriculum.unroll(6).time_step.observation[-1, :, 0] == 0.25).all()


def test_each_group_has_its_own_state_of_the_transforms():
    unroller = unroller_of(factory_of(STAMPED), factories=[ObservationNormalizer])
    whole = unroller.unroll(3)
    assert nest.tensors(whole.time_step.observation).shape == (4, 4, 3)


def test_metrics_read_infos_of_all_groups(tmp_path):
    trainer = Trainer(
        tmp_path,
        algorithm=PPO,
        environment=functools.partial(make_environment, STAMPED, num_envs=4),
        batches=functools.partial(EpochBatches, num_epochs=1, minibatch_size=16),
        unroller=DoubleBufferedUnroller,
        extra_metrics=[EnvInfo(["episode"])],
        unroll_length=16,
        num_iterations=2,
    )
    trainer.train()
    scalars = trainer.metrics.results()
    assert scalars["average_return"] > 0 and any("episode" in name for name in scalars)


def test_the_number_of_groups_must_divide_the_number_of_environments():
    with pytest.raises(UsageError, match=r"num_groups is 3, which does not divide the 4 environments; set make_env"):
        unroller_of(factory_of(STAMPED), num_groups=3)


def test_a_factory_must_take_the_number_of_environments():
    def fixed(seed, num_envs=None):
        return make_environment(STAMPED, 4, seed=seed)

    unroller = unroller_of(fixed)
    with pytest.raises(UsageError, match="made 4 environments, but 2 are needed for each of 2 groups"):
        unroller.unroll(1)
    unroller.close()


def test_closed_before_the_first_unroll_it_closes_the_given_environment():
    unroller = unroller_of(factory_of(STAMPED, "async"))
    assert isinstance(unroller.environment, VectorEnvironment)
    unroller.close()
    assert unroller.environment.env.closed
