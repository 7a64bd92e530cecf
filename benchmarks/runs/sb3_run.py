"""stable-baselines3's side: `learn` with its logger and monitors, on one torch thread."""

import functools
import json
import sys
import time

import stable_baselines3
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env


class Clock(BaseCallback):
    """Remembers where the first iteration's updates ended."""

    def __init__(self) -> None:
        super().__init__()
        self.first = None

    def _on_rollout_start(self) -> None:
        if self.num_timesteps and self.first is None:
            self.first = time.perf_counter(), self.num_timesteps, self.model._n_updates

    def _on_step(self) -> bool:
        return True


def ppo(env_id: str, num_env_steps: int, seed: int) -> None:
    env = make_vec_env(env_id, 8, seed=seed)
    model = PPO("MlpPolicy", env, n_steps=256, batch_size=256, n_epochs=10, learning_rate=3e-4, seed=seed, device="cpu")
    clock = Clock()
    model.learn(num_env_steps, callback=clock)
    end = time.perf_counter()
    start, steps, epochs = clock.first
    result = {
        "env_steps": model.num_timesteps - steps,
        "seconds": end - start,
        "updates": (model._n_updates - epochs) * 8 * 256 // 256,
        "return": sum(episode["r"] for episode in model.ep_info_buffer) / len(model.ep_info_buffer),
        "versions": f"stable-baselines3 {stable_baselines3.__version__}, torch {torch.__version__}",
    }
    print(json.dumps(result))


RECIPES = {
    "ppo_cartpole": functools.partial(ppo, "CartPole-v1", 100_000),
    "ppo_halfcheetah": functools.partial(ppo, "HalfCheetah-v5", 50_000),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    RECIPES[sys.argv[1]](seed=int(sys.argv[2]))
