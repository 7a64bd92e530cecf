"""Off-policy algorithms learn what is known of the toys, in seconds; further seeds are long."""

import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from toys import Bandit, OneState

from alfish.algorithms.dqn import DQN
from alfish.algorithms.sac import SAC
from alfish.algorithms.td3 import TD3
from alfish.data import TimeStep
from alfish.environments import make_environment
from alfish.learner.batches import ReplayBatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, CriticEnsemble, DeterministicActor, QNetwork, Torso
from alfish.parameters.schedules import Linear
from alfish.training.trainer import Trainer

LONG, SLOW = pytest.mark.long, pytest.mark.slow
SMALL = functools.partial(MLP, layers=(32,), activation="relu")
CRITIC = functools.partial(CriticEnsemble, layers=(32,))
Q_NETWORK = functools.partial(QNetwork, torso=functools.partial(Torso, mlp=SMALL))
ALGORITHMS = {
    "dqn": functools.partial(DQN, q_network=Q_NETWORK, gamma=0.9, epsilon=Linear(1.0, 0.05), target_period=20),
    "sac": functools.partial(SAC, actor_mlp=SMALL, critic=CRITIC, gamma=0.9, target_rate=0.05, initial_alpha=0.1,
                             box_target_entropy=-3.0, discrete_entropy_fraction=0.1),
    "td3": functools.partial(TD3, actor=functools.partial(DeterministicActor, mlp=SMALL), critic=CRITIC, gamma=0.9,
                             target_rate=0.05),
}  # fmt: skip


REPLAY = functools.partial(ReplayBatches, capacity=5000, batch_size=32, warmup_env_steps=100, updates_per_env_step=0.5)


def train(root_dir, algorithm, env_id, env_kwargs, seed, num_env_steps, num_envs=4, replay=REPLAY, **learner):
    trainer = Trainer(
        root_dir, algorithm=algorithm, batches=replay, seed=seed, device="cpu", listeners=[], unroll_length=num_envs,
        environment=functools.partial(make_environment, env_id, num_envs=num_envs, env_kwargs=env_kwargs),
        learner=functools.partial(Learner, **learner), num_env_steps=num_env_steps,
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.mark.parametrize(("name", "action", "best", "seed"), [
    pytest.param(*case, seed, marks=LONG if seed else marks)
    for seed in (0, 1, 2)
    for case, marks in (
        (("dqn", "discrete", 3.9), ()), (("sac", "discrete", 3.9), SLOW), (("sac", "box", 3.4), ()),
        (("td3", "box", 3.4), ()),
    )
])  # fmt: skip
def test_the_bandit_is_solved(tmp_path, name, action, best, seed):
    """4 rewards of at most 1 an episode; acting at random earns 1 (discrete) or about 1.5 (box)."""
    kwargs = {"action": action, "length": 4}
    trainer = train(tmp_path, ALGORITHMS[name], Bandit, kwargs, seed, 800, learning_rate=3e-3)
    evaluator = trainer.evaluator(50)
    assert evaluator.evaluate(50).mean > best


class TwoObservations(gymnasium.Env):
    """The observation is 0 or 1 at random, and is the best action: reward 3 (1 - (action - observation)^2)."""

    observation_space = spaces.Discrete(2)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return self._observe(), {}

    def step(self, action):
        self._step += 1
        reward = 3 * (1 - float(action[0] - self._observation) ** 2)
        return self._observe(), reward, False, self._step == 100, {}

    def _observe(self):
        self._observation = int(self.np_random.integers(2))
        return self._observation


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=LONG if seed else SLOW) for seed in range(5)])
def test_td3_learns_one_action_for_each_of_two_observations_without_saturating(tmp_path, seed):
    """With an initial gain of 0.01 in the actor's last layer, each of these seeds ends with the action 1 for both.

    Rewards of at most 3 were chosen among several recipes: with rewards of at most 10 some seeds still saturate.
    """
    actor = functools.partial(DeterministicActor, mlp=functools.partial(MLP, layers=(100,), activation="relu"))
    td3 = functools.partial(TD3, actor=actor, critic=functools.partial(CriticEnsemble, layers=(100,)))
    replay = functools.partial(ReplayBatches, capacity=5000, batch_size=32, warmup_env_steps=1000)
    trainer = train(tmp_path, td3, TwoObservations, {}, seed, 2500, num_envs=1, replay=replay, learning_rate=1e-2)
    with torch.no_grad():
        action = trainer.algorithm.actor(torch.arange(2))[:, 0]
    assert action[0].abs() < 0.3 and action[1] > 0.8


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=LONG), pytest.param(2, marks=LONG)])
def test_q_of_a_single_state_converges_to_1_over_1_minus_gamma(tmp_path, seed):
    """Reward 1 for ever, cut into episodes of 7 by truncation: its value is 10, not that of 7 steps, 5.2."""
    trainer = train(tmp_path, ALGORITHMS["dqn"], OneState, {"length": 7}, seed, 2400, learning_rate=Linear(2e-2))
    time_step = TimeStep(None, None, None, torch.ones(1, 1), None, None)
    q, _ = trainer.algorithm.q_network(time_step, None)
    assert (q.detach() - 10).abs().max() < 0.2
