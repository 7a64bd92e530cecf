"""One vector step of a functional environment, and its random numbers."""

import math
from typing import NamedTuple

import pytest
import torch
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv

from alfish import nest
from alfish.compiler.inductor import CompiledFunction
from alfish.environments.functional import (
    CartPole,
    Draws,
    Integers,
    Normal,
    Uniform,
    advance,
    begin,
    num_draws,
    tensors_of,
    with_tensors,
)


class Walk(NamedTuple):
    place: torch.Tensor  # [B]
    moves: dict[str, torch.Tensor]  # 'count' [B] int64, and 'luck' [B], a column of what was drawn


class Drunk(FuncEnv):
    """A walk along a line with noise, which terminates beyond 3 and is truncated where `lost`."""

    observation_space, action_space = spaces.Box(-10, 10, (2,)), spaces.Discrete(2)
    max_episode_steps = 6
    initial_draws = {"start": Integers(3), "luck": Uniform(0, 1, (2,))}
    transition_draws = {"noise": Normal((2,)), "slip": Uniform()}
    truncates = True

    def __init__(self):
        super().__init__()
        self.lengths = torch.tensor([-0.5, 1.0])

    def initial(self, rng, params=None):
        return Walk(rng["start"].float(), {"count": torch.zeros_like(rng["start"]), "luck": rng["luck"][:, 1]})

    def transition(self, state, action, rng, params=None):
        length = torch.where(rng["slip"] < 0.1, torch.zeros_like(state.place), self.lengths[action])
        place = state.place + length + 0.1 * rng["noise"].sum(-1)
        return Walk(place, state.moves | {"count": state.moves["count"] + 1})

    def observation(self, state, rng, params=None):
        return torch.stack([state.place, state.moves["count"].float()], -1)

    def reward(self, state, action, next_state, rng, params=None):
        return next_state.place - state.place

    def terminal(self, state, rng, params=None):
        return state.place > 3

    def truncated(self, state, rng, params=None):
        return state.place < -1


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def block(env, num_steps, num_envs, seed=0):
    return torch.rand(num_steps, num_envs, num_draws(env), generator=generator(seed))


def test_block_draws_equal_single_step_draws():
    whole, one_by_one = block(Drunk(), 50, 7), generator()
    steps = [torch.rand(7, num_draws(Drunk()), generator=one_by_one) for _ in range(50)]
    assert whole.shape == (50, 7, 6) and torch.equal(whole, torch.stack(steps))


def test_kinds_of_numbers_have_their_distributions_and_shapes():
    kinds = {"a": Uniform(-1, 3), "b": Normal((2, 3)), "c": Integers(4, (2,)), "d": Normal()}
    drawn = Draws(kinds, torch.rand(20_000, 10, generator=generator()))
    assert {name: tuple(leaf.shape[1:]) for name, leaf in drawn.items()} == {"a": (), "b": (2, 3), "c": (2,), "d": ()}
    assert (drawn.batch_size, drawn.device) == (20_000, torch.device("cpu"))
    assert -1 <= drawn["a"].min() < -0.99 and 2.99 < drawn["a"].max() <= 3
    assert abs(drawn["b"].mean()) < 0.01 and drawn["b"].std() == pytest.approx(1, abs=0.01)
    assert abs(drawn["d"].pow(4).mean() - 3) < 0.2  # the fourth moment of a normal
    assert drawn["c"].dtype == torch.int64
    assert torch.bincount(drawn["c"].flatten()).div(40_000).sub(0.25).abs().max() < 0.01


def test_smallest_and_largest_draws_map_to_finite_values_in_range():
    ends = torch.tensor([0.0, 1 - 2**-24, 0.5])
    normal = Normal().of(ends)
    assert normal.isfinite().all() and normal[0] == -normal[1] and abs(normal[2]) < 1e-6
    assert 5 < normal[1] < 5.5
    for n in (1, 3, 7, 2**20 + 1, 2**24):
        assert Integers(n).of(ends)[:2].tolist() == [0, n - 1]


