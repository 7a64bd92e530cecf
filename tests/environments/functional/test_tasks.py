"""Shipped functional environments: classic control equals gymnasium's, and the others have their known returns."""

import gymnasium
import numpy as np
import pytest
import torch

from alfish import nest
from alfish.compiler.inductor import CompiledFunction
from alfish.environments import make_environment
from alfish.environments.functional import (
    Acrobot,
    CartPole,
    Catch,
    DeepSea,
    Draws,
    MountainCar,
    MountainCarContinuous,
    Pendulum,
    Recall,
    SingleEnvironment,
    advance,
    begin,
    num_draws,
    tensors_of,
    with_tensors,
)

CLASSIC = {
    "CartPole-v1": CartPole,
    "Pendulum-v1": Pendulum,
    "Acrobot-v1": Acrobot,
    "MountainCar-v0": MountainCar,
    "MountainCarContinuous-v0": MountainCarContinuous,
}
EVERY = [*CLASSIC.values(), Catch, DeepSea, Recall]


def in_form(env, states, dtype):
    """States of gymnasium's environment in the form of the functional one."""
    kind = type(begin(env, torch.zeros(1, num_draws(env)))[0])
    return kind(*torch.tensor(np.array(states, np.float64), dtype=dtype).unbind(1))


def episode_of(env_id, own, episode):
    """States of an episode of gymnasium's environment, the last one included, actions, and what its steps return."""
    own.reset(seed=episode)
    own.action_space.seed(episode)
    states, actions, results = [np.array(own.unwrapped.state)], [], []
    while not results or not any(results[-1][2:]):
        actions.append(chosen(env_id, own, episode))
        results.append(own.step(actions[-1])[:4])
        states.append(np.array(own.unwrapped.state))
    return states, actions, results


def chosen(env_id, own, episode):
    """Random actions; in some episodes those that reach a goal or a time limit."""
    state = own.unwrapped.state
    if env_id == "CartPole-v1" and episode % 2:
        return int(0.05 * state[0] + 0.1 * state[1] + state[2] + 0.3 * state[3] > 0)
    if env_id == "MountainCar-v0" and episode % 2:
        return 2 if state[1] > 0 else 0
    if env_id == "MountainCarContinuous-v0" and episode % 2:
        return np.array([1.0 if state[1] > 0 else -1.0], np.float32)
    if env_id == "Acrobot-v1" and episode % 2:
        return 2 if state[3] > 0 else 0
    return own.action_space.sample()


@pytest.mark.parametrize("env_id", CLASSIC)
def test_a_classic_task_equals_gymnasiums(env_id):
    env, own = CLASSIC[env_id](), gymnasium.make(env_id)
    assert (env.observation_space, env.action_space) == (own.observation_space, own.action_space)
    assert env.max_episode_steps == own.spec.max_episode_steps
    steps = terminations = truncations = 0
    for episode in range(20):
        states, actions, results = episode_of(env_id, own, episode)
        length = len(actions)
        observation, reward, terminated, truncated = (np.array(each) for each in zip(*results, strict=True))
        action, numbers = torch.from_numpy(np.array(actions)), torch.zeros(length, num_draws(env))
        for dtype, tolerance in ((torch.float32, 3e-6), (torch.float64, 1e-6)):
            here, after = (in_form(env, rows, dtype) for rows in (states[:-1], states[1:]))
            given = action.to(dtype) if action.is_floating_point() else action
            found = advance(env, here, torch.arange(length, dtype=torch.int32), given, numbers)
            size = np.maximum(1, np.abs(observation))
            assert (np.abs((found.final_observation.numpy() - observation) / size) < tolerance).all()
            assert (np.abs(found.reward.numpy() - reward) < tolerance * np.maximum(1, np.abs(reward))).all()
        assert (found.terminated.numpy() == terminated).all()
        assert (found.truncated.numpy() == truncated & ~terminated).all()
        ends = terminated | truncated
        assert ends[-1] and (found.clock.numpy() == np.where(ends, 0, np.arange(1, length + 1))).all()
        for one, other in zip(found.state, after, strict=True):
            torch.testing.assert_close(one[:-1], other[:-1], rtol=1e-6, atol=1e-6)
        steps, terminations = steps + length, terminations + terminated.sum()
        truncations += found.truncated.sum()
        if steps >= 1000 and truncations and (terminations or env_id == "Pendulum-v1"):
            return
    raise AssertionError((steps, terminations, truncations))


@pytest.mark.parametrize("env_id", CLASSIC)
def test_first_states_of_a_classic_task_have_gymnasiums_range(env_id):
    env, own = CLASSIC[env_id](), gymnasium.make(env_id)
    u = torch.rand(4096, num_draws(env), generator=torch.Generator().manual_seed(0))
    first = begin(env, u)[2].numpy()
    theirs = np.stack([own.reset(seed=seed)[0] for seed in range(300)])
    spread = np.ptp(first, 0)
    assert (np.abs(first.min(0) - theirs.min(0)) <= 0.05 * spread).all()
    assert (np.abs(first.max(0) - theirs.max(0)) <= 0.05 * spread).all()
    assert (np.abs(first.mean(0) - theirs.mean(0)) <= 0.1 * spread).all()


