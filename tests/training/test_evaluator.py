"""Evaluation: unbiased, seeded, the same however many environments it runs in, and it leaves no trace."""

import contextlib
import functools
import random
from typing import ClassVar, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from toys import NestedBandit, OneState, Stamped, TwoLengths

from alfish import nest
from alfish.algorithms.ppo import PPO
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.algorithms.sac import SAC
from alfish.algorithms.td3 import TD3
from alfish.analysis.run_source import read_evaluations
from alfish.data import AlgStep, StepType, TimeStep
from alfish.environments import VectorEnvironment, make_environment
from alfish.environments.functional import Integers
from alfish.environments.toy import TensorPointMass
from alfish.errors import RunError, UsageError
from alfish.networks import ActorCritic, PolicyHead
from alfish.networks.layers import NoisyLinear
from alfish.specs import sample as sample_actions
from alfish.training.evaluations import evaluation
from alfish.training.evaluator import Evaluation, Evaluator, make_evaluator
from alfish.training.padded_policy import _EqualPlaces
from alfish.transforms import ObservationNormalizer, RewardScale, Transforms


def parts_of(env_id, factories=(), seed=0, env_kwargs=None, make_algorithm=None):
    """A factory of environments, an untrained algorithm and its transforms."""
    factory = functools.partial(make_environment, env_id, env_kwargs=env_kwargs)
    environment = factory()
    torch.manual_seed(seed)
    transforms = Transforms(factories, environment.observation_spec, environment.reward_spec)
    # A large gain: a policy whose actions depend on what it sees.
    network = functools.partial(ActorCritic, policy_head=functools.partial(PolicyHead, gain=2.0))
    make_algorithm = make_algorithm or functools.partial(PPO, network=network)
    algorithm = make_algorithm(transforms.observation_spec, environment.action_spec, transforms.reward_spec)
    environment.close()
    return factory, algorithm, transforms


def evaluate(parts, num_episodes, num_envs=8, **options):
    evaluator = make_evaluator(*parts, num_episodes, num_envs)
    try:
        return evaluator.evaluate(num_episodes, **options)
    finally:
        evaluator.close()


class Coin(NamedTuple):
    side: torch.Tensor


class Guessing(FuncEnv):
    """Gives 1 for an action that names a side of a coin, which is not observed."""

    observation_space, action_space = spaces.Box(0, 1, (1,), np.float32), spaces.MultiBinary(1)
    max_episode_steps = 1
    initial_draws: ClassVar = {"side": Integers(2)}

    def initial(self, rng, params=None):
        return Coin(rng["side"])

    def transition(self, state, action, rng, params=None):
        return state

    def observation(self, state, rng, params=None):
        return torch.zeros(len(state.side), 1)

    def reward(self, state, action, next_state, rng, params=None):
        return (action[:, 0] == state.side).float()

    def terminal(self, state, rng, params=None):
        return torch.zeros_like(state.side, dtype=torch.bool)


def test_sampled_actions_are_independent_of_the_environments_random_numbers():
    assert 0.3 < evaluate(parts_of(Guessing), 100, sample=True).mean < 0.7


@pytest.mark.parametrize("sample", [False, True])
def test_returns_do_not_depend_on_the_number_of_environments(sample):
    parts = parts_of("Pendulum-v1", env_kwargs={"max_episode_steps": 20})
    results = [evaluate(parts, 9, num_envs, seed=5, sample=sample) for num_envs in (1, 4, 7)]
    assert results[0] == results[1] == results[2]
    assert len(set(results[0].returns)) == 9
    assert results[0].returns != evaluate(parts, 9, 4, seed=5, sample=not sample).returns


@pytest.mark.parametrize("sample", [False, True])
def test_a_large_continuous_task_does_not_use_bfloat16(sample):
    pytest.importorskip("mujoco")
    parts = parts_of("HalfCheetah-v5", env_kwargs={"max_episode_steps": 15})
    results = [evaluate(parts, 8, num_envs, sample=sample) for num_envs in (1, 7)]
    assert results[0] == results[1]
    assert len(set(results[0].returns)) == 8


class SumsOfActions(gymnasium.Env):
    """Rewards with all bits of the actions, which are `size` numbers."""

    def __init__(self, size):
        self.observation_space = spaces.Box(-1, 1, (5,))
        self.action_space = spaces.Box(-1, 1, (size,), np.float64)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.np_random.uniform(-1, 1, 5).astype(np.float32), {}

    def step(self, action):
        self.time += 1
        reward = float(action @ (1.0 + np.arange(len(action)) / 7))
        return self.np_random.uniform(-1, 1, 5).astype(np.float32), reward, False, self.time == 6, {}


@pytest.mark.parametrize(
    ("algorithm", "size"), [*((PPO, size) for size in (1, 2, 3, 4, 7)), (SAC, 1), (SAC, 7), (TD3, 1), (TD3, 7)]
)
def test_actions_do_not_depend_on_the_row_position_bit_for_bit(algorithm, size):
    parts = parts_of(SumsOfActions, env_kwargs={"size": size}, make_algorithm=algorithm)
    results = [evaluate(parts, 17, num_envs) for num_envs in (1, 3, 5, 8, 17)]
    assert len(set(results[0].returns)) == 17
    assert all(result == results[0] for result in results)


