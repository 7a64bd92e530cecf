"""Environments in JAX: where episodes end, what a seed and a checkpoint decide, and how a missing JAX is reported."""

import functools
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish import nest
from alfish.data import StepType
from alfish.environments import SimulatorEnvironment
from alfish.errors import UsageError
from alfish.simulators.brax_environment import BraxEnvironment
from alfish.simulators.jax_environment import JaxEnvironment, Transition

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install jax")
FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


class Counter(JaxEnvironment):
    """Counts to a random length of 3 to 6, where an episode ends; an action 1 adds 0.25 to the reward.

    The observation is the count, the length and a random number. The first state has Python's numbers.
    """

    def __init__(self, num_envs, seed=0, device=None, time_limit=None, truncates=False):
        space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        super().__init__(num_envs, space, spaces.Discrete(2), seed, device, time_limit)
        self.truncates, self.num_traces = truncates, 0

    def begin(self, key):
        state = {"count": 0, "length": jax.random.randint(key, (), 3, 7)}
        return state, self.observe(key, state)

    def advance(self, key, state, action):
        self.num_traces += 1
        assert action.dtype == "int32"
        state = {**state, "count": state["count"] + 1.0}  # a float where the first state has an integer
        has_ended = state["count"] == state["length"]
        reward = state["count"] + 0.25 * action
        return Transition(state, self.observe(key, state), reward, has_ended & (not self.truncates), has_ended)

    def observe(self, key, state):
        noise = jax.random.uniform(key)
        return jax.numpy.stack([jax.numpy.float32(state["count"]), jax.numpy.float32(state["length"]), noise])


made = functools.cache(Counter)  # compiling takes seconds; each test begins with a reset and a seed


def stream(simulator, num_steps, seed=0):
    """The rows of each environment in the order of time, under fixed actions."""
    environment = SimulatorEnvironment(simulator, seed)
    rows = [[] for _ in range(environment.num_envs)]
    actions = np.random.default_rng(0).integers(2, size=num_steps)

    def take(time_step, which):
        for column in np.flatnonzero(which):
            rows[column].append(nest.map(lambda leaf, i=column: leaf[i].tolist(), time_step))

    take(environment.reset(), np.ones(environment.num_envs))
    for action in actions:
        last = environment.step(torch.full((environment.num_envs,), action))
        take(last, np.ones(environment.num_envs))
        ended, first = environment.take_resets()
        take(first, ended)
    return rows


def stepped(simulator, num_steps):
    """The results of some steps, as one list of numbers."""
    actions = [torch.full((simulator.num_envs,), step % 2) for step in range(num_steps)]
    return [[leaf.tolist() for leaf in simulator.step(action)[:5]] for action in actions]


@pytest.mark.parametrize("truncates", [False, True])
def test_every_episode_is_whole_and_ends_in_its_own_final_observation(truncates):
    lengths = set()
    for rows in stream(made(3, truncates=truncates), 60):
        for at, (step_type, reward, discount, (count, length, _), action, _) in enumerate(rows):
            assert step_type == (FIRST if count == 0 else LAST if count == length else MID)
            assert discount == (0 if step_type == LAST and not truncates else 1)
            assert reward == count + 0.25 * action
            if step_type != FIRST:
                assert rows[at - 1].observation[:2] == [count - 1, length]
            elif at:
                assert rows[at - 1].step_type == LAST
            lengths.add(length)
    assert lengths == {3, 4, 5, 6}


def test_the_time_limit_truncates_and_a_termination_in_the_same_step_counts():
    ends = set()
    for rows in stream(made(3, time_limit=4), 60):
        for step_type, _, discount, (count, length, _), _, _ in rows:
            assert (step_type == LAST) == (count in (4, length))
            assert discount == (0 if step_type == LAST and count == length else 1)
            ends |= {(count, length)} if step_type == LAST else set()
    assert ends == {(3, 3), (4, 4), (4, 5), (4, 6)}


def test_numbers_that_a_step_draws_are_new_in_each_step_and_environment():
    noise = [row.observation[2] for rows in stream(made(3), 20) for row in rows]
    assert len(set(noise)) == len(noise)


