"""A test of an algorithm on a batch made by hand: python -m pytest examples/test_small_ddpg.py."""

import numpy as np
import torch
from gymnasium import spaces

from alfish import specs
from alfish.data import Experience, StepType, TimeStep
from examples.small_ddpg import SmallDDPG

OBSERVATION, ACTION = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-1, 1, (2,), np.float32)


def window(discount):
    """Returns a window [2, 4]: rewards of 1, and the discount of the second time step."""
    step = TimeStep(
        step_type=torch.tensor([StepType.FIRST, StepType.LAST])[:, None].expand(2, 4),
        reward=torch.tensor([0.0, 1.0])[:, None].expand(2, 4),
        discount=torch.tensor([1.0, discount])[:, None].expand(2, 4),
        observation=torch.rand(2, 4, 3),
        prev_action=torch.zeros(2, 4, 2),
        env_id=torch.arange(4).expand(2, 4),
    )
    return Experience(step, action=torch.rand(2, 4, 2), info=None, state=None)


def test_only_an_episode_that_terminated_has_no_value_after_its_end():
    algorithm = SmallDDPG(OBSERVATION, ACTION, specs.reward_spec(), gamma=0.9)
    terminated = algorithm.train_step(window(discount=0.0), None).info
    assert terminated.target.tolist() == [[1.0] * 4]
    experience = window(discount=1.0)  # ended by a time limit
    later = experience.time_step.observation[1:]
    expected = 1 + 0.9 * algorithm.target_critic(later, algorithm.target_actor(later))
    torch.testing.assert_close(algorithm.train_step(experience, None).info.target, expected)


def test_each_group_has_a_loss_for_each_transition():
    algorithm = SmallDDPG(OBSERVATION, ACTION, specs.reward_spec())
    experience = window(discount=1.0)
    losses = algorithm.calc_loss(experience, algorithm.train_step(experience, None).info).loss
    assert set(losses) == set(algorithm.parameter_groups())
    assert all(loss.shape == (1, 4) for loss in losses.values())
