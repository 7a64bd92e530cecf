"""stable-baselines3's side of the benchmarks: `learn` with its logger and monitors. SBX's side uses the same functions.

  python -m benchmarks.runs.sb3_run TASK SEED --benchmark=shipped      the recipe of alfish's shipped conf
  python -m benchmarks.runs.sb3_run TASK SEED --benchmark=threshold    the hyperparameters of RL Baselines3 Zoo 2.9.2
  python -m benchmarks.runs.sb3_run TASK SEED ALGORITHM --benchmark=defaults

The zoo's HalfCheetah is version 4; here it is 5, as for alfish. Budgets of its recipes are the zoo's.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import stable_baselines3
import torch
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecNormalize

from benchmarks.runs import script, shipped, threshold

NUM_EPISODES, NUM_EVALUATION_ENVS = 20, 8  # of an evaluation of alfish


class Recipe(NamedTuple):
    """Settings of a run.

    Attributes:
      algorithm: name of the class, in stable-baselines3 and in SBX.
      make: makes the environments; called with `seed=`.
      settings: arguments of the class.
      num_env_steps: number of environment steps; 0 means that of the task.
      policy: the class's first argument.
    """

    algorithm: str
    make: Callable[..., VecEnv]
    settings: dict[str, Any]
    num_env_steps: int = 0
    policy: str = "MlpPolicy"

    def model(self, library: ModuleType, seed: int) -> Any:
        algorithm = getattr(library, self.algorithm)
        return algorithm(self.policy, self.make(seed=seed), seed=seed, device="cpu", **self.settings)


def environments(env_id: str, num_envs: int) -> Callable[..., VecEnv]:
    return functools.partial(make_vec_env, env_id, num_envs)


def normalized(env_id: str, num_envs: int, **options: Any) -> Callable[..., VecEnv]:
    return lambda seed: VecNormalize(make_vec_env(env_id, num_envs, seed=seed), **options)


def pong(num_envs: int) -> Callable[..., VecEnv]:
    return lambda seed: VecFrameStack(
        make_atari_env("ale_py:ALE/Pong-v5", num_envs, seed, env_kwargs=script.ATARI), n_stack=4
    )


# Of `benchmarks.throughput`: settings that all libraries have.

PPO = {"n_steps": 256, "batch_size": 256, "n_epochs": 10, "learning_rate": 3e-4}
ACTOR_CRITIC = {
    "learning_rate": 3e-4,
    "buffer_size": 100_000,
    "learning_starts": 1000,
    "batch_size": 256,
    "train_freq": 1,
    "gradient_steps": 1,
    "policy_kwargs": {"net_arch": [256, 256]},
}
THROUGHPUT = {
    "ppo_cartpole": Recipe("PPO", environments("CartPole-v1", 8), PPO, 100_000),
    "ppo_halfcheetah": Recipe("PPO", environments("HalfCheetah-v5", 8), PPO, 100_000),
    "dqn_cartpole": Recipe(
        "DQN",
        environments("CartPole-v1", 1),
        {
            "learning_rate": 1e-3,
            "buffer_size": 50_000,
            "learning_starts": 1000,
            "batch_size": 64,
            "train_freq": 4,
            "gradient_steps": 1,
            "target_update_interval": 500,  # environment steps
            "exploration_fraction": 0.2,
            "exploration_final_eps": 0.05,
            "policy_kwargs": {"net_arch": [64, 64]},
        },
        30_000,
    ),
    "ppo_pong": Recipe(
        "PPO",
        pong(8),
        {
            "n_steps": 128,
            "batch_size": 256,
            "n_epochs": 4,
            "learning_rate": 2.5e-4,
            "clip_range": 0.1,
            "ent_coef": 0.01,
            "vf_coef": 0.5,
        },
        8_192,
        "CnnPolicy",
    ),
    "dqn_pong": Recipe(
        "DQN",
        pong(1),
        {
            "learning_rate": 1e-4,
            "buffer_size": 10_000,
            "learning_starts": 1000,
            "batch_size": 32,
            "train_freq": 4,
            "gradient_steps": 1,
            "target_update_interval": 1000,  # environment steps
            "exploration_fraction": 0.2,
            "exploration_final_eps": 0.05,
        },
        4_000,
        "CnnPolicy",
    ),
    "sac_halfcheetah": Recipe("SAC", environments("HalfCheetah-v5", 1), ACTOR_CRITIC, 3_000),
    "td3_halfcheetah": Recipe("TD3", environments("HalfCheetah-v5", 1), ACTOR_CRITIC, 3_000),
}

# Of `benchmarks.shipped`. A learning rate for critics alone, which stable-baselines3 lacks, is left out.

SHIPPED_ACTOR_CRITIC = {
    "learning_rate": 3e-4,
    "buffer_size": 100_000,
    "learning_starts": 5000,
    "policy_kwargs": {"net_arch": [256, 256]},
}
SHIPPED = {
    "ppo_cartpole": Recipe(
        "PPO",
        environments("CartPole-v1", 8),
        {
            "n_steps": 32,
            "batch_size": 256,
            "n_epochs": 20,
            "gamma": 0.98,
            "gae_lambda": 0.95,
            "vf_coef": 0.25,  # of the whole squared error
            "learning_rate": LinearSchedule(2e-3, 0.0, 1.0),
            "clip_range": LinearSchedule(0.2, 0.0, 1.0),
        },
    ),
    "dqn_cartpole": Recipe(
        "DQN",
        normalized("CartPole-v1", 4, norm_reward=False),
        {
            "learning_rate": LinearSchedule(1e-3, 0.0, 1.0),
            "batch_size": 32,
            "buffer_size": 100_000,
            "learning_starts": 1000,
            "n_steps": 3,
            "train_freq": 2,  # vector steps, in each of which targets move: twice in four updates
            "gradient_steps": 4,
            "tau": 0.02,
            "target_update_interval": 1,
            "exploration_fraction": 0.16,
            "exploration_final_eps": 0.04,
            "policy_kwargs": {"net_arch": [256, 256]},
        },
    ),
    "sac_halfcheetah": Recipe("SAC", environments("HalfCheetah-v5", 1), SHIPPED_ACTOR_CRITIC),
    "td3_halfcheetah": Recipe(
        "TD3",
        environments("HalfCheetah-v5", 1),
        SHIPPED_ACTOR_CRITIC | {"action_noise": NormalActionNoise(np.zeros(6), np.full(6, 0.1))},
    ),
    "ppo_halfcheetah": Recipe(
        "PPO",
        normalized("HalfCheetah-v5", 4, gamma=0.98),
        {
            "n_steps": 128,
            "batch_size": 64,
            "n_epochs": 20,
            "gamma": 0.98,
            "gae_lambda": 0.92,
            "clip_range": 0.1,
            "vf_coef": 0.29,  # of the whole squared error
            "ent_coef": 0.0004,
            "learning_rate": 2e-5,
            "max_grad_norm": 0.8,
            "policy_kwargs": {"log_std_init": -2.0, "net_arch": [256, 256], "activation_fn": torch.nn.ReLU},
        },
    ),
}

# Of `benchmarks.time_to_threshold`, as the zoo's `train.py` sets them up.

ZOO = {
    "ppo_cartpole": Recipe(  # ppo.yml, CartPole-v1
        "PPO",
        environments("CartPole-v1", 8),
        {
            "n_steps": 32,
            "batch_size": 256,
            "gae_lambda": 0.8,
            "gamma": 0.98,
            "n_epochs": 20,
            "ent_coef": 0.0,
            "learning_rate": LinearSchedule(0.001, 0.0, 1.0),
            "clip_range": LinearSchedule(0.2, 0.0, 1.0),
        },
        100_000,
    ),
    "dqn_cartpole": Recipe(  # dqn.yml, CartPole-v1
        "DQN",
        environments("CartPole-v1", 1),
        {
            "learning_rate": 2.3e-3,
            "batch_size": 64,
            "buffer_size": 100_000,
            "learning_starts": 1000,
            "gamma": 0.99,
            "target_update_interval": 10,
            "train_freq": 256,
            "gradient_steps": 128,
            "exploration_fraction": 0.16,
            "exploration_final_eps": 0.04,
            "policy_kwargs": {"net_arch": [256, 256]},
        },
        50_000,
    ),
    "sac_pendulum": Recipe("SAC", environments("Pendulum-v1", 1), {"learning_rate": 1e-3}, 20_000),  # sac.yml
    "ppo_halfcheetah": Recipe(  # ppo.yml, HalfCheetah-v4; `normalize: true` is of observations and rewards
        "PPO",
        normalized("HalfCheetah-v5", 1, gamma=0.98),
        {
            "n_steps": 512,
            "batch_size": 64,
            "gamma": 0.98,
            "learning_rate": 2.0633e-05,
            "ent_coef": 0.000401762,
            "clip_range": 0.1,
            "n_epochs": 20,
            "gae_lambda": 0.92,
            "max_grad_norm": 0.8,
            "vf_coef": 0.58096,
            "policy_kwargs": {
                "log_std_init": -2,
                "ortho_init": False,
                "activation_fn": torch.nn.ReLU,
                "net_arch": {"pi": [256, 256], "vf": [256, 256]},
            },
        },
        1_000_000,
    ),
    "sac_halfcheetah": Recipe(  # sac.yml, HalfCheetah-v4
        "SAC", environments("HalfCheetah-v5", 1), {"learning_starts": 10_000}, 1_000_000
    ),
}


def num_updates(model: Any) -> int:
    """Returns the number of gradient steps; PPO counts epochs."""
    minibatches = model.n_steps * model.n_envs // model.batch_size if hasattr(model, "n_epochs") else 1
    return model._n_updates * minibatches


class Clock(BaseCallback):
    """Stores counters at the end of the eighth update's iteration; PPO, which counts epochs, has more updates then."""

    first: script.Reading | None = None

    def read(self) -> script.Reading:
        return script.read(self.model.num_timesteps, num_updates(self.model))

    def _on_rollout_start(self) -> None:
        if self.model._n_updates >= 8 and self.first is None:
            self.first = self.read()

    def _on_step(self) -> bool:
        return True


