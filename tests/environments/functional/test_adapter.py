"""Functional environments as the stream of time steps: rows, checkpoints, evaluation."""

import functools

import numpy as np
import pytest
import torch

from alfish import nest
from alfish.algorithms.ppo import PPO
from alfish.data import StepType
from alfish.environments import make_environment
from alfish.environments.functional import CartPole, FunctionalEnvironment, Uniform, advance, begin
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches
from alfish.training.trainer import Trainer

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


class Short(CartPole):
    """Is truncated soon; observations count the steps of an episode."""

    max_episode_steps = 12


def columns(environment, num_steps, act):
    """Rows of each environment in the order of time."""
    rows = [[] for _ in range(environment.num_envs)]

    def take(time_step, which):
        for column in torch.nonzero(which)[:, 0].tolist():
            rows[column].append(nest.map(lambda leaf, i=column: leaf[i], time_step))

    time_step = environment.reset()
    take(time_step, torch.ones(environment.num_envs))
    for _ in range(num_steps):
        time_step = environment.step(act(time_step))
        take(time_step, torch.ones(environment.num_envs))
        ended, first = environment.take_resets()
        take(first, ended)
        time_step = nest.where(ended, first, time_step)
    return rows


def by_spin(time_step):
    """Pushes that keep most poles up for 12 steps, but not all."""
    return (time_step.observation[:, 3] > 0).long() ^ (time_step.observation[:, 0] > 0.03).long()


def equal(one, other):
    pairs = zip(nest.leaves(one), nest.leaves(other), strict=True)
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


def test_each_row_follows_from_the_previous_by_the_class_functions():
    environment = FunctionalEnvironment(Short(), [3, 4, 5, 6])
    assert environment.uneven and not environment.seeds_rows
    kinds = []
    for column in columns(environment, 60, by_spin):
        assert column[0].step_type == FIRST
        length = 0
        for before, row in zip(column, column[1:]):
            kinds.append((int(row.step_type), float(row.discount)))
            if before.step_type == LAST:
                assert row.step_type == FIRST and row.reward == 0 and row.prev_action == 0 and row.discount == 1
                assert row.observation.abs().max() <= 0.05
                length = 0
                continue
            length += 1
            state = nest.map(lambda leaf: leaf[None], tuple(before.observation))
            after = CartPole().transition(state, row.prev_action[None], {})
            torch.testing.assert_close(row.observation, torch.stack(after)[:, 0])
            assert row.reward == 1 and row.reward.dtype == torch.float32
            terminated = bool(CartPole().terminal(after, {}))
            assert row.step_type == (LAST if terminated or length == 12 else MID)
            assert row.discount == (0 if terminated else 1)
    assert {(LAST, 1.0), (MID, 1.0)} <= set(kinds)


def test_terminated_rows_have_discount_0():
    environment = FunctionalEnvironment(CartPole(), range(4))
    rows = [row for column in columns(environment, 60, lambda row: row.step_type * 0) for row in column]
    last = [row for row in rows if row.step_type == LAST]
    assert len(last) >= 16 and all(row.discount == 0 and row.observation[2].abs() > 0.2 for row in last)


def follow(environment, num_steps, generator):
    rows = []
    for _ in range(num_steps):
        rows.append(environment.step(torch.randint(2, (environment.num_envs,), generator=generator)))
        if (resets := environment.take_resets()) is not None:
            rows.append(resets)
    return rows


@pytest.mark.parametrize("evaluation", [False, True])
def test_a_restored_environment_continues_with_the_same_bits(evaluation):
    first = make_environment(Short, num_envs=3, seed=1, evaluation=evaluation)
    second = make_environment(Short, num_envs=3, seed=2, evaluation=evaluation)
    assert first.state_dict() == {} and first.load_state_dict({}) is False
    first.reset()
    follow(first, 20, torch.Generator().manual_seed(0))
    saved = nest.map(torch.clone, nest.map(lambda leaf: leaf, first.state_dict()["episodes"]))
    state = first.state_dict()
    expected = follow(first, 40, torch.Generator().manual_seed(5))
    assert equal(state["episodes"], saved), "a checkpoint does not change while its environment goes on"
    assert second.load_state_dict(state) is True
    assert equal(follow(second, 40, torch.Generator().manual_seed(5)), expected)
    assert type(second.state) is type(first.state)


