"""PQN: targets of an unroll by hand, and what its loss trains."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish import specs
from alfish.algorithms.pqn import PQN
from alfish.data import Experience, StepType, TimeStep

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
OBSERVATION = spaces.Box(-10, 10, (1,), np.float32)


class Table(torch.nn.Module):
    """Two actions whose values at an observation x are (x, x - 1)."""

    def __init__(self, observation_spec, num_actions):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.ones(2))

    def initial_state(self, batch_size):
        return None

    def forward(self, time_step, state):
        x = time_step.observation
        return torch.cat([x, x - 1], -1) * self.slope, state


def unroll(kinds, rewards, discounts, observations, actions):
    column = [torch.tensor(x)[:, None] for x in (rewards, discounts, observations, actions)]
    step_type = torch.tensor(kinds, dtype=torch.int32)[:, None]
    step = TimeStep(step_type, column[0], column[1], column[2][..., None], None, None)
    return Experience(step, column[3], None, None)


def prepared(pqn, experience):
    with torch.no_grad():
        return pqn.preprocess_experience(experience)


def test_targets_mix_greedy_values_and_returns_whatever_was_explored():
    pqn = PQN(OBSERVATION, spaces.Discrete(2), specs.reward_spec(), q_network=Table, gamma=0.5, lambda_=0.25)
    experience = unroll([FIRST, MID, MID], [0.0, 1.0, 2.0], [1.0] * 3, [3.0, 4.0, 8.0], [1, 1, 0])
    last = 2 + 0.5 * 8
    first = 1 + 0.5 * (0.75 * 4 + 0.25 * last)
    assert prepared(pqn, experience).info.target[:, 0].tolist() == [first, last]


@pytest.mark.parametrize("discount, expected", [(0.0, 1.0), (1.0, 1.0 + 0.5 * 4)])
def test_a_time_limit_bootstraps_and_an_end_does_not(discount, expected):
    pqn = PQN(OBSERVATION, spaces.Discrete(2), specs.reward_spec(), q_network=Table, gamma=0.5, lambda_=1.0)
    experience = unroll([FIRST, LAST, FIRST], [0.0, 1.0, 0.0], [1.0, discount, 1.0], [3.0, 4.0, 8.0], [1, 0, 0])
    assert prepared(pqn, experience).info.target[0, 0].item() == expected


def test_the_loss_trains_only_the_taken_action():
    pqn = PQN(OBSERVATION, spaces.Discrete(2), specs.reward_spec(), q_network=Table, gamma=0.5)
    experience = prepared(pqn, unroll([FIRST, MID], [0.0, 1.0], [1.0, 1.0], [3.0, 4.0], [1, 1]))
    rows = experience._replace(time_step=TimeStep(*(x if x is None else x[:-1] for x in experience.time_step)),
                               action=experience.action[:-1])  # fmt: skip
    loss = pqn.calc_loss(rows, pqn.train_step(rows, None).info).loss
    assert loss.item() == pytest.approx(0.5 * (1 + 0.5 * 4 - 2) ** 2)
    loss.sum().backward()
    assert pqn.q_network.slope.grad[0] == 0 and pqn.q_network.slope.grad[1] != 0
