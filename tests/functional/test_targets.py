"""Windows as transitions: row 0 and the row from which its return bootstraps."""

import dataclasses
import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish import nest
from alfish.algorithms.dqn import DQN
from alfish.algorithms.iql import IQL
from alfish.algorithms.munchausen import MunchausenDQN, SoftDQN
from alfish.algorithms.recurrent_sac import RecurrentSAC
from alfish.algorithms.retrace import RetraceDQN
from alfish.algorithms.sac import SAC
from alfish.algorithms.td3 import TD3
from alfish.data import Experience, StepType, TimeStep
from alfish.errors import UsageError
from alfish.functional.return_distributions import Bins, Quantiles
from alfish.functional.returns import lambda_return
from alfish.functional.targets import NextValues, td_target
from alfish.functional.values import Vector
from alfish.networks import first_and_bootstrap_rows

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD
OBSERVATION, REWARD = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-np.inf, np.inf, (), np.float32)
CHOICE, BOX = spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)

# Columns of four rows, and the row from which the return of row 0 bootstraps.
COLUMNS = [
    ([MID, MID, MID, MID], 3),
    ([FIRST, MID, MID, LAST], 3),
    ([MID, MID, LAST, FIRST], 2),
    ([MID, LAST, FIRST, MID], 1),
    ([FIRST, LAST, FIRST, LAST], 1),
    ([MID, MID, PAD, PAD], 1),
]
TYPES, ENDS = zip(*COLUMNS)


def window(types=TYPES, action=CHOICE, reward_size=None, seed=0):
    """Windows `[4, N]` with random rows; about a third of their rows has a discount of 0."""
    torch.manual_seed(seed)
    step_type = torch.tensor(types, dtype=torch.int32).T
    shape = tuple(step_type.shape)
    reward = torch.randn(shape if reward_size is None else (*shape, reward_size))
    discount = (torch.rand(shape) < 0.7).float()
    actions = torch.randint(3, shape) if action is CHOICE else torch.rand(*shape, 2) * 2 - 1
    env_id = torch.arange(shape[1], dtype=torch.int32).expand(shape)
    rows = TimeStep(step_type, reward, discount, torch.randn(*shape, 3), actions, env_id)
    return Experience(rows, actions, None, None)


def test_a_transition_ends_where_the_episode_or_the_window_ends():
    experience = window()
    found, column = first_and_bootstrap_rows(experience, 1.0), torch.arange(len(ENDS))
    for kept, rows in zip(nest.leaves(found), nest.leaves(experience), strict=True):
        assert torch.equal(kept, torch.stack([rows[0], rows[torch.tensor(ENDS), column]]))


def test_a_transition_of_one_step_ends_at_row_1():
    experience = window()
    found = first_and_bootstrap_rows(experience, 0.0)
    assert all(torch.equal(kept, rows[:2]) for kept, rows in zip(nest.leaves(found), nest.leaves(experience)))


def test_windows_of_two_rows_are_transitions():
    experience = window([[MID, MID], [MID, LAST]])
    assert (
        first_and_bootstrap_rows(experience, 1.0) is experience
        and first_and_bootstrap_rows(experience, 0.0) is experience
    )


@pytest.mark.parametrize("lambda_", [0.0, 1.0])
@pytest.mark.parametrize("values", [None, Vector([0.9, 0.5], [1.0, 2.0])])
def test_the_return_of_row_0_does_not_read_other_values(values, lambda_):
    experience = window(reward_size=None if values is None else 2)
    step, value = experience.time_step, torch.randn(*experience.time_step.reward.shape)
    reward, discount = (step.reward, 0.9 * step.discount) if values is None else values.reward_and_discount(step)
    end = first_and_bootstrap_rows(experience._replace(info=value), lambda_).info[1:]
    found = td_target(experience, reward, discount, NextValues(end), lambda_)
    expected = lambda_return(reward, discount, value[1:], step.step_type, lambda_)
    torch.testing.assert_close(found[0], expected[0])


def of_all_rows(algorithm):
    """Makes the algorithm value every row of a window."""
    for name in ("_lambda", "lambda_"):
        if hasattr(algorithm, name):
            setattr(algorithm, name, 1 - 1e-12)
    return algorithm


@dataclasses.dataclass
class Case:
    algorithm: type
    action: gymnasium.Space
    settings: dict
    seen: str  # the network that values later rows


CASES = {
    "dqn": Case(DQN, CHOICE, {"double": False}, "target"),
    "double dqn": Case(DQN, CHOICE, {}, "target"),
    "soft dqn": Case(SoftDQN, CHOICE, {}, "target"),
    "sac": Case(SAC, CHOICE, {}, "target_critic"),
    "td3": Case(TD3, BOX, {"smoothing_std": 0.0}, "target_critic"),
    "iql": Case(IQL, BOX, {}, "value"),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_cover_all_valued_rows(name):
    case = CASES[name]
    torch.manual_seed(1)
    algorithm = case.algorithm(OBSERVATION, case.action, REWARD, **case.settings)
    experience = window(action=case.action)

    def losses():
        torch.manual_seed(2)
        found = algorithm.calc_loss(experience, algorithm.train_step(experience, None).info)
        loss = found.loss if isinstance(found.loss, dict) else {"": found.loss}
        return {**loss, "priority": found.priority}

    found = losses()
    of_all_rows(algorithm)
    for key, expected in losses().items():
        torch.testing.assert_close(found[key][0], expected[0])


@pytest.mark.parametrize("name", CASES)
def test_networks_see_two_rows_of_a_window(name):
    case = CASES[name]
    algorithm = case.algorithm(OBSERVATION, case.action, REWARD, **case.settings)
    seen = []
    for module in algorithm.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, given, __: seen.append(given[0].shape[:-1].numel()))
    experience = window(action=case.action)
    algorithm.train_step(experience, None)
    assert seen and max(seen) == len(ENDS)


@pytest.mark.parametrize(
    "algorithm", [RetraceDQN, functools.partial(DQN, lambda_=0.5), MunchausenDQN], ids=["retrace", "lambda", "bonus"]
)
def test_returns_that_read_each_row_value_each_row(algorithm):
    dqn = algorithm(OBSERVATION, CHOICE, REWARD)
    info = dqn.train_step(window(), None).info
    assert info.following.value.shape == (3, len(ENDS))


@pytest.mark.parametrize("values", [Bins, Quantiles])
def test_memory_with_distributions_is_refused(values):
    with pytest.raises(UsageError, match="RecurrentSAC does not support memory with"):
        RecurrentSAC(OBSERVATION, BOX, REWARD, values=values)