def train(library: ModuleType, recipe: Recipe, versions: str, seed: int) -> None:
    """Runs a recipe of `benchmarks.throughput`."""
    clock, model = Clock(), recipe.model(library, seed)
    model.learn(recipe.num_env_steps, callback=clock)
    last = clock.read()
    average_return = sum(episode["r"] for episode in model.ep_info_buffer) / len(model.ep_info_buffer)
    script.report(clock.first, last, average_return, versions)


class Evaluations(EvalCallback):
    """Prints each evaluation as alfish does."""

    def _on_step(self) -> bool:
        goes_on = super()._on_step()
        if self.n_calls % self.eval_freq == 0:
            print(shipped.evaluation_line(self.num_timesteps, self.last_mean_reward), flush=True)
        return goes_on

    def evaluate_at_end(self) -> None:
        self.eval_freq = self.n_calls
        self._on_step()


def train_shipped(library: ModuleType, recipes: dict[str, Recipe], arguments: argparse.Namespace) -> None:
    """Runs a recipe of `benchmarks.shipped`."""
    task = shipped.TASKS[arguments.recipe]
    model = recipes[task.name].model(library, arguments.seed)
    env = make_vec_env(task.env_id, NUM_EVALUATION_ENVS, seed=10_000)
    if model.get_vec_normalize_env() is not None:  # whose statistics the callback copies
        env = VecNormalize(env, training=False, norm_reward=False)
    evaluations = Evaluations(env, n_eval_episodes=NUM_EPISODES, eval_freq=task.period // model.n_envs, verbose=0)
    model.learn(task.env_steps, callback=evaluations)
    if task.env_steps % task.period:
        evaluations.evaluate_at_end()


class Threshold(BaseCallback):
    """Ends training when the race is over; checks before every rollout and at the end."""

    def __init__(self, race: threshold.Race):
        super().__init__()
        self._race = race

    def _on_training_start(self) -> None:
        with self._race.stopped_clock():
            task = self._race.task
            self._environments = [gymnasium.make(task.env_id) for _ in range(task.num_episodes)]

    def _on_rollout_start(self) -> None:
        self._ask(spent=False)

    def _on_step(self) -> bool:
        return self._race.result is None

    def _on_training_end(self) -> None:
        self._ask(spent=True)

    def _ask(self, spent: bool) -> None:
        self._race.is_over(self.num_timesteps, num_updates(self.model), spent, self._mean)

    def _mean(self) -> float:
        """Returns the mean return of one episode in each environment, with the statistics of training."""
        normalizer = self.model.get_vec_normalize_env()
        observations = [env.reset(seed=threshold.EVALUATION_SEED + k)[0] for k, env in enumerate(self._environments)]
        returns = np.zeros(len(observations))
        playing = list(range(len(observations)))
        while playing:
            rows = np.stack([observations[k] for k in playing])
            if normalizer is not None:
                rows = normalizer.normalize_obs(rows)
            actions, _ = self.model.predict(rows, deterministic=True)
            for k, action in zip(tuple(playing), actions):
                observations[k], reward, terminated, truncated, _ = self._environments[k].step(action)
                returns[k] += reward
                if terminated or truncated:
                    playing.remove(k)
        return float(returns.mean())


def train_to_threshold(arguments: argparse.Namespace) -> None:
    """Runs a recipe of the zoo until an evaluation reaches the task's threshold."""
    torch.set_num_threads(1)
    race = threshold.Race(threshold.TASKS[arguments.recipe], arguments.started, arguments.max_env_steps)
    recipe = ZOO[arguments.recipe]
    recipe.model(stable_baselines3, arguments.seed).learn(recipe.num_env_steps, callback=Threshold(race))
    race.print_result(script.versions("stable-baselines3", "torch"))


def train_by_default(arguments: argparse.Namespace) -> None:
    """Calls the library as its first example shows, with its own defaults, and no setting but the seed.

    The policy's name is the one that its documentation gives for the observation space. Its CNN takes images from
    36 x 36 pixels on, so smaller ones go to "MlpPolicy", which flattens and scales them.
    """
    from benchmarks.runs import unknown_tasks

    (name,), task = arguments.variant, unknown_tasks.TASKS[arguments.recipe]
    env = unknown_tasks.made(task)
    policy = "MultiInputPolicy" if isinstance(env.observation_space, gymnasium.spaces.Dict) else "MlpPolicy"
    began = time.monotonic()
    model = getattr(stable_baselines3, name)(policy, env, seed=arguments.seed).learn(unknown_tasks.BUDGETS[name])
    seconds = time.monotonic() - began

    def act(observation: Any, is_first: bool) -> Any:
        action, _ = model.predict(observation, deterministic=True)
        return int(action) if isinstance(env.action_space, gymnasium.spaces.Discrete) else action

    print(json.dumps({"seconds": seconds, "returns": unknown_tasks.returns(task, act)}))


def main(
    library: ModuleType, versions: str, recipes: dict[str, Recipe], shipped_recipes: dict[str, Recipe], **others: Any
) -> None:
    script.main(
        {name: functools.partial(train, library, recipe, versions) for name, recipe in recipes.items()},
        shipped=functools.partial(train_shipped, library, shipped_recipes),
        **others,
    )


if __name__ == "__main__":
    main(
        stable_baselines3,
        script.versions("stable-baselines3", "torch"),
        THROUGHPUT,
        SHIPPED,
        threshold=train_to_threshold,
        defaults=train_by_default,
    )