def test_episodes_depend_on_the_seed_not_on_the_number_of_environments():
    expected = stream(made(3), 20, seed=3)
    assert stream(made(3), 20, seed=3) == expected
    assert stream(made(5), 20, seed=3)[:3] == expected
    assert stream(made(3), 20, seed=4) != expected


def test_a_reset_without_a_seed_begins_other_episodes():
    first, second, third = made(3).reset(0), made(3).reset(None), made(3).reset(None)
    assert not torch.equal(first, second) and not torch.equal(second, third)
    assert torch.equal(made(3).reset(0), first)


def test_the_seed_of_the_constructor_counts_before_the_first_reset():
    assert torch.equal(Counter(3, seed=6).reset(None), made(3).reset(6))


def test_a_checkpoint_continues_bit_for_bit_if_another_seed_began():
    simulator, other = made(3, time_limit=4), Counter(3, seed=8, time_limit=4)
    simulator.reset(2)
    stepped(simulator, 6)
    file = io.BytesIO()
    torch.save(simulator.state_dict(), file)
    expected = stepped(simulator, 20)
    file.seek(0)
    other.reset(9)
    assert stepped(other, 4) != expected[:4]
    assert other.load_state_dict(torch.load(file, weights_only=True)) is True
    assert stepped(other, 20) == expected


def test_a_checkpoint_of_another_number_of_environments_is_refused():
    made(3).reset(0)
    made(5).reset(0)
    with pytest.raises(UsageError, match="state does not match 5 environments of Counter; continue with the class"):
        made(5).load_state_dict(made(3).state_dict())


def test_python_numbers_in_initial_states_do_not_retrace_steps():
    simulator = Counter(2)
    simulator.reset(0)
    stepped(simulator, 1)
    traced = simulator.num_traces
    stepped(simulator, 12)
    simulator.load_state_dict(simulator.state_dict())
    stepped(simulator, 2)
    assert simulator.num_traces == traced


def test_first_episodes_are_spread_below_the_time_limit():
    simulator, lengths = made(3, time_limit=4), set()
    for seed in range(8):
        simulator.reset(seed)
        simulator.spread_first_episodes()
        truncated = np.array([step[3] for step in stepped(simulator, 4)])
        lengths |= set(truncated.argmax(0)[truncated.any(0)] + 1)
    assert lengths == {1, 2, 3, 4}


def test_results_have_the_dtypes_of_the_stream():
    observation, step = made(3).reset(0), made(3).step(torch.zeros(3, dtype=torch.int64))
    assert observation.dtype == step.observation.dtype == step.final_observation.dtype == torch.float32
    assert [leaf.dtype for leaf in step[1:4]] == [torch.float32, torch.bool, torch.bool]


def test_the_environment_of_the_page_of_environments_steps_and_ends():
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    (code,) = re.findall(r"```python\n(import jax\n.*?)```", page, re.DOTALL)
    exec(code, names := {"__name__": "page"})
    walk = names["Walk"](4)
    walk.reset(0)
    steps = [walk.step(torch.ones(4, dtype=torch.int64)) for _ in range(12)]
    assert all(step.reward.tolist() == [1.0] * 4 for step in steps)
    assert all(torch.equal(step.final_observation[:, 0] > 3, step.terminated) for step in steps)
    assert torch.stack([step.terminated for step in steps]).any(0).all()


def test_a_device_that_jax_does_not_have_is_named_with_the_remedy():
    with pytest.raises(UsageError, match=r"JAX has no device cuda:7, on which Counter .* = \{'device': 'cpu'\}"):
        Counter(2, device="cuda:7")


def test_a_package_that_is_missing_is_named_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "brax", None)
    monkeypatch.setitem(sys.modules, "brax.envs", None)
    with pytest.raises(UsageError, match=r"brax is not installed: pip install 'alfish\[brax\]'"):
        BraxEnvironment("ant")


def test_jax_is_imported_late_and_leaves_memory_to_torch():
    program = (
        "import os, sys, alfish.simulators.gymnax_environment, alfish.simulators.brax_environment as brax\n"
        "assert 'jax' not in sys.modules\n"
        "from alfish.simulators.jax_environment import imported\n"
        "imported('jax', '')\n"
        "assert os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] == 'false'"
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_PYTHON_CLIENT_PREALLOCATE"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
