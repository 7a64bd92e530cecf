"""Global random generators: of environments in processes of their own, and alfish's beside code that seeds them."""

import functools
import random

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish import nest
from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.environments import make_environment
from alfish.runs import random_state
from alfish.training.listener import Listener
from alfish.training.trainer import Trainer


class Drawing(gymnasium.Env):
    """Returns a number of each global generator. Episodes have 5 steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,))
    action_space = spaces.Box(-1, 1, (1,))

    def _row(self):
        return np.array([random.random(), np.random.rand(), torch.rand(())], np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._row(), {}

    def step(self, action):
        self.time += 1
        return self._row(), float(np.random.rand()), False, self.time == 5, {}


class Seeding(Drawing):
    """Seeds all generators, where `places` has the method."""

    def __init__(self, seed=0, places=("init", "reset", "step")):
        self.seed_of_generators, self.places = seed, places
        self._seed("init")

    def _seed(self, place):
        if place in self.places:
            random.seed(self.seed_of_generators)
            np.random.seed(self.seed_of_generators)
            torch.manual_seed(self.seed_of_generators)

    def _row(self):
        return np.zeros(3, np.float32)

    def reset(self, seed=None, options=None):
        self._seed("reset")
        return super().reset(seed=seed)

    def step(self, action):
        self._seed("step")
        return super().step(action)


def columns(environment):
    """Observations of 7 steps, `[7, B, 3]`; the sixth is a reset."""
    action = np.zeros((environment.num_envs, 1), np.float32)
    rows = [environment.step(action).observation for _ in range(7)]
    return np.stack(rows)


def test_environments_in_processes_draw_numbers_of_their_own():
    environment = make_environment(Drawing, num_envs=3, vectorization="async", seed=4)
    environment.reset()
    found = columns(environment)
    state = environment.state_dict()
    environment.close()
    assert len(np.unique(found)) == found.size  # no number occurs twice: of no generator, in no environment

    again = make_environment(Drawing, num_envs=3, vectorization="async", seed=4)
    again.reset()
    assert (columns(again) == found).all()
    random_state.seed_all(9)  # as a resumed run restores it
    again.load_state_dict(state)
    resumed = columns(again)
    again.close()
    assert not np.isin(resumed, found).any()  # a resumed run does not begin as the run did


def actions(tmp_path, run_seed, at_random, **options):
    trainer = Trainer(
        tmp_path / f"{run_seed} {options}",
        algorithm=SAC,
        environment=functools.partial(make_environment, Seeding, num_envs=2, env_kwargs=options),
        num_env_steps=1000,
        seed=run_seed,
        listeners=[],
    )
    found = nest.arrays(trainer.unroller.unroll(24, at_random).action)
    weights = [parameter.clone() for parameter in trainer.algorithm.parameters()]
    trainer.close()
    return found, weights


@pytest.mark.parametrize("at_random", [True, False])
@pytest.mark.parametrize("place", ["reset", "step", "init"])
def test_an_environment_that_seeds_the_generators_repeats_no_action(tmp_path, place, at_random):
    for run, seed in [(1, 0), (5, 5)]:  # the run's seed may be the environment's
        found, _ = actions(tmp_path, run, at_random, seed=seed, places=(place,))
        assert len(np.unique(found)) == found.size
    again, _ = actions(tmp_path / "again", run, at_random, seed=seed, places=(place,))
    assert (again == found).all()


def test_initial_weights_follow_the_runs_seed(tmp_path):
    (_, own), (_, again), (_, other) = (
        actions(tmp_path / str(run), seed, True, places=("init",)) for run, seed in enumerate([3, 3, 4])
    )
    assert all(torch.equal(a, b) for a, b in zip(own, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(own, other, strict=True))


def test_alfishs_generator_matches_torchs_seed():
    torch.manual_seed(7)
    expected = torch.rand(5)
    random_state.seed_all(7)
    assert torch.equal(torch.rand(5), expected)
    random_state.seed_all(2**62 + 7)
    assert torch.equal(torch.rand(5), expected)  # a CPU's generator uses the lowest 32 bits


def test_reseeding_by_other_code_does_not_repeat_numbers():
    random_state.seed_all(0)
    found = []
    for _ in range(300):
        with random_state.apart(), random_state.apart():
            torch.manual_seed(0)
        found.append(float(torch.rand((), dtype=torch.float64)))
    assert len(set(found)) == 300
    with random_state.apart():
        expected = torch.rand(3)  # code that draws shares the generator
    state = torch.get_rng_state()
    with random_state.apart():
        random_state.seed_torch(1)
    assert not torch.equal(torch.get_rng_state(), state)
    assert len(set(expected.tolist())) == 3


def test_evaluation_is_seeded_and_does_not_change_the_training_environments_generators(tmp_path):
    trainer = Trainer(
        tmp_path,
        algorithm=PPO,
        environment=functools.partial(make_environment, Drawing),
        num_env_steps=1000,
        listeners=[],
    )
    random_state.seed_all(1)
    before = random_state.rng_state()
    evaluator = trainer.evaluator(3, num_envs=1)
    first = evaluator.evaluate(3, seed=5)
    assert evaluator.evaluate(3, seed=5) == first
    assert [episode.rewards.sum() for episode in evaluator.test_episodes(3, seed=5)] == pytest.approx(first.returns)
    after = random_state.rng_state()
    assert all(after[name] == before[name] for name in ("python", "numpy"))
    assert torch.equal(after["torch"], before["torch"])
    evaluator.close(), trainer.close()


class SeedingListener(Listener):
    def after_iteration(self, trainer, report):
        torch.manual_seed(0)


def test_a_listener_that_seeds_the_generators_repeats_no_number(tmp_path):
    trainer = Trainer(
        tmp_path,
        algorithm=PPO,
        environment=functools.partial(make_environment, Seeding, env_kwargs={"places": ()}),
        unroll_length=8,
        num_iterations=4,
        listeners=[SeedingListener()],
    )
    found, unroll = [], trainer.unroller.unroll

    def noted(*arguments):
        found.append(torch.get_rng_state())
        return unroll(*arguments)

    trainer.unroller.unroll = noted
    trainer.train()
    assert len(found) == 4
    assert not any(torch.equal(a, b) for k, a in enumerate(found) for b in found[:k])