def test_linear_layers_may_be_called_with_keywords():
    x, weight, bias = torch.randn(4, 3), torch.randn(2, 3), torch.randn(2)
    with _EqualPlaces():
        found = torch.nn.functional.linear(input=x, weight=weight, bias=bias)
        assert torch.equal(found, torch.nn.functional.linear(x, weight, bias))
    torch.testing.assert_close(found, torch.addmm(bias, x, weight.T))


def test_more_environments_than_a_policy_batch_change_nothing():
    parts = parts_of("Pendulum-v1", env_kwargs={"max_episode_steps": 20})
    for sample in (False, True):
        assert evaluate(parts, 19, 3, sample=sample) == evaluate(parts, 19, 19, sample=sample)


def test_different_lengths_give_equal_results():
    """Episodes end at different times, and lanes are refilled in another order with each number of environments."""
    parts = parts_of("CartPole-v1")
    for sample in (False, True):
        results = [evaluate(parts, 15, num_envs, sample=sample) for num_envs in (1, 4, 7)]
        assert results[0] == results[1] == results[2]
        assert len(set(results[0].lengths)) > 3


class TestSet(gymnasium.Env):
    """Each reset takes the next sample of all environments; lengths of episodes differ."""

    observation_space, action_space = spaces.Box(0, np.inf, (1,)), spaces.Discrete(2)
    taken, options = [], []

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.taken.append(seed)
        self.options.append(options)
        self.left, self.has_ended = 1 + seed % 4, False
        return np.array([seed], np.float32), {}

    def step(self, action):
        assert not self.has_ended
        self.left -= 1
        self.has_ended = self.left == 0
        return np.array([self.left], np.float32), 1.0, self.has_ended, False, {}


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_no_environment_is_reset_without_an_episode(num_envs, sample):
    evaluator = make_evaluator(*parts_of(TestSet), 11, num_envs)
    for seed, count in [(0, 11), (100, 2), (200, 1), (300, 3), (400, 9)]:
        TestSet.taken.clear()
        evaluation = evaluator.evaluate(count, seed=seed, sample=sample)
        assert sorted(TestSet.taken) == list(range(seed, seed + count))
        assert evaluation.lengths == tuple(1 + k % 4 for k in TestSet.taken) or num_envs > 1
        assert sorted(evaluation.lengths) == sorted(1 + k % 4 for k in TestSet.taken)
        assert evaluation.returns == tuple(map(float, evaluation.lengths))
        TestSet.taken.clear()
        assert [episode.length for episode in evaluator.test_episodes(count, seed)] == list(evaluation.lengths)
        assert len(TestSet.taken) == count
    assert set(map(str, TestSet.options)) == {"None"}  # as the caller gave none
    evaluator.close()


def test_cart_poles_of_one_loop_rest_too():
    parts = parts_of("CartPole-v1")
    evaluator = make_evaluator(*parts, 9, 4)
    expected = [evaluate(parts, count, 1, seed=3) for count in (9, 2)]
    assert evaluator.environment.env.joint is not None
    assert [evaluator.evaluate(count, seed=3) for count in (9, 2, 9)] == [*expected, expected[0]]
    evaluator.close()


def test_all_episodes_that_start_are_counted():
    """The first to finish would be the short ones: 8 environments of 10 or 500 steps would report 138."""
    parts = parts_of(TwoLengths, make_algorithm=Zero)
    num_episodes = 60
    evaluation = evaluate(parts, num_episodes, 15)
    expected = []
    for k in range(num_episodes):
        env = TwoLengths()
        env.reset(seed=k)
        expected.append(env._length)
    assert list(evaluation.lengths) == expected == list(evaluation.returns)
    assert len(set(expected)) == 2


class Zero(RLAlgorithm):
    """Does nothing, quickly."""

    on_policy = True

    def rollout_step(self, time_step, state):
        return AlgStep(torch.zeros(len(time_step.step_type), dtype=torch.int64), state)

    def train_step(self, experience, state): ...

    def calc_loss(self, experience, info): ...


class Seeded(OneState):
    """Remembers the seeds it was reset with; rewards with the first number of its generator."""

    seeds = []

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        result = super().reset(seed=seed)
        self._reward = self.np_random.random()
        return result

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, self._reward, *rest


@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_episode_k_is_seeded_with_base_plus_k(num_envs):
    parts = parts_of(Seeded, make_algorithm=Zero, env_kwargs={"length": 2})
    Seeded.seeds.clear()
    evaluation = evaluate(parts, 7, num_envs, seed=100)
    assert sorted(seed for seed in Seeded.seeds if seed is not None) == list(range(100, 107))
    expected = [2 * np.float32(np.random.default_rng(100 + k).random()) for k in range(7)]
    assert evaluation.returns == pytest.approx(expected)
    assert evaluation.lengths == (2,) * 7 and evaluation.seed == 100


