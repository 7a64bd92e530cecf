"""stable-baselines3's side of `benchmarks.shipped`: the recipes of alfish's shipped confs, with their evaluations.

  python -m benchmarks.runs.sb3_shipped TASK SEED ENV_STEPS

Settings that stable-baselines3 lacks are left out: a learning rate of its own for critics. SBX's side calls the same
functions.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from stable_baselines3 import DQN, PPO, SAC, TD3
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecNormalize

from benchmarks.runs.shipped import TASKS, evaluation_line

NUM_EPISODES, NUM_EVALUATION_ENVS = 20, 8  # of an evaluation of alfish


class Evaluations(EvalCallback):
    """Prints each evaluation as alfish does."""

    def _on_step(self) -> bool:
        goes_on = super()._on_step()
        if self.n_calls % self.eval_freq == 0:
            print(evaluation_line(self.num_timesteps, self.last_mean_reward), flush=True)
        return goes_on

    def evaluate_at_end(self) -> None:
        self.eval_freq = self.n_calls
        self._on_step()


def ppo_cartpole(seed: int, algorithm: Any = PPO) -> Any:
    return algorithm(
        "MlpPolicy",
        make_vec_env("CartPole-v1", 8, seed=seed),
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.95,
        vf_coef=0.25,  # of the whole squared error
        learning_rate=LinearSchedule(2e-3, 0.0, 1.0),
        clip_range=LinearSchedule(0.2, 0.0, 1.0),
        seed=seed,
        device="cpu",
    )


def dqn_cartpole(seed: int, algorithm: Any = DQN) -> Any:
    return algorithm(
        "MlpPolicy",
        VecNormalize(make_vec_env("CartPole-v1", 4, seed=seed), norm_reward=False),
        learning_rate=LinearSchedule(1e-3, 0.0, 1.0),
        batch_size=32,
        buffer_size=100_000,
        learning_starts=1000,
        n_steps=3,
        train_freq=2,  # vector steps, in each of which targets move: twice in four updates
        gradient_steps=4,
        tau=0.02,
        target_update_interval=1,
        exploration_fraction=0.16,
        exploration_final_eps=0.04,
        policy_kwargs={"net_arch": [256, 256]},
        seed=seed,
        device="cpu",
    )


def sac_halfcheetah(seed: int, algorithm: Any = SAC, **options: Any) -> Any:
    return algorithm(
        "MlpPolicy",
        make_vec_env("HalfCheetah-v5", 1, seed=seed),
        learning_rate=3e-4,
        buffer_size=100_000,
        learning_starts=5000,
        policy_kwargs={"net_arch": [256, 256]},
        seed=seed,
        device="cpu",
        **options,
    )


def td3_halfcheetah(seed: int, algorithm: Any = TD3, **options: Any) -> Any:
    env = make_vec_env("HalfCheetah-v5", 1, seed=seed)
    assert env.action_space.shape is not None
    noise = NormalActionNoise(np.zeros(env.action_space.shape), np.full(env.action_space.shape, 0.1))
    return algorithm(
        "MlpPolicy",
        env,
        learning_rate=3e-4,
        buffer_size=100_000,
        learning_starts=5000,
        action_noise=noise,
        policy_kwargs={"net_arch": [256, 256]},
        seed=seed,
        device="cpu",
        **options,
    )


def ppo_halfcheetah(seed: int, algorithm: Any = PPO, activation: Any = torch.nn.ReLU) -> Any:
    return algorithm(
        "MlpPolicy",
        VecNormalize(make_vec_env("HalfCheetah-v5", 4, seed=seed), gamma=0.98),
        n_steps=128,
        batch_size=64,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.92,
        clip_range=0.1,
        vf_coef=0.29,  # of the whole squared error
        ent_coef=0.0004,
        learning_rate=2e-5,
        max_grad_norm=0.8,
        policy_kwargs={"log_std_init": -2.0, "net_arch": [256, 256], "activation_fn": activation},
        seed=seed,
        device="cpu",
    )


RECIPES = {
    each.__name__: each for each in (ppo_cartpole, dqn_cartpole, sac_halfcheetah, td3_halfcheetah, ppo_halfcheetah)
}


def main(recipes: Mapping[str, Callable[[int], Any]]) -> None:
    task, seed, num_env_steps = TASKS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
    model = recipes[task.name](seed)
    env = make_vec_env(task.env_id, NUM_EVALUATION_ENVS, seed=10_000)
    if model.get_vec_normalize_env() is not None:  # whose statistics the callback copies
        env = VecNormalize(env, training=False, norm_reward=False)
    evaluations = Evaluations(env, n_eval_episodes=NUM_EPISODES, eval_freq=task.period // model.n_envs, verbose=0)
    model.learn(num_env_steps, callback=evaluations)
    if num_env_steps % task.period:
        evaluations.evaluate_at_end()


if __name__ == "__main__":
    main(RECIPES)
