"""stable-baselines3's side: the tuned hyperparameters of RL Baselines3 Zoo 2.9.2, set up as its `train.py` does.

The zoo's HalfCheetah is version 4; here it is 5, as for alfish. Budgets are the zoo's.
"""

import gymnasium
import numpy as np
import stable_baselines3
import torch
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecNormalize

from benchmarks.runs import threshold
from benchmarks.runs.threshold import EVALUATION_SEED, TASKS, Race


class Threshold(BaseCallback):
    """Ends training when the race is over; checks before every rollout and at the end."""

    def __init__(self, race: Race):
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
        self._race.is_over(self.num_timesteps, _updates(self.model), spent, self._mean)

    def _mean(self) -> float:
        """Returns the mean return of one episode in each environment, with the statistics of training."""
        normalizer = self.model.get_vec_normalize_env()
        observations = [env.reset(seed=EVALUATION_SEED + k)[0] for k, env in enumerate(self._environments)]
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


def ppo_cartpole(env_id: str, seed: int) -> tuple[BaseAlgorithm, int]:
    """ppo.yml, CartPole-v1."""
    model = PPO(
        "MlpPolicy",
        make_vec_env(env_id, 8, seed=seed),
        n_steps=32,
        batch_size=256,
        gae_lambda=0.8,
        gamma=0.98,
        n_epochs=20,
        ent_coef=0.0,
        learning_rate=LinearSchedule(0.001, 0.0, 1.0),
        clip_range=LinearSchedule(0.2, 0.0, 1.0),
        seed=seed,
        device="cpu",
    )
    return model, 100_000


def dqn_cartpole(env_id: str, seed: int) -> tuple[BaseAlgorithm, int]:
    """dqn.yml, CartPole-v1."""
    model = DQN(
        "MlpPolicy",
        make_vec_env(env_id, 1, seed=seed),
        learning_rate=2.3e-3,
        batch_size=64,
        buffer_size=100_000,
        learning_starts=1000,
        gamma=0.99,
        target_update_interval=10,
        train_freq=256,
        gradient_steps=128,
        exploration_fraction=0.16,
        exploration_final_eps=0.04,
        policy_kwargs={"net_arch": [256, 256]},
        seed=seed,
        device="cpu",
    )
    return model, 50_000


def sac_pendulum(env_id: str, seed: int) -> tuple[BaseAlgorithm, int]:
    """sac.yml, Pendulum-v1."""
    model = SAC("MlpPolicy", make_vec_env(env_id, 1, seed=seed), learning_rate=1e-3, seed=seed, device="cpu")
    return model, 20_000


def ppo_halfcheetah(env_id: str, seed: int) -> tuple[BaseAlgorithm, int]:
    """ppo.yml, HalfCheetah-v4; `normalize: true` is of observations and rewards, with PPO's gamma."""
    model = PPO(
        "MlpPolicy",
        VecNormalize(make_vec_env(env_id, 1, seed=seed), gamma=0.98),
        n_steps=512,
        batch_size=64,
        gamma=0.98,
        learning_rate=2.0633e-05,
        ent_coef=0.000401762,
        clip_range=0.1,
        n_epochs=20,
        gae_lambda=0.92,
        max_grad_norm=0.8,
        vf_coef=0.58096,
        policy_kwargs={
            "log_std_init": -2,
            "ortho_init": False,
            "activation_fn": torch.nn.ReLU,
            "net_arch": {"pi": [256, 256], "vf": [256, 256]},
        },
        seed=seed,
        device="cpu",
    )
    return model, 1_000_000


def sac_halfcheetah(env_id: str, seed: int) -> tuple[BaseAlgorithm, int]:
    """sac.yml, HalfCheetah-v4."""
    model = SAC("MlpPolicy", make_vec_env(env_id, 1, seed=seed), learning_starts=10_000, seed=seed, device="cpu")
    return model, 1_000_000


RECIPES = {
    recipe.__name__: recipe for recipe in (ppo_cartpole, dqn_cartpole, sac_pendulum, ppo_halfcheetah, sac_halfcheetah)
}


def main() -> None:
    arguments = threshold.parse()
    torch.set_num_threads(1)
    task = TASKS[arguments.task]
    race = Race(task, arguments.started, arguments.max_env_steps)
    model, num_env_steps = RECIPES[task.name](task.env_id, arguments.seed)
    model.learn(num_env_steps, callback=Threshold(race))
    race.print_result(f"stable-baselines3 {stable_baselines3.__version__}, torch {torch.__version__}")


def _updates(model: BaseAlgorithm) -> int:
    """Returns the number of gradient steps; PPO counts epochs."""
    steps = model.n_steps * model.n_envs // model.batch_size if isinstance(model, PPO) else 1
    return model._n_updates * steps


if __name__ == "__main__":
    main()