def test_it_repeats_itself():
    parts = parts_of("Pendulum-v1", env_kwargs={"max_episode_steps": 20})
    evaluator = make_evaluator(*parts, 3, 2)
    for sample in (False, True):
        assert evaluator.evaluate(3, sample=sample) == evaluator.evaluate(3, sample=sample)
    evaluator.close()


@pytest.mark.parametrize("sample", [False, True])
def test_no_random_state_outside_is_touched(sample):
    parts = parts_of("CartPole-v1")
    evaluator = make_evaluator(*parts, 4, 2)
    before = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    evaluator.evaluate(4, sample=sample)
    evaluator.close()
    assert random.getstate() == before[0]
    np.testing.assert_equal(np.random.get_state(legacy=False), before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


def test_random_states_outside_do_not_matter():
    parts = parts_of("CartPole-v1")
    torch.manual_seed(1)
    one = evaluate(parts, 4, 2, sample=True)
    torch.manual_seed(2)
    assert evaluate(parts, 4, 2, sample=True) == one


def test_normalizers_are_frozen_and_rewards_raw():
    parts = parts_of("CartPole-v1", [ObservationNormalizer, functools.partial(RewardScale, scale=100.0)])
    _, algorithm, transforms = parts
    rows = torch.randn(5, 3, 4)
    step = nest.tensors(make_environment("CartPole-v1", num_envs=3).reset())
    many = step._replace(observation=rows, step_type=torch.ones(5, 3, dtype=torch.int32), reward=torch.ones(5, 3))
    transforms.observe(many, transforms.initial_state(3), 0)
    before = {name: value.clone() for name, value in transforms.state_dict().items() if torch.is_tensor(value)}
    weights = [parameter.clone() for parameter in algorithm.parameters()]
    evaluation = evaluate(parts, 5, 2)
    assert evaluation.returns == tuple(map(float, evaluation.lengths))
    assert before and all(torch.equal(value, transforms.state_dict()[name]) for name, value in before.items())
    assert all(torch.equal(a, b) for a, b in zip(weights, algorithm.parameters()))


def test_the_policy_receives_transformed_observations():
    class Sees(Zero):
        def predict_step(self, time_step, state):
            assert time_step.observation.eq(0).all()  # (1 - mean) / deviation, with a mean of 1
            return super().predict_step(time_step, state)

    parts = parts_of(OneState, [ObservationNormalizer], make_algorithm=Sees)
    step = nest.tensors(make_environment(OneState).reset())
    rows = step._replace(observation=torch.ones(1, 1, 1), step_type=step.step_type[None])
    parts[2].observe(rows, parts[2].initial_state(1), 0)
    assert evaluate(parts, 2).returns == (7.0, 7.0)


@pytest.mark.parametrize("training", [False, True])
def test_evaluation_uses_eval_mode_and_restores_the_mode(training):
    class Moody(Zero):
        def predict_step(self, time_step, state):
            assert not self.training
            return super().predict_step(time_step, state)

    parts = parts_of(OneState, make_algorithm=Moody)
    parts[1].train(training)
    evaluate(parts, 2)
    assert parts[1].training == training


def test_noise_of_layers_explores_where_the_policy_is_sampled():
    class Noisy(Zero):
        def __init__(self, *specs):
            super().__init__(*specs)
            self.layer, self.modes = NoisyLinear(2, 2), []

        def rollout_step(self, time_step, state):
            self.modes.append(self.layer.training)
            return super().rollout_step(time_step, state)

    parts = parts_of(OneState, make_algorithm=Noisy)
    evaluate(parts, 2, sample=True)
    assert parts[1].modes and all(parts[1].modes)


def test_numbers_that_are_none_are_refused_in_one_sentence():
    parts = parts_of(OneState)
    with pytest.raises(UsageError, match="make_evaluator.num_episodes is 0; it must be an integer of at least 1"):
        make_evaluator(*parts, 0)
    with contextlib.closing(make_evaluator(*parts, 2)) as evaluator:
        for seed in (-1, None, 1.5):
            with pytest.raises(UsageError, match=f"seed is {seed}; it must be an integer of at least 0"):
                evaluator.evaluate(2, seed=seed)
            with pytest.raises(UsageError, match=f"seed is {seed}; it must be an integer of at least 0"):
                evaluator.test_episodes(2, seed)
        assert evaluator.evaluate(2.0).returns == evaluator.evaluate(2).returns


def test_it_builds_environments_of_its_own():
    built = []

    def factory(**options):
        built.append(options)
        return make_environment(OneState, **options)

    _, algorithm, transforms = parts_of(OneState, make_algorithm=Zero)
    make_evaluator(factory, algorithm, transforms, 3, 8, render_mode=None).close()
    make_evaluator(factory, algorithm, transforms, 30, 8).close()
    assert built == [
        {"num_envs": 3, "evaluation": True, "render_mode": None},
        {"num_envs": 8, "evaluation": True},
    ]


# Policies that remember.


class Alternating(RLAlgorithm):
    """Acts by its memory alone: right, left, right, ..., from the start of each episode; adds up what it saw."""

    on_policy = True

    def initial_state(self, batch_size):
        return {"count": torch.zeros(batch_size, dtype=torch.int64), "sum": torch.ones(batch_size, 2)}

    def rollout_step(self, time_step, state):
        first = time_step.step_type == StepType.FIRST
        assert (state["count"][first] == 0).all() and (state["sum"][first] == 1).all()
        after = {"count": state["count"] + 1, "sum": state["sum"] + time_step.observation[:, :2]}
        return AlgStep(state["count"] % 2, after)

    def train_step(self, experience, state): ...

    def calc_loss(self, experience, info): ...


class Listening(OneState):
    """Rewards 1 where the action is the step's parity: a memory that was mixed up loses."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._length = int(self.np_random.integers(1, 12))
        return np.ones(2, np.float32), {}

    def step(self, action):
        right = action == self._step % 2
        _, _, *rest = super().step(action)
        return np.ones(2, np.float32), float(right), *rest


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("num_envs", [1, 4, 7, 11])
def test_memory_belongs_to_its_episode(num_envs, sample):
    parts = parts_of(Listening, make_algorithm=Alternating)
    evaluation = evaluate(parts, 20, num_envs, sample=sample)
    assert evaluation.returns == tuple(map(float, evaluation.lengths))
    assert len(set(evaluation.lengths)) > 3


# Environments that reset by themselves.


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_a_tensor_environment_runs_one_episode_in_each_row(mode):
    parts = parts_of(TensorPointMass, env_kwargs={"length": 6, "autoreset": mode})
    evaluation = evaluate(parts, 20, 4, seed=3)
    assert evaluation.lengths == (6,) * 20 and len(set(evaluation.returns)) == 20
    # By hand: the same starts, the same policy, rewards added up to the end of the first episode.
    env = TensorPointMass(20, 6)
    observation, _ = env.reset(seed=3)
    total = torch.zeros(20, dtype=torch.float64)
    for _ in range(6):
        blocks = observation[torch.arange(24).clamp(max=19)].split(8)  # 8 rows each, the last one filled up
        steps = [TimeStep(None, None, None, block, None, None) for block in blocks]
        with torch.no_grad():
            action = torch.cat([parts[1].network.policy(step, None)[0].mode() for step in steps])[:20]
        observation, reward, *_ = env.step(action.clamp(-1, 1))
        total += reward.double()
    assert evaluation.returns == pytest.approx(total.tolist(), rel=1e-5)  # an evaluation gives heads more outputs


def test_custom_vector_environments_run_one_episode_per_row():
    env = SyncVectorEnv([lambda n=n: Stamped((n,)) for n in (3, 1, 5)], autoreset_mode=AutoresetMode.NEXT_STEP)
    environment = VectorEnvironment(env, [0] * 3, autoreset=False)
    specs = environment.observation_spec, environment.reward_spec
    algorithm = Zero(specs[0], environment.action_spec, specs[1])
    evaluator = Evaluator(environment, algorithm, Transforms([], *specs))
    evaluation = evaluator.evaluate(3)
    assert evaluation.lengths == (3, 1, 5) and evaluation.returns == (6.0, 1.0, 15.0)


def test_on_row_sees_every_row_of_every_episode():
    parts = parts_of(Listening, make_algorithm=Alternating)
    counts = {}

    returns, ends = [0.0] * 12, []

    def on_row(row):
        for lane in np.flatnonzero(row.episode >= 0):
            k = int(row.episode[lane])
            counts[k] = counts.get(k, 0) + 1
            returns[k] += row.reward[lane]
            ends.extend([k] if row.ended[lane] else [])

    evaluation = evaluate(parts, 12, 5, on_row=on_row)
    assert counts == {k: length + 1 for k, length in enumerate(evaluation.lengths)}
    assert tuple(returns) == evaluation.returns and sorted(ends) == list(range(12))


# Episodes without an end.


class Endless(OneState):
    """Never ends in an odd episode, and after 3 actions in an even one."""

    def reset(self, *, seed=None, options=None):
        self._length = 10**9 if seed is not None and seed % 2 else 3
        return super().reset(seed=seed)


@pytest.mark.parametrize("num_envs", [1, 2, 8])
def test_an_episode_without_an_end_is_cut_and_truncated(num_envs):
    lines = []
    parts = parts_of(Endless, make_algorithm=Zero)
    with contextlib.closing(make_evaluator(*parts, 5, num_envs, max_length=6)) as evaluator:
        evaluator.log = lines.append
        evaluation = evaluator.evaluate(5)
        assert evaluation.lengths == (3, 6, 3, 6, 3) and evaluation.returns == (3.0, 6.0, 3.0, 6.0, 3.0)
        assert evaluation.num_cut == evaluator.num_cut == evaluation.summary()["num_cut"] == 2
        assert [line.partition(" and ")[0] for line in lines] == ["An episode was cut at 6 steps"]
        for episode, length in zip(evaluator.test_episodes(5), evaluation.lengths):
            assert len(episode.rewards) == length and episode.truncated[-1] and not episode.terminated.any()
        assert evaluator.num_cut == 2
        assert evaluator.evaluate(1).num_cut == 0
    with pytest.raises(UsageError, match="max_length is 0; it must be at least 1"):
        make_evaluator(*parts, 1, max_length=0)


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_episodes_of_a_tensor_environment_are_cut_too(mode):
    parts = parts_of(TensorPointMass, env_kwargs={"length": 20, "autoreset": mode})
    with contextlib.closing(make_evaluator(*parts, 3, max_length=6)) as evaluator:
        assert evaluator.evaluate(3).lengths == (6,) * 3 and evaluator.num_cut == 3
        # The step at which it ends by itself cuts nothing.
    with contextlib.closing(make_evaluator(*parts, 3, max_length=20)) as evaluator:
        assert evaluator.evaluate(3).lengths == (20,) * 3 and evaluator.num_cut == 0


def test_a_long_evaluation_reports_its_progress(monkeypatch):
    monkeypatch.setattr("alfish.training.evaluator.PROGRESS_SECONDS", 0.0)
    lines = []
    with contextlib.closing(make_evaluator(*parts_of(OneState, make_algorithm=Zero), 3, 2)) as evaluator:
        evaluator.log = lines.append
        evaluator.evaluate(3)
    assert len(lines) == 14 and lines[0].startswith("Evaluating: 0 of 3 episodes have ended after 0 s and 1 steps")
    assert lines[-1].startswith("Evaluating: 2 of 3 episodes")


# What is reported.


def test_the_summary_is_right():
    evaluation = Evaluation(env_steps=7, seed=3, returns=(1.0, 2.0, 6.0), lengths=(4, 5, 6))
    summary = evaluation.summary()
    keys = [
        "env_steps",
        "num_episodes",
        "mean",
        "std",
        "ci_low",
        "ci_high",
        "min",
        "max",
        "returns",
        "lengths",
        "num_cut",
    ]
    assert list(summary) == keys
    assert (summary["env_steps"], summary["num_episodes"], summary["mean"]) == (7, 3, 3.0)
    assert summary["std"] == pytest.approx(7**0.5) and (summary["min"], summary["max"]) == (1.0, 6.0)
    assert summary["returns"] == [1.0, 2.0, 6.0] and summary["lengths"] == [4, 5, 6]
    assert 1 <= summary["ci_low"] < 3 < summary["ci_high"] <= 6
    assert evaluation.to_csv() == "episode,seed,return,length\n0,3,1.0,4\n1,4,2.0,5\n2,5,6.0,6\n"


def test_the_interval_covers_the_mean_19_times_in_20():
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(150):
        returns = tuple(generator.normal(5, 2, 30))
        summary = Evaluation(0, 0, returns, (1,) * 30).summary()
        covered += summary["ci_low"] <= 5 <= summary["ci_high"]
    assert 0.88 < covered / 150 <= 0.99


def test_drawing_in_parts_gives_the_same_interval(monkeypatch):
    returns = np.random.default_rng(3).normal(size=37)
    draws = np.random.default_rng(0).choice(returns, (10_000, 37)).mean(1)
    for block in (1, 1000, 10**9):
        monkeypatch.setattr(evaluation, "BLOCK", block)
        assert evaluation.bootstrap_interval(returns) == tuple(np.percentile(draws, [2.5, 97.5]))


def test_one_episode_has_no_spread():
    summary = Evaluation(0, 0, (4.0,), (2,)).summary()
    assert (summary["std"], summary["ci_low"], summary["ci_high"]) == (0.0, 4.0, 4.0)


# The episodes themselves.


def evaluator_of(parts, num_episodes, num_envs=8):
    return make_evaluator(*parts, num_episodes, num_envs)


def episodes_of(parts, num_episodes, num_envs=8, **options):
    evaluator = evaluator_of(parts, num_episodes, num_envs)
    try:
        return evaluator.generate_test_episodes(num_episodes, **options)
    finally:
        evaluator.close()


def assert_same(episodes, others):
    """Bit for bit."""
    assert len(episodes) == len(others)
    for one, other in zip(episodes, others):
        a, b = nest.leaves(tuple(one)), nest.leaves(tuple(other))
        assert one.id == other.id and len(a) == len(b)
        for x, y in zip(a[1:], b[1:]):
            assert x.dtype == y.dtype and np.array_equal(x, y)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_evaluations_use_the_test_episodes(env_id, sample):
    parts = parts_of(env_id, env_kwargs={"max_episode_steps": 15})
    evaluation = evaluate(parts, 11, 4, seed=7, sample=sample)
    episodes = episodes_of(parts, 11, 4, seed=7, sample=sample)
    assert [episode.id for episode in episodes] == [str(k) for k in range(11)]
    assert tuple(episode.length for episode in episodes) == evaluation.lengths
    assert [e.rewards.sum(dtype=np.float64) for e in episodes] == pytest.approx(evaluation.returns, abs=1e-9)
    for num_envs in (1, 7):
        assert_same(episodes, episodes_of(parts, 11, num_envs, seed=7, sample=sample))


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "HalfCheetah-v5"])
def test_replaying_recorded_actions_gives_the_same_rows(env_id, sample):
    if env_id == "HalfCheetah-v5":
        pytest.importorskip("mujoco")
    factories = [ObservationNormalizer, functools.partial(RewardScale, scale=100.0)]
    parts = parts_of(env_id, factories, env_kwargs={"max_episode_steps": 40})
    seen = nest.tensors(make_environment(env_id, num_envs=3).reset())
    parts[2].observe(nest.map(lambda leaf: leaf.expand(5, *leaf.shape), seen), parts[2].initial_state(3), 0)
    for episode in episodes_of(parts, 5, 3, seed=20, sample=sample):
        env = gymnasium.make(env_id, max_episode_steps=40, disable_env_checker=True)
        observations, rows = [env.reset(seed=20 + int(episode.id))[0]], []
        assert episode.actions.dtype == env.action_space.dtype
        for action in episode.actions:
            assert env.action_space.contains(action)
            observation, *row, _ = env.step(action)
            observations.append(observation)
            rows.append(row)
        rewards, terminated, truncated = (np.array(part) for part in zip(*rows))
        assert np.array_equal(np.array(observations, np.float32), episode.observations)
        assert np.array_equal(rewards.astype(np.float32), episode.rewards)
        assert np.array_equal(terminated, episode.terminated)
        assert np.array_equal(truncated & ~terminated, episode.truncated)


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("num_envs", [1, 2, 5])
def test_episode_rows_are_not_overwritten_and_end_with_the_true_observation(num_envs, truncates):
    lengths = (3, 1, 6)
    parts = parts_of(Stamped, env_kwargs={"lengths": lengths, "truncates": truncates}, make_algorithm=Zero)
    episodes = episodes_of(parts, 9, num_envs)
    for k, episode in enumerate(episodes):
        assert np.ptp(episode.observations[:, :2], 0).tolist() == [0, 0]
        assert episode.observations[:, 2].tolist() == list(range(episode.length + 1))
        assert episode.length == lengths[int(episode.observations[0, 1]) % 3]
        assert episode.rewards.tolist() == list(range(1, episode.length + 1)) and episode.id == str(k)
        ends = [False] * (episode.length - 1) + [True]
        never = [False] * episode.length
        assert [episode.terminated.tolist(), episode.truncated.tolist()] == (
            [never, ends] if truncates else [ends, never]
        )
    begun = {tuple(episode.observations[0, :2]) for episode in episodes}
    assert len(begun) == 9  # no episode twice


@pytest.mark.parametrize("nested_action", [False, True])
def test_nests_are_in_the_environments_own_units(nested_action):
    environment = make_environment(NestedBandit, env_kwargs={"nested_action": nested_action})
    random = functools.partial(Random, spec=environment.action_spec)
    parts = parts_of(NestedBandit, env_kwargs={"nested_action": nested_action}, make_algorithm=random)
    for episode in episodes_of(parts, 6, 4, seed=3):
        env = NestedBandit(nested_action)
        observation, _ = env.reset(seed=3 + int(episode.id))
        for t in range(episode.length):
            seen, action = nest.at(episode.observations, t), nest.at(episode.actions, t)
            for name, leaf in observation.items():
                assert np.array_equal(seen[name], leaf) and seen[name].dtype in (leaf.dtype, np.float32)
            assert env.action_space.contains(action)
            observation, reward, *_ = env.step(action)
            assert np.float32(reward) == episode.rewards[t]
        assert np.array_equal(episode.observations["image"][-1], observation["image"])
        assert episode.observations["digit"][-1] == observation["digit"]


class Random(Zero):
    """Draws actions that are beyond their bounds at times."""

    def __init__(self, *specs, spec):
        super().__init__(*specs)
        self._spec = spec

    def rollout_step(self, time_step, state):
        action = sample_actions(self._spec, len(time_step.step_type))
        return AlgStep(nest.map(lambda leaf: leaf * 1.5 if leaf.is_floating_point() else leaf, action), state)


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_test_episodes_of_a_tensor_environment(mode):
    parts = parts_of(TensorPointMass, env_kwargs={"length": 6, "autoreset": mode})
    evaluation = evaluate(parts, 9, 4, seed=3)
    episodes = episodes_of(parts, 9, 4, seed=3)
    assert [e.rewards.sum(dtype=np.float64) for e in episodes] == pytest.approx(evaluation.returns, abs=1e-9)
    for episode in episodes:
        assert episode.length == 6 and episode.truncated[-1] and not episode.terminated.any()
        np.testing.assert_allclose(episode.observations[:, 1], np.arange(7) / 6, atol=1e-6)
        x = np.clip(episode.observations[:-1, 0] + np.float32(0.5) * episode.actions[:, 0], -2, 2)
        np.testing.assert_allclose(episode.observations[1:, 0], x, atol=1e-6)
        assert np.array_equal(episode.rewards, -np.abs(episode.observations[1:, 0]))


def test_more_episodes_than_environments_that_reset_together_are_refused():
    _, algorithm, transforms = parts_of(TensorPointMass)
    evaluator = Evaluator(make_environment(TensorPointMass, 2), algorithm, transforms)
    with pytest.raises(UsageError, match="asked for 3 episodes, but its 2 environments cannot be seeded"):
        next(evaluator.test_episodes(3))
    with pytest.raises(UsageError, match="asked for 3 episodes"):
        evaluator.evaluate(3)
    with pytest.raises(UsageError, match="it must be at least 1"):
        evaluator.generate_test_episodes(0)


def test_a_policy_is_evaluated_only_in_matching_environments():
    _, algorithm, transforms = parts_of("Pendulum-v1")
    closed = []

    def other(**options):
        environment = make_environment("MountainCarContinuous-v0", **options)
        close, environment.close = environment.close, lambda: closed.append(close())
        return environment

    with pytest.raises(UsageError, match=r"have the observation_spec Box.*\(2,\).*trains on Box.*\(3,\)"):
        make_evaluator(other, algorithm, transforms, 1)
    assert len(closed) == 1


class Stepped(OneState):
    """Counts the steps of all."""

    count = 0

    def step(self, action):
        Stepped.count += 1
        return super().step(action)


def test_episodes_are_handed_over_as_soon_as_they_are_whole():
    parts = parts_of(Stepped, make_algorithm=Zero, env_kwargs={"length": 4})
    evaluator = evaluator_of(parts, 5, 1)
    Stepped.count = 0
    for k, episode in enumerate(evaluator.test_episodes(5)):
        assert episode.id == str(k) and Stepped.count == 4 * (k + 1)


def test_an_episode_waits_for_those_before_it():
    class ByPosition(TwoLengths):
        """The first environment's first episode is the longest."""

        def reset(self, *, seed=None, options=None):
            result = super().reset(seed=seed)
            self._length = 9 if seed == 0 else 2
            return result

    evaluator = evaluator_of(parts_of(ByPosition, make_algorithm=Zero), 6, 2)
    assert [(e.id, e.length) for e in evaluator.test_episodes(6)] == [("0", 9), *((str(k), 2) for k in range(1, 6))]


@pytest.mark.parametrize("sample", [False, True])
def test_between_episodes_the_caller_is_at_home(sample):
    parts = parts_of("Pendulum-v1", env_kwargs={"max_episode_steps": 15})
    parts[1].train(True)
    undisturbed = episodes_of(parts, 5, 2, sample=sample)
    evaluator, episodes = evaluator_of(parts, 5, 2), []
    torch.manual_seed(12)
    state = torch.get_rng_state()
    for episode in evaluator.test_episodes(5, sample=sample):
        assert torch.is_grad_enabled() and parts[1].training and torch.equal(torch.get_rng_state(), state)
        torch.rand(7)
        state = torch.get_rng_state()
        episodes.append(episode)
    assert_same(episodes, undisturbed)


def test_policies_that_use_the_global_generator_are_not_disturbed():
    environment = make_environment("Pendulum-v1")
    random = functools.partial(Random, spec=environment.action_spec)
    parts = parts_of("Pendulum-v1", env_kwargs={"max_episode_steps": 15}, make_algorithm=random)
    evaluation = evaluate(parts, 5, 2, seed=4)
    returns = []
    for episode in evaluator_of(parts, 5, 2).test_episodes(5, seed=4):
        torch.rand(3)
        returns.append(episode.rewards.sum(dtype=np.float64))
    assert returns == pytest.approx(evaluation.returns, abs=1e-9)


def test_passes_begun_too_early_are_refused_and_recover():
    parts = parts_of("CartPole-v1")
    evaluator = evaluator_of(parts, 6, 2)
    expected = episodes_of(parts, 6, 2)
    broken_off = evaluator.test_episodes(6)
    next(broken_off)
    assert evaluator.evaluate(6, seed=3) == evaluate(parts, 6, seed=3)
    with pytest.raises(UsageError, match="began other episodes before all episodes of test_episodes had been read"):
        next(broken_off)
    one, other = evaluator.test_episodes(6), evaluator.test_episodes(6)
    next(one)
    first = next(other)
    with pytest.raises(UsageError, match="began other episodes"):
        next(one)
    assert_same([first, *other], expected)


class Own(VectorEnv):
    """A vector class of its own that leaves resets to the caller. Lane i has episodes of 2 + i steps, and one seed."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012
    single_observation_space = spaces.Box(-9, 9, (1,))
    single_action_space = spaces.Discrete(2)

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.observation_space = spaces.Box(-9, 9, (num_envs, 1))
        self.action_space = spaces.MultiDiscrete([2] * num_envs)
        self._left = np.zeros(num_envs, int)
        self.resets = []

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        self.resets.append((seed, mask.tolist()))
        self._left[mask] = 2 + np.flatnonzero(mask)
        return np.zeros((self.num_envs, 1), np.float32), {}

    def step(self, action):
        assert (self._left > 0).all(), "an environment that has ended was stepped"
        self._left -= 1
        done = self._left == 0
        return np.zeros((self.num_envs, 1), np.float32), np.ones(self.num_envs), done, np.zeros_like(done), {}


@pytest.mark.parametrize("num_envs", [1, 2, 8])
def test_a_custom_vector_class_is_evaluated_with_one_seed(num_envs):
    evaluator = make_evaluator(*parts_of(Own), 3, num_envs)
    assert evaluator.environment.num_envs == 3 and not evaluator.environment.seeds_rows
    assert evaluator.evaluate(3, seed=100).lengths == (2, 3, 4)
    (first, *later) = evaluator.environment.env.resets
    assert first == (100, [True] * 3)
    assert later[0] == (None, [True, False, False]) and all(seed is None for seed, _ in later)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_last_observations_belong_to_their_episode_in_every_mode(mode):
    def vector(num_envs):
        return SyncVectorEnv([lambda: Stamped((3, 5))] * num_envs, autoreset_mode=mode)

    evaluator = make_evaluator(*parts_of(vector), 2)
    for episode in evaluator.generate_test_episodes(2):
        assert episode.observations[:, 2].tolist() == [0, 1, 2, 3]
        assert np.ptp(episode.observations[:, 1]) == 0


class Broken(Stamped):
    """Has an observation that is not finite after `step` steps of its third episode."""

    def __init__(self, step):
        super().__init__((3,))
        self._broken = step

    def _observation(self):
        is_broken = self._episode == 2 and self._step == self._broken
        return super()._observation() + np.float32(np.nan if is_broken else 0)


@pytest.mark.parametrize("step", [0, 2, 3])
def test_an_observation_that_is_not_finite_ends_an_evaluation(step):
    parts = parts_of(Broken, env_kwargs={"step": step})
    if step == 3:  # the policy does not act on the last observation of an episode
        assert len(evaluate(parts, 7, num_envs=2).returns) == 7
        return
    with pytest.raises(RunError, match=r"an observation that is not finite in episode 2 of the evaluation; fix the"):
        evaluate(parts, 4, num_envs=1)


@pytest.mark.parametrize(
    ("output", "error", "words"),
    [
        (torch.zeros(8), UsageError, r"predict_step of PPO returned a tensor of shape \[8\] .* as action"),
        (
            torch.full((8, 1), torch.nan),
            RunError,
            r"an action of the policy in episode 0 of the evaluation is not finite: \[nan\]",
        ),
    ],
)
def test_what_predict_step_returns_is_checked(output, error, words, monkeypatch):
    factory, algorithm, transforms = parts_of("Pendulum-v1", env_kwargs={"max_episode_steps": 3})
    monkeypatch.setattr(algorithm, "predict_step", lambda time_step, state: AlgStep(output, state))
    with pytest.raises(error, match=words):
        evaluate((factory, algorithm, transforms), 2, seed=5)


class Grading(OneState):
    """Episodes of 1 to 5 steps, which report their lengths at the end, and the grade of the longest ones only."""

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed)
        self.length = int(self.np_random.integers(1, 6))
        self.time = 0
        return result

    def step(self, action):
        self.time += 1
        ended = self.time == self.length
        graded = {"is_success": True} if ended and self.length == 5 else {}
        early = {} if ended else {"early": self.time}
        return np.ones(1, np.float32), 1.0, ended, False, {"own": {"length": self.time}, "word": "x", **early, **graded}


@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_infos_are_read_at_the_end_of_each_episode(num_envs):
    parts, logged = parts_of(Grading), []
    with contextlib.closing(make_evaluator(*parts, 9, num_envs)) as evaluator:
        by_default = evaluator.evaluate(9)
        evaluator.infos, evaluator.log = ["own.*", "is_success", "early", "word"], logged.append
        result = evaluator.evaluate(9)
        evaluator.evaluate(9)
    assert by_default.infos.keys() == {"is_success"}
    assert result.infos["own.length"] == result.lengths and set(result.lengths) >= {3, 5}
    longest = [length == 5 for length in result.lengths]
    assert [one == 1 for one in result.infos["is_success"]] == longest
    assert result.info_means() == {"own.length": result.mean, "is_success": 1}
    assert logged == [
        "Trainer.evaluation_infos has 'early', 'word', which matched no number in the infos at the ends of the episodes"
    ]
    summary = result.summary()["infos"]["is_success"]
    assert [one is not None for one in summary] == longest
    assert result.scalars("evaluation")["evaluation/env_info/own.length"] == result.mean
    header, *rows = result.to_csv().splitlines()
    assert header == "episode,seed,return,length,env_info/is_success,env_info/own.length"
    assert [row.split(",")[4] for row in rows] == ["1.0" if one else "" for one in longest]
    assert f"is_success 1 (in {sum(longest)} of 9 episodes), own.length " in result.words()


def test_names_of_infos_may_have_commas_and_quotes(tmp_path):
    evaluation = Evaluation(0, 3, (1.0, 2.0), (4, 5), infos={'x, "y"': (7.0, float("nan"))})
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "evaluation-000000000010.csv").write_text(evaluation.to_csv())
    assert read_evaluations(tmp_path) == {10: (1.0, 2.0)}
    assert read_evaluations(tmp_path, column='env_info/x, "y"') == {10: (7.0,)}
