"""Tianshou's side: its trainers with their statistics, without a logger, environments one after another."""

import functools
import random
from typing import Any

import gymnasium
import numpy as np
import torch
from tianshou.algorithm import DQN, PPO
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainerParams, OnPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic, dist_fn_categorical_from_logits

from benchmarks.runs import script


class Clock:
    """Is called at the start of each iteration with the steps so far; stores counters after the eighth update."""

    def __init__(self, updates_an_env_step: float):
        self._updates_an_env_step = updates_an_env_step
        self.first: script.Reading | None = None

    def read(self, env_steps: int) -> script.Reading:
        return script.read(env_steps, round(env_steps * self._updates_an_env_step))

    def __call__(self, env_steps: int) -> None:
        if self.first is None and env_steps * self._updates_an_env_step >= 8:
            self.first = self.read(env_steps)


class Environments:
    """Environments of one id, with the returns of their last hundred episodes."""

    def __init__(self, env_id: str, num_envs: int, seed: int):
        make = functools.partial(gymnasium.make, env_id)
        statistics = functools.partial(gymnasium.wrappers.RecordEpisodeStatistics, buffer_length=100 // num_envs)
        self._singles = [statistics(make()) for _ in range(num_envs)]
        self.vector = DummyVectorEnv([functools.partial(lambda env: env, env) for env in self._singles])
        self.vector.seed(seed)
        self.observation_shape = self._singles[0].observation_space.shape
        action_space = self._singles[0].action_space
        assert isinstance(action_space, gymnasium.spaces.Discrete)
        self.action_space = action_space

    def average_return(self) -> float:
        return float(np.mean([value for env in self._singles for value in env.return_queue]))


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def train(algorithm: Any, params: Any, clock: Clock, environments: Environments) -> None:
    result = algorithm.run_training(params)
    last = clock.read(result.train_step)
    script.report(clock.first, last, environments.average_return(), script.versions("tianshou", "torch"))


def ppo(env_id: str, num_env_steps: int, seed: int) -> None:
    seed_all(seed)
    environments = Environments(env_id, 8, seed)
    action_space = environments.action_space
    net = functools.partial(
        Net, state_shape=environments.observation_shape, hidden_sizes=(64, 64), activation=torch.nn.Tanh
    )
    actor = DiscreteActor(preprocess_net=net(), action_shape=action_space.n, softmax_output=False)
    algorithm = PPO(
        policy=ProbabilisticActorPolicy(
            actor=actor, dist_fn=dist_fn_categorical_from_logits, action_space=action_space, action_scaling=False
        ),
        critic=DiscreteCritic(preprocess_net=net()),
        optim=AdamOptimizerFactory(lr=3e-4, eps=1e-5),
        ent_coef=0.0,
        max_grad_norm=0.5,
    )
    clock = Clock(10 / 256)
    params = OnPolicyTrainerParams(
        training_collector=Collector(algorithm, environments.vector, VectorReplayBuffer(2048, 8)),
        max_epochs=1,
        epoch_num_steps=num_env_steps,
        collection_step_num_env_steps=2048,
        batch_size=256,
        update_step_num_repetitions=10,
        training_fn=lambda epoch, env_steps: clock(env_steps),
        verbose=False,
        show_progress=False,
    )
    train(algorithm, params, clock, environments)


def dqn(env_id: str, num_env_steps: int, seed: int) -> None:
    seed_all(seed)
    environments = Environments(env_id, 1, seed)
    action_space = environments.action_space
    net = Net(state_shape=environments.observation_shape, action_shape=action_space.n, hidden_sizes=(64, 64))
    policy = DiscreteQLearningPolicy(model=net, action_space=action_space)
    algorithm = DQN(
        policy=policy,
        optim=AdamOptimizerFactory(lr=1e-3),  # its DQN has no clipping
        target_update_freq=125,
        is_double=False,
        huber_loss_delta=1.0,
    )
    collector = Collector(algorithm, environments.vector, VectorReplayBuffer(50_000, 1), exploration_noise=True)
    collector.reset()
    collector.collect(n_step=1000, random=True)
    clock = Clock(0.25)

    def before_iteration(epoch: int, env_steps: int) -> None:
        clock(env_steps)
        policy.set_eps_training(1.0 - 0.95 * min(1.0, (1000 + env_steps) / (0.2 * num_env_steps)))

    params = OffPolicyTrainerParams(
        training_collector=collector,
        max_epochs=1,
        epoch_num_steps=num_env_steps - 1000,
        collection_step_num_env_steps=4,
        batch_size=64,
        update_step_num_gradient_steps_per_sample=0.25,
        training_fn=before_iteration,
        verbose=False,
        show_progress=False,
    )
    train(algorithm, params, clock, environments)


RECIPES = {
    "ppo_cartpole": functools.partial(ppo, "CartPole-v1", 100_000),
    "dqn_cartpole": functools.partial(dqn, "CartPole-v1", 30_000),
}

if __name__ == "__main__":
    script.main(RECIPES)
