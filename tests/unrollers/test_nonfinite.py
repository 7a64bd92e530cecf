"""Values that are not finite are found wherever they are, and large ones are none of them."""

import math
import re

import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish import nest
from alfish.compiler.numpy_program import quiet
from alfish.data import TimeStep
from alfish.errors import RunError
from alfish.unrollers.nonfinite import RowCheck, nonfinite_rows

check_finite = RowCheck({})  # tests that all values are finite


def rows(*shape):
    """Zeros: a reward, and observations of which one is no float."""
    zero, env_id = torch.zeros(shape), torch.arange(shape[-1]).expand(shape)
    observation = {"a": torch.zeros(*shape, 2), "b": zero.clone(), "count": zero.int()}
    return TimeStep(zero.int(), zero.clone(), zero.clone(), observation, None, env_id)


def arrays(time_step):
    return nest.map(torch.Tensor.numpy, time_step)


@pytest.mark.parametrize("kind", [nest.detach, arrays])
def test_values_that_cancel_out_are_found(kind):
    unroll = rows(2, 3)
    quiet(check_finite)(kind(unroll))
    unroll.observation["a"][1, 2, 0], unroll.observation["b"][0, 1] = math.inf, -math.inf
    with pytest.raises(RunError, match="environment 1 returned an observation b that is not finite in row 0"):
        quiet(check_finite)(kind(unroll))


def test_an_action_that_is_not_finite_is_the_policys_fault():
    unroll = rows(2, 3)._replace(prev_action=torch.zeros(2, 3, 1))
    unroll.reward[1, 2] = unroll.prev_action[1, 2, 0] = math.nan
    with pytest.raises(RunError, match="the policy's action before row 1 of the unroll in environment 2 is not finite"):
        check_finite(unroll)


def test_the_earliest_row_is_named_because_later_ones_follow_from_it():
    """A policy that observes nan returns nan, and the environment then returns nan rewards."""
    unroll = rows(3, 3)._replace(prev_action=torch.zeros(3, 3, 1))
    unroll.observation["b"][1, 2] = unroll.reward[2, 2] = unroll.prev_action[2, 2, 0] = math.nan
    with pytest.raises(RunError, match="environment 2 returned an observation b that is not finite in row 1"):
        check_finite(unroll)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["reward", "a", "b"])
def test_environments_with_non_finite_steps_are_found(where, value):
    step = arrays(rows(4))
    leaf = step.reward if where == "reward" else step.observation[where]
    leaf[1] = leaf[3] = value
    assert quiet(nonfinite_rows)(step).tolist() == [False, True, False, True]
    step.discount[:] = np.nan  # is the adapters' own
    leaf[:] = 0
    assert nonfinite_rows(step) is None


def test_single_steps_handle_cancellation_and_overflow():
    step = arrays(rows(3))
    step.reward[0], step.observation["b"][2] = np.inf, -np.inf
    assert quiet(nonfinite_rows)(step).tolist() == [True, False, True]
    step = arrays(rows(3))
    step.observation["a"][:] = step.reward[:] = 3e38
    assert quiet(nonfinite_rows)(step) is None


@pytest.mark.parametrize("kind", [nest.detach, arrays])
@pytest.mark.parametrize(
    "name, space, value",
    [
        ("count", spaces.Discrete(3), 3),
        ("count", spaces.Discrete(3), -1),
        ("many", spaces.MultiDiscrete([2, 4]), [2, 0]),
        ("bits", spaces.MultiBinary(2), [0, 5]),
    ],
)
def test_a_choice_outside_its_space_is_named(kind, name, space, value):
    zeros = torch.zeros(2, 3, *space.shape, dtype=torch.int64)
    unroll = rows(2, 3)._replace(observation={"a": torch.zeros(2, 3, 1), name: zeros})
    check = quiet(RowCheck({"a": spaces.Box(-1, 1, (1,)), name: space}))
    check(kind(unroll))
    zeros[1, 2] = torch.as_tensor(value)
    words = rf"environment 2 returned {re.escape(str(value))} .* as observation.{name} in row 1 of the unroll"
    with pytest.raises(RunError, match=words):
        check(kind(unroll))


def test_choices_are_tested_and_so_are_finite_values():
    unroll = rows(2, 3)
    unroll.reward[1, 2] = math.nan
    with pytest.raises(RunError, match="a reward that is not finite"):
        RowCheck(())(unroll)