def returns(env, policy, num_envs=64):
    """Returns and lengths of one episode in each environment."""
    generator = torch.Generator().manual_seed(0)
    state, clock, observation = begin(env, torch.rand(num_envs, num_draws(env), generator=generator))
    total, length, going = torch.zeros(num_envs), torch.zeros(num_envs), torch.ones(num_envs, dtype=torch.bool)
    for _ in range(100):
        u = torch.rand(num_envs, num_draws(env), generator=generator)
        stepped = advance(env, state, clock, policy(observation), u)
        state, clock, observation = stepped[:3]
        total, length = total + going * stepped.reward, length + going
        going = going & ~(stepped.terminated | stepped.truncated)
        assert not stepped.truncated.any()
        if not going.any():
            return total, length
    raise AssertionError("an episode did not end")


def test_catch_is_won_below_the_ball_and_lost_elsewhere():
    def under(observation):
        board = observation.reshape(-1, 10, 5)
        ball, paddle = board[:, :9].sum(1).argmax(1), board[:, 9].argmax(1)
        return (ball - paddle).sign() + 1

    total, length = returns(Catch(), under)
    assert (total == 1).all() and (length == 9).all()
    total, _ = returns(Catch(), lambda observation: torch.ones(64, dtype=torch.int64))
    assert set(total.tolist()) == {-1.0, 1.0} and 4 <= (total == 1).sum() <= 24  # a fifth of the balls


def test_the_board_of_catch_shows_ball_and_paddle():
    _, _, observation = begin(Catch(), torch.tensor([[0.9]]))
    assert observation.reshape(10, 5).nonzero().tolist() == [[0, 4], [9, 2]]


@pytest.mark.parametrize("size", [4, 10])
def test_deep_sea_rewards_only_who_always_goes_right(size):
    env = DeepSea(size)
    assert set(env.right.tolist()) == {0, 1}, "the action differs from cell to cell"

    def right(observation):
        return env.right[observation.argmax(1)]

    total, length = returns(env, right)
    assert (length == size).all()
    torch.testing.assert_close(total, torch.full((64,), 0.99))
    total, _ = returns(env, lambda observation: 1 - right(observation))
    assert (total == 0).all()
    first = [True]

    def left_at_first(observation):
        action = right(observation) if not first else 1 - right(observation)
        first.clear()
        return action

    total, _ = returns(env, left_at_first)
    torch.testing.assert_close(total, torch.full((64,), -0.01 * (size - 1) / size))


def test_recall_shows_its_cue_once_and_rewards_who_names_it():
    shown = []

    def remember(observation):
        shown.append(observation)
        return shown[0][:, :3].argmax(1)

    total, length = returns(Recall(length=4, num_cues=3), remember)
    assert (total == 1).all() and (length == 5).all()
    assert (shown[0][:, :3].sum(1) == 1).all() and (torch.stack(shown[1:])[..., :3] == 0).all()
    assert torch.stack(shown)[..., 3].mean(1).tolist() == [0, 0, 0, 0, 1]
    total, _ = returns(Recall(length=4, num_cues=3), lambda observation: torch.zeros(64, dtype=torch.int64))
    assert 10 <= total.sum() <= 34  # a third of the cues


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's compiler, at import
@pytest.mark.parametrize(
    ("kind", "way"),
    [*((kind, "interpreted") for kind in EVERY), pytest.param(Pendulum, "compiled", marks=pytest.mark.slow)],
)
def test_each_task_gives_the_same_results_compiled(request, kind, way):
    if way == "interpreted":  # the graph as it was traced, without the seconds of torch's compiler
        request.getfixturevalue("interpreted")
    env, generator = kind(), torch.Generator().manual_seed(0)
    environment = make_environment(env, num_envs=64)
    environment.reset()
    step = env.action_space.sample if hasattr(env.action_space, "low") else None
    action = torch.zeros(64, 1).uniform_(-1, 1, generator=generator) if step else torch.randint(2, (64,))
    given = tensors_of(env), environment.state, environment.clock, action, environment.draw(1)[0]
    compiled = CompiledFunction(lambda rows: advance(with_tensors(env, rows[0]), *rows[1:]), given)
    for one, other in zip(nest.leaves(advance(env, *given[1:])), nest.leaves(compiled(given)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("env_id", [*CLASSIC, "Catch-v0", "DeepSea-v0", "Recall-v0"])
def test_each_id_makes_environments_whose_rows_are_in_their_spaces(env_id):
    environment = make_environment(f"alfish/{env_id}", num_envs=3)
    assert environment.env_id.shape == (3,) and not environment.lacks_limit
    low, high = environment.observation_spec.low, environment.observation_spec.high
    time_step = environment.reset()
    for _ in range(20):
        assert (time_step.observation.numpy() >= low).all() and (time_step.observation.numpy() <= high).all()
        action = nest.tensors(
            nest.map(lambda spec: np.stack([spec.sample() for _ in range(3)]), environment.action_spec)
        )
        time_step = environment.step(action)


@pytest.mark.parametrize("kind", [kind for kind in EVERY if kind is not Recall])
def test_frames_show_where_a_task_is(kind):
    env = SingleEnvironment(kind, render_mode="rgb_array")
    env.action_space.seed(0)
    env.reset(seed=0)
    first = env.render()
    assert first.dtype == np.uint8 and first.ndim == 3 and first.shape[2] == 3 and first.shape[0] >= 100
    assert 0 < (first != 255).any(-1).mean() < 0.7
    for _ in range(5):
        env.step(env.action_space.sample())
    assert env.render().shape == first.shape and (env.render() != first).any()


def test_numbers_of_a_task_are_taken_by_name():
    drawn = Draws(Pendulum.initial_draws, torch.tensor([[0.0, 0.5]]))
    assert drawn["angle"].item() == pytest.approx(-np.pi) and drawn["spin"].item() == 0
