"""Vector rewards: their entries have discounts and weights of their own, and one number is maximized."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish import specs
from alfish.algorithms.a2c import A2C
from alfish.algorithms.appo import APPO
from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.data import StepType, TimeStep
from alfish.errors import UsageError
from alfish.functional.values import Vector, values_of

OBSERVATION = spaces.Box(-1, 1, (3,), np.float32)
BOX = spaces.Box(-1, 1, (1,), np.float32)
ON_POLICY = [A2C, PPO, APPO]


def time_step(reward, discount):
    """Rows `[T, 1]` of an episode that goes on."""
    reward, discount = torch.tensor(reward)[:, None], torch.tensor(discount)[:, None]
    step_type = torch.full(discount.shape, StepType.MID, dtype=torch.int32)
    return TimeStep(step_type, reward, discount, None, None, torch.zeros(1, dtype=torch.int32))


def test_each_entry_has_a_discount_of_its_own():
    values = Vector([0.5, 1.0], [1.0, 1.0])
    _, discount = values.reward_and_discount(time_step([[0.0, 0.0], [0.0, 0.0]], [1.0, 0.0]))
    assert discount[:, 0].tolist() == [[0.5, 1.0], [0.0, 0.0]]


def test_an_entry_that_ignores_ends_bootstraps_where_an_episode_terminated():
    values = Vector([0.5, 0.75], [1.0, 1.0])
    values.ignore_ends(1)
    _, discount = values.reward_and_discount(time_step([[0.0, 0.0], [0.0, 0.0]], [1.0, 0.0]))
    assert discount[:, 0].tolist() == [[0.5, 0.75], [0.0, 0.75]]


def test_weights_scale_what_is_maximized_and_not_the_losses():
    values = Vector([0.9, 0.9], [2.0, -1.0])
    assert values.scalarized(torch.tensor([3.0, 4.0])) == 2.0
    assert values.total(torch.tensor([3.0, 4.0])) == 7.0


def test_the_pessimistic_critic_of_a_row_gives_all_its_values():
    values = Vector([0.9, 0.9], [1.0, 2.0])
    q = torch.tensor([[[5.0, 0.0], [1.0, 4.0]], [[0.0, 3.0], [9.0, 1.0]]])  # critics, rows, entries
    assert values.least(q).tolist() == [[5.0, 0.0], [1.0, 4.0]]
    values.weights.copy_(torch.tensor([1.0, 0.0]))
    assert values.least(q).tolist() == [[0.0, 3.0], [1.0, 4.0]]


def test_a_bonus_has_its_own_entry_with_weight_1_and_reward_0():
    values = Vector([0.5, 0.25], [2.0, 3.0], has_bonus=True)
    reward, discount = values.reward_and_discount(time_step([[4.0, 5.0]], [1.0]))
    assert reward[0, 0].tolist() == [4.0, 5.0, 0.0] and discount[0, 0].tolist() == [0.5, 0.25, 0.5]
    value = values.with_bonus(torch.tensor([1.0, 1.0, 1.0]), torch.tensor(10.0))
    assert value.tolist() == [1.0, 1.0, 11.0] and values.scalarized(value) == 2 + 3 + 11


def test_a_bonus_added_to_a_single_entry_has_weight_1():
    value = Vector([0.5], [1.0], has_bonus=True).with_bonus(torch.tensor([1.0]), torch.tensor(10.0))
    assert value.tolist() == [11.0]
    with pytest.raises(
        UsageError,
        match="with a single entry the weight would also scale the bonus of SAC; leave the weight out",
    ):
        SAC(OBSERVATION, BOX, specs.reward_spec(1), reward_weights=[2.0])


def test_weights_are_saved_and_discounts_belong_to_the_configuration():
    assert list(Vector([0.9], [1.0]).state_dict()) == ["weights"]


@pytest.mark.parametrize("algorithm", ON_POLICY)
def test_the_advantage_is_weighted_before_it_is_normalized(algorithm):
    made = algorithm(
        OBSERVATION, spaces.Discrete(2), specs.reward_spec(2), reward_weights=[2.0, 0.0], normalize_advantage=True
    )
    advantage = torch.randn(5, 3, 2)
    step_type = torch.full((6, 3), StepType.MID, dtype=torch.int32)
    alone = algorithm(OBSERVATION, spaces.Discrete(2), specs.reward_spec(), normalize_advantage=True)
    expected = alone.policy_advantage(2 * advantage[..., 0], step_type)
    assert torch.equal(made.policy_advantage(advantage, step_type), expected)
    made.reward_weights.copy_(torch.tensor([0.0, 2.0]))
    expected = alone.policy_advantage(2 * advantage[..., 1], step_type)
    assert torch.equal(made.policy_advantage(advantage, step_type), expected)


@pytest.mark.parametrize("algorithm", ON_POLICY)
def test_lists_of_another_length_than_the_reward_are_refused(algorithm):
    parts = OBSERVATION, spaces.Discrete(2), specs.reward_spec(2)
    with pytest.raises(UsageError, match=r"reward_weights is \[1.0\], but the reward has 2 entries"):
        algorithm(*parts, reward_weights=[1.0])
    with pytest.raises(UsageError, match=r"gamma is \[0.9, 0.9, 0.9\], but the reward has 2 entries"):
        algorithm(*parts, gamma=[0.9, 0.9, 0.9])
    with pytest.raises(
        UsageError,
        match=r"reward_weights is \[1.0, 1.0\], which is for a vector reward, but the reward is a",
    ):
        algorithm(*parts[:2], specs.reward_spec(), reward_weights=[1.0, 1.0])
    with pytest.raises(UsageError, match=r"gamma is 1.5; it must be a number in \[0, 1\]"):
        algorithm(*parts, gamma=1.5)


@pytest.mark.parametrize("listed", [np.array, torch.tensor])
def test_arrays_of_discounts_and_weights_are_taken_as_lists(listed):
    parts = OBSERVATION, spaces.Discrete(2), specs.reward_spec(2)
    values = PPO(*parts, gamma=listed([0.5, 0.75]), reward_weights=listed([0.0, 2.0])).values
    assert values.gamma.tolist() == [0.5, 0.75] and values.weights.tolist() == [0, 2]
    with pytest.raises(
        UsageError,
        match=r"gamma is \[0.5, 0.75\], which is for a vector reward, but the reward is a scalar",
    ):
        PPO(*parts[:2], specs.reward_spec(), gamma=listed([0.5, 0.75]))


def test_a_scalar_reward_has_no_weights():
    made = A2C(OBSERVATION, spaces.Discrete(2), specs.reward_spec())
    assert made.reward_weights is None and not any("objectives" in name for name in made.state_dict())
    assert values_of(made, specs.reward_spec(), 0.9, None).scalarized(7) == 7