def reference(env, num_steps, num_envs, actions, u):
    """Rows of environments that are stepped one by one in Python, with resets written out."""
    rows = []
    for i in range(num_envs):
        column = []
        state, _, observation = begin(env, u[0, i : i + 1])
        count = 0
        for t in range(1, num_steps + 1):
            drawn = u[t, i : i + 1]
            rng = Draws(env.transition_draws, drawn[:, 3:])
            after = env.transition(state, actions[t - 1, i : i + 1], rng)
            reward, terminated = (
                env.reward(state, actions[t - 1, i : i + 1], after, rng),
                bool(env.terminal(after, rng)),
            )
            count += 1
            truncated = (count == 6 or bool(env.truncated(after, rng))) and not terminated
            final = env.observation(after, rng)
            state, observation = after, final
            if terminated or truncated:
                state, _, observation = begin(env, drawn)
                count = 0
            column.append((final[0], observation[0], reward[0], terminated, truncated, count))
        rows.append(column)
    return rows


def test_a_vector_step_equals_separate_steps_of_each_environment():
    env, num_steps, num_envs = Drunk(), 60, 5
    u = block(env, num_steps + 1, num_envs)
    actions = torch.randint(2, (num_steps, num_envs), generator=generator(1))
    expected = reference(env, num_steps, num_envs, actions, u)
    state, clock, _ = begin(env, u[0])
    kinds = torch.zeros(3, dtype=torch.int64)
    for t in range(num_steps):
        stepped = advance(env, state, clock, actions[t], u[t + 1])
        state, clock = stepped.state, stepped.clock
        assert clock.dtype == torch.int32 and isinstance(state, Walk)
        for i in range(num_envs):
            final, observation, reward, terminated, truncated, count = expected[i][t]
            assert torch.equal(stepped.final_observation[i], final)
            assert torch.equal(stepped.observation[i], observation)
            assert torch.equal(stepped.reward[i], reward)
            assert (bool(stepped.terminated[i]), bool(stepped.truncated[i])) == (terminated, truncated)
            assert int(clock[i]) == count
            kinds += torch.tensor([terminated, truncated and final[1] == 6, truncated and final[1] < 6])
    assert (kinds >= 3).all(), "each way of ending occurs"


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's compiler, at import
@pytest.mark.parametrize(
    ("env", "way"), [(Drunk(), "compiled"), (CartPole(), "interpreted")], ids=["Drunk", "CartPole"]
)
def test_the_compiled_step_equals_the_plain_one(request, env, way):
    if way == "interpreted":  # without the seconds of torch's compiler
        request.getfixturevalue("interpreted")
    num_envs = 16
    u = block(env, 30, num_envs)
    actions = torch.randint(2, (30, num_envs), generator=generator(1))
    state, clock, _ = begin(env, u[0])

    def traced(given):
        tensors, *arguments = given
        return advance(with_tensors(env, tensors), *arguments)

    compiled = CompiledFunction(traced, (tensors_of(env), state, clock, actions[0], u[0]))
    for t in range(1, 30):
        arguments = state, clock, actions[t], u[t]
        plain = advance(env, *arguments)
        for one, other in zip(nest.leaves(plain), nest.leaves(compiled((tensors_of(env), *arguments))), strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        state, clock = plain.state, plain.clock


def test_tensors_of_an_environment_are_replaced_in_a_copy():
    env = Drunk()
    assert list(tensors_of(env)) == ["lengths"]
    other = with_tensors(env, {"lengths": torch.tensor([0.0, 5.0])})
    assert env.lengths[1] == 1 and other.lengths[1] == 5 and type(other) is Drunk
    assert with_tensors(CartPole(), {}).observation_space == CartPole.observation_space


def test_an_environment_that_needs_no_random_numbers_steps_with_none():
    class Still(Drunk):
        initial_draws = transition_draws = {}
        max_episode_steps = None

        def initial(self, rng, params=None):
            zeros = torch.zeros(rng.batch_size, device=rng.device)
            return Walk(zeros, {"count": zeros.long()})

        def transition(self, state, action, rng, params=None):
            return Walk(state.place + self.lengths[action], {"count": state.moves["count"] + 1})

    env = Still()
    state, clock, observation = begin(env, torch.zeros(3, 0))
    stepped = advance(env, state, clock, torch.tensor([0, 1, 1]), torch.zeros(3, 0))
    assert num_draws(env) == 0 and observation.tolist() == [[0, 0]] * 3
    assert stepped.observation[:, 0].tolist() == [-0.5, 1, 1] and not stepped.truncated.any()
    assert math.isclose(float(stepped.reward.sum()), 1.5)
