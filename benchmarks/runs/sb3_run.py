"""stable-baselines3's side: `learn` with its logger and monitors. SBX's side calls the same functions."""

import functools
from typing import Any

import stable_baselines3
import torch
from stable_baselines3 import DQN, PPO, SAC, TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack

from benchmarks.runs import script

VERSIONS = f"stable-baselines3 {stable_baselines3.__version__}, torch {torch.__version__}"


class Clock(BaseCallback):
    """Stores counters at the end of the eighth update's iteration.

    Args:
      updates_a_count: gradient steps for each update that the model counts.
    """

    def __init__(self, updates_a_count: int):
        super().__init__()
        self.first: script.Reading | None = None
        self._updates_a_count = updates_a_count

    def read(self) -> script.Reading:
        return script.read(self.model.num_timesteps, self.model._n_updates * self._updates_a_count)

    def _on_rollout_start(self) -> None:
        if self.model._n_updates >= 8 and self.first is None:
            self.first = self.read()

    def _on_step(self) -> bool:
        return True


def learn(model: Any, num_env_steps: int, versions: str, updates_a_count: int = 1) -> None:
    clock = Clock(updates_a_count)
    model.learn(num_env_steps, callback=clock)
    last = clock.read()
    average_return = sum(episode["r"] for episode in model.ep_info_buffer) / len(model.ep_info_buffer)
    script.report(clock.first, last, average_return, versions)


def ppo(algorithm: Any, env_id: str, num_env_steps: int, seed: int, versions: str = VERSIONS) -> None:
    env = make_vec_env(env_id, 8, seed=seed)
    model = algorithm(
        "MlpPolicy", env, n_steps=256, batch_size=256, n_epochs=10, learning_rate=3e-4, seed=seed, device="cpu"
    )
    learn(model, num_env_steps, versions, updates_a_count=8 * 256 // 256)  # it counts epochs


def dqn(algorithm: Any, env_id: str, num_env_steps: int, seed: int, versions: str = VERSIONS) -> None:
    env = make_vec_env(env_id, 1, seed=seed)
    model = algorithm(
        "MlpPolicy",
        env,
        learning_rate=1e-3,
        buffer_size=50_000,
        learning_starts=1000,
        batch_size=64,
        train_freq=4,
        gradient_steps=1,
        target_update_interval=500,  # environment steps
        exploration_fraction=0.2,
        exploration_final_eps=0.05,
        policy_kwargs={"net_arch": [64, 64]},
        seed=seed,
        device="cpu",
    )
    learn(model, num_env_steps, versions)


def actor_critic(algorithm: Any, env_id: str, num_env_steps: int, seed: int, versions: str = VERSIONS) -> None:
    env = make_vec_env(env_id, 1, seed=seed)
    model = algorithm(
        "MlpPolicy",
        env,
        learning_rate=3e-4,
        buffer_size=100_000,
        learning_starts=1000,
        batch_size=256,
        train_freq=1,
        gradient_steps=1,
        policy_kwargs={"net_arch": [256, 256]},
        seed=seed,
        device="cpu",
    )
    learn(model, num_env_steps, versions)


def pong(num_envs: int, seed: int) -> VecEnv:
    return VecFrameStack(make_atari_env("ale_py:ALE/Pong-v5", num_envs, seed, env_kwargs=script.ATARI), n_stack=4)


def ppo_pong(num_env_steps: int, seed: int) -> None:
    model = PPO(
        "CnnPolicy",
        pong(8, seed),
        n_steps=128,
        batch_size=256,
        n_epochs=4,
        learning_rate=2.5e-4,
        clip_range=0.1,
        ent_coef=0.01,
        vf_coef=0.5,
        seed=seed,
        device="cpu",
    )
    learn(model, num_env_steps, VERSIONS, updates_a_count=8 * 128 // 256)  # it counts epochs


def dqn_pong(num_env_steps: int, seed: int) -> None:
    model = DQN(
        "CnnPolicy",
        pong(1, seed),
        learning_rate=1e-4,
        buffer_size=10_000,
        learning_starts=1000,
        batch_size=32,
        train_freq=4,
        gradient_steps=1,
        target_update_interval=1000,  # environment steps
        exploration_fraction=0.2,
        exploration_final_eps=0.05,
        seed=seed,
        device="cpu",
    )
    learn(model, num_env_steps, VERSIONS)


RECIPES = {
    "ppo_cartpole": functools.partial(ppo, PPO, "CartPole-v1", 100_000),
    "ppo_halfcheetah": functools.partial(ppo, PPO, "HalfCheetah-v5", 100_000),
    "dqn_cartpole": functools.partial(dqn, DQN, "CartPole-v1", 30_000),
    "ppo_pong": functools.partial(ppo_pong, 8_192),
    "dqn_pong": functools.partial(dqn_pong, 4_000),
    "sac_halfcheetah": functools.partial(actor_critic, SAC, "HalfCheetah-v5", 3_000),
    "td3_halfcheetah": functools.partial(actor_critic, TD3, "HalfCheetah-v5", 3_000),
}

if __name__ == "__main__":
    script.main(RECIPES)