def test_a_state_of_other_environments_is_refused():
    first, second = (make_environment(Short, num_envs=count) for count in (3, 4))
    first.reset()
    with pytest.raises(UsageError, match=r"checkpoint's state does not match 4 environments"):
        second.load_state_dict(first.state_dict())


def test_joint_draws_equal_single_step_draws():
    for evaluation in (False, True):
        one, other = (FunctionalEnvironment(CartPole(), [1, 2, 3], evaluation=evaluation) for _ in range(2))
        block = one.draw(70)
        assert block.shape == (70, 3, 4)
        assert torch.equal(block, torch.cat([other.draw(1) for _ in range(70)]))


def test_a_program_may_step_it_by_the_pure_function():
    stepped, pure = (FunctionalEnvironment(Short(), [7, 8]) for _ in range(2))
    stepped.reset(), pure.reset()
    block = pure.draw(30)
    actions = torch.randint(2, (30, 2), generator=torch.Generator().manual_seed(0))
    for t in range(30):
        row = stepped.step(actions[t])
        result = advance(pure.functional, pure.state, pure.clock, actions[t], block[t])
        pure.state, pure.clock, pure.observation = result[:3]
        assert torch.equal(row.observation, result.final_observation)
    assert equal(stepped.state, pure.state) and torch.equal(stepped.clock, pure.clock)
    assert torch.equal(stepped.draw(1), pure.draw(1))


def episode(environment, seed, row):
    """Rewards and observations of the episode of a seed in one row, pushed by the sign of the spin."""
    num_envs = environment.num_envs
    seeds = [seed if i == row else 100 + i for i in range(num_envs)]
    time_step, found = environment.reset(seeds), []
    for _ in range(15):
        found.append((time_step.observation[row].tolist(), float(time_step.reward[row]), int(time_step.step_type[row])))
        if time_step.step_type[row] == LAST:
            return found
        time_step = environment.step(by_spin(time_step))
    return found


def test_a_seeds_episode_does_not_depend_on_row_or_number_of_environments():
    alone = episode(make_environment(Short, num_envs=1, evaluation=True), 5, 0)
    several = make_environment(Short, num_envs=9, evaluation=True)
    assert several.seeds_rows and several.resets_rows and not several.uneven
    assert episode(several, 5, 6) == episode(several, 5, 2) == alone


def test_some_environments_are_reset_and_the_others_continue():
    environment = make_environment(Short, num_envs=3, evaluation=True)
    before = environment.reset([1, 2, 3])
    for _ in range(4):
        time_step = environment.step(by_spin(before))
    after = environment.reset([None, 7, None], np.array([False, True, False]))
    assert torch.equal(after.observation[[0, 2]], time_step.observation[[0, 2]])
    expected = make_environment(Short, num_envs=1, evaluation=True).reset([7]).observation[0]
    assert torch.equal(after.observation[1], expected)
    assert environment.clock.tolist() == [4, 0, 4]


def test_the_seed_of_a_run_decides_its_episodes():
    def start(seed, **arguments):
        return make_environment(CartPole, num_envs=4, seed=seed, **arguments).reset().observation

    assert torch.equal(start(0), start(0)) and not torch.equal(start(0), start(1))
    again = make_environment(CartPole, num_envs=4, seed=0)
    assert not torch.equal(again.reset().observation, again.reset().observation)
    assert torch.equal(again.reset([3] * 4).observation, again.reset([3] * 4).observation)


