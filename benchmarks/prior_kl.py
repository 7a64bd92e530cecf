"""What a KL divergence from an earlier policy keeps of a first task, while a second task is learned.

  python -m benchmarks.prior_kl                   # some 10 minutes a seed

Both tasks are HalfCheetah-v5 at a target velocity: the reward of a step is 1 - |v - v*| / 2, but at least 0, with v the
velocity (m/s) and v* the target. PPO first learns the target --first. Each variant then begins with its networks and
learns the target --second: plain PPO, and PriorKLPPO with several weights. The measure is the mean return of the last
policies in both tasks, with the mode of the policy, over --episodes episodes of 1000 steps.

Writes `docs/results/prior_kl.csv` and prints a table of it.
"""

import argparse
import functools
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import alfish
from alfish.algorithms.ppo import PPO
from alfish.algorithms.prior_kl import PriorKLPPO
from alfish.configuration.experts import saved_policy
from alfish.transforms import RewardNormalizer
from benchmarks import PROJECT, tables

PATH = PROJECT / "docs" / "results" / "prior_kl.csv"
WIDTH = 2.0  # difference of velocities (m/s) at which the reward of a step is 0
# Settings of PPO, of both tasks. A prior policy sees raw observations, so none are normalized.
PPO_SETTINGS: dict[str, Any] = {"gamma": 0.98, "lambda_": 0.92, "clip_range": 0.2}
RUN: dict[str, Any] = {
    "unroll_length": 256,
    "transforms": [RewardNormalizer],
    "calibration": None,
    "listeners": None,
    "make_environment.num_envs": 8,
    "EpochBatches.num_epochs": 10,
    "EpochBatches.minibatch_size": 128,
    "RewardNormalizer.gamma": 0.98,
    "PolicyHead.initial_log_std": -1.0,
    "Learner.learning_rate": 3e-4,
    "Learner.max_grad_norm": 0.5,
    "MLP.layers": (64, 64),
    "MLP.activation": "tanh",
}


class TargetVelocity(gymnasium.Wrapper):
    """Rewards velocities near a target."""

    def __init__(self, env: gymnasium.Env, target: float):
        super().__init__(env)
        self._target = target

    def step(self, action: Any) -> Any:
        observation, _, terminated, truncated, info = self.env.step(action)
        reward = max(0.0, 1 - abs(info["x_velocity"] - self._target) / WIDTH)
        return observation, reward, terminated, truncated, info


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--root", default="runs/prior_kl")
    parser.add_argument("--first", type=float, default=1.5)
    parser.add_argument("--second", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=300_000, help="of the first task")
    parser.add_argument("--more_steps", type=int, default=100_000, help="of the second task")
    parser.add_argument("--coefs", default="0.1,0.3")
    parser.add_argument("--episodes", type=int, default=10)
    arguments = parser.parse_args()
    for seed in map(int, arguments.seeds.split(",")):
        for row in measure(seed, arguments):
            print(row, flush=True)
            tables.replace_rows(PATH, [row], row, ["variant", "seed"], lambda row: int(row["seed"]))
    print(table(tables.read_rows(PATH)))


def measure(seed: int, arguments: argparse.Namespace) -> Any:
    """Yields a row for the policy of the first task, and for each variant."""
    root = PROJECT / arguments.root / f"seed{seed}"
    source = root / "first"
    train(source, PPO, arguments.first, arguments.steps, seed)
    yield row("first task", seed, source, arguments)
    further = {"initial_parts": {"network": str(source)}}
    train(root / "plain", PPO, arguments.second, arguments.more_steps, seed + 1000, **further)
    yield row("PPO", seed, root / "plain", arguments)
    prior = functools.partial(saved_policy, root_dir=str(source))
    for coef in map(float, arguments.coefs.split(",")):
        algorithm = functools.partial(PriorKLPPO, prior=prior, prior_kl_coef=coef)
        directory = root / f"coef{coef:g}"
        train(directory, algorithm, arguments.second, arguments.more_steps, seed + 1000, **further)
        yield row(f"PriorKLPPO, {coef:g}", seed, directory, arguments)


def train(root_dir: Path, algorithm: Any, target: float, num_env_steps: int, seed: int, **settings: Any) -> None:
    """Trains, unless the run is finished."""
    alfish.train(
        functools.partial(algorithm, **PPO_SETTINGS),
        "HalfCheetah-v5",
        root_dir=root_dir,
        seed=seed,
        num_env_steps=num_env_steps,
        **{**RUN, "make_environment.wrappers": [functools.partial(TargetVelocity, target=target)]},
        **settings,
    )


def row(variant: str, seed: int, root_dir: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the mean returns of a run's last policy in both tasks."""
    policy = alfish.load(root_dir)
    returns: dict[str, list[float]] = {f"target {target:g}": [] for target in (arguments.first, arguments.second)}
    velocities = []
    env = gymnasium.make("HalfCheetah-v5")
    for episode in range(arguments.episodes):
        observation, _ = env.reset(seed=episode)
        policy.reset()
        found, is_over = [], False
        while not is_over:
            observation, _, terminated, truncated, info = env.step(policy.act(observation))
            found.append(info["x_velocity"])
            is_over = terminated or truncated
        velocities.append(np.mean(found))
        for target, name in zip((arguments.first, arguments.second), returns):
            returns[name].append(sum(max(0.0, 1 - abs(v - target) / WIDTH) for v in found))
    means = {name: round(float(np.mean(each)), 1) for name, each in returns.items()}
    return {"variant": variant, "seed": seed, **means, "velocity": round(float(np.mean(velocities)), 2)}


def table(rows: list[dict[str, Any]]) -> str:
    """Returns a Markdown table with a line for each variant and seed."""
    return "\n".join([tables.header(list(rows[0])), *(tables.line(list(row.values())) for row in rows)])


if __name__ == "__main__":
    main()
