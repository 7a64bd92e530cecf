"""stable-baselines3's side: `learn` with its logger and monitors, on one torch thread."""

import functools
import json
import sys
import time
from typing import Any

import stable_baselines3
import torch
from stable_baselines3 import DQN, PPO, SAC, TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env


class Clock(BaseCallback):
    """Remembers where the iteration of the eighth update ended."""

    def __init__(self) -> None:
        super().__init__()
        self.first = None

    def _on_rollout_start(self) -> None:
        if self.model._n_updates >= 8 and self.first is None:
            self.first = time.perf_counter(), self.num_timesteps, self.model._n_updates

    def _on_step(self) -> bool:
        return True


def learn(model: Any, num_env_steps: int, updates_a_count: int = 1) -> None:
    clock = Clock()
    model.learn(num_env_steps, callback=clock)
    end = time.perf_counter()
    start, steps, count = clock.first
    result = {
        "env_steps": model.num_timesteps - steps,
        "seconds": end - start,
        "updates": (model._n_updates - count) * updates_a_count,
        "return": sum(episode["r"] for episode in model.ep_info_buffer) / len(model.ep_info_buffer),
        "versions": f"stable-baselines3 {stable_baselines3.__version__}, torch {torch.__version__}",
    }
    print(json.dumps(result))


def ppo(env_id: str, num_env_steps: int, seed: int) -> None:
    env = make_vec_env(env_id, 8, seed=seed)
    model = PPO("MlpPolicy", env, n_steps=256, batch_size=256, n_epochs=10, learning_rate=3e-4, seed=seed, device="cpu")
    learn(model, num_env_steps, updates_a_count=8 * 256 // 256)  # it counts epochs


def dqn(env_id: str, num_env_steps: int, seed: int) -> None:
    env = make_vec_env(env_id, 1, seed=seed)
    model = DQN(
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
        seed=seed,
        device="cpu",
    )
    learn(model, num_env_steps)


def actor_critic(algorithm: Any, env_id: str, num_env_steps: int, seed: int) -> None:
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
    learn(model, num_env_steps)


RECIPES = {
    "ppo_cartpole": functools.partial(ppo, "CartPole-v1", 100_000),
    "ppo_halfcheetah": functools.partial(ppo, "HalfCheetah-v5", 50_000),
    "dqn_cartpole": functools.partial(dqn, "CartPole-v1", 30_000),
    "sac_halfcheetah": functools.partial(actor_critic, SAC, "HalfCheetah-v5", 3_000),
    "td3_halfcheetah": functools.partial(actor_critic, TD3, "HalfCheetah-v5", 3_000),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    RECIPES[sys.argv[1]](seed=int(sys.argv[2]))