class Fields(CartPole):
    """Has actions and observations in units of its own."""

    from gymnasium import spaces

    observation_space = spaces.Dict(pose=spaces.Box(-10, 10, (2,), np.float64), side=spaces.Discrete(2, start=5))
    action_space = spaces.Box(-2, 6, (1, 1), np.float32)
    reward_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def transition(self, state, action, rng, params=None):
        return super().transition(state, (action[:, 0, 0] > 0).long(), rng)

    def observation(self, state, rng, params=None):
        return {"pose": torch.stack(state[:2], -1).double(), "side": (state.position > 0).long() + 5}

    def reward(self, state, action, next_state, rng, params=None):
        return torch.stack([action[:, 0, 0], state.position], -1)


def test_observations_actions_and_vector_rewards_are_converted():
    environment = make_environment(Fields, num_envs=2, rewards=["push", "place"])
    time_step = environment.reset()
    assert environment.reward_spec.names == ("push", "place")
    assert time_step.observation["pose"].dtype == torch.float32 and set(time_step.observation["side"].tolist()) <= {
        0,
        1,
    }
    time_step = environment.step(torch.tensor([[-1.0], [9.0]]))
    assert time_step.reward[:, 0].tolist() == [-2, 6] and time_step.prev_action.tolist() == [[-1], [1]]
    assert time_step.reward.shape == (2, 2) and environment.take_resets()[1].reward.shape == (2, 2)


def test_a_step_converts_observations_by_the_tensors_that_it_is_given():
    """A graph cannot hold tensors of its own."""
    environment = make_environment(Fields, num_envs=2, rewards=["push", "place"])
    environment.reset()
    tensors, action, u = environment.tensors(), torch.zeros(2, 1), environment.draw(1)[0]
    other = nest.map(lambda leaf: leaf + 1 if leaf.dtype == torch.int64 and leaf.ndim == 0 else leaf, tensors)
    _, expected, _, begun = environment.advanced(tensors, environment.episodes, action, u)
    _, found, _, other_begun = environment.advanced(other, environment.episodes, action, u)
    assert torch.equal(found.observation["side"], expected.observation["side"] - 1)
    assert torch.equal(other_begun.observation["side"], begun.observation["side"] - 1)
    assert torch.equal(found.observation["pose"], expected.observation["pose"])


def trained(root_dir, num_env_steps, **arguments):
    trainer = Trainer(
        root_dir,
        algorithm=PPO,
        environment=functools.partial(make_environment, env_id=Short, num_envs=8),
        batches=functools.partial(EpochBatches, num_epochs=2, minibatch_size=32),
        unroll_length=16,
        num_env_steps=num_env_steps,
        **arguments,
    )
    trainer.train()
    return [leaf.detach().clone() for leaf in trainer.algorithm.parameters()], trainer


def test_a_stopped_run_continues_bit_for_bit(tmp_path):
    whole, _ = trained(tmp_path / "whole", 1000)
    trained(tmp_path / "halves", 500)
    halves, _ = trained(tmp_path / "halves", 1000)
    assert all(torch.equal(one, other) for one, other in zip(whole, halves, strict=True))


def test_the_class_is_checked_once_and_then_not_again():
    calls = []

    class Counted(CartPole):
        def terminal(self, state, rng, params=None):
            calls.append(1)
            return super().terminal(state, rng)

    environment = FunctionalEnvironment(Counted(), [0, 1])
    environment.reset(), environment.reset()
    assert len(calls) == 2  # which are compared
    environment.step(torch.zeros(2, dtype=torch.int64))
    assert len(calls) == 3


def test_observation_noise_belongs_to_its_step():
    class Noisy(CartPole):
        initial_draws = {**CartPole.initial_draws, "noise": Uniform(100, 200)}
        transition_draws = {"noise": Uniform()}

        def observation(self, state, rng, params=None):
            return torch.stack([*state[:3], rng["noise"]], -1)

    state, clock, observation = begin(Noisy(), torch.full((2, 6), 0.5))
    assert observation[:, 3].tolist() == [150, 150]
    state = state._replace(position=torch.tensor([9.0, 0.0]))
    stepped = advance(Noisy(), state, clock, torch.zeros(2, dtype=torch.int64), torch.full((2, 6), 0.25))
    assert stepped.final_observation[:, 3].tolist() == [0.25, 0.25]
    assert stepped.observation[:, 3].tolist() == [125, 0.25]
