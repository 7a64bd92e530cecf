"""Sample Factory's side: asynchronous PPO, its workers, inference and learner one process each.

The environments are in two workers, so that it acts while it trains. Its returns lag behind: rows are older than the
weights that train on them. The recipe `waiting` is a side of `benchmarks.collecting`.
"""

import functools
import tempfile
import time
from collections.abc import Callable
from typing import Any

import gymnasium
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

from benchmarks.runs import script

NUM_EPOCHS, BATCH_SIZE, ROWS = 10, 256, 2048
UPDATES = NUM_EPOCHS * ROWS // BATCH_SIZE  # of an iteration


class Clock(AlgoObserver):
    """Reads at the end of each iteration; the first one has more than eight updates."""

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        self.last = script.read(training_iteration_since_resume * ROWS, training_iteration_since_resume * UPDATES)
        self.first = getattr(self, "first", self.last)


def make(env_id: str, *_: Any, render_mode: str | None = None) -> gymnasium.Env:
    return gymnasium.make(env_id, render_mode=render_mode)


class Waiting(gymnasium.Wrapper):
    """CartPole whose steps wait for 2 ms."""

    def __init__(self, *_: Any, render_mode: str | None = None):
        super().__init__(gymnasium.make("CartPole-v1", render_mode=render_mode))

    def step(self, action: Any) -> Any:
        time.sleep(0.002)
        return self.env.step(action)


def ppo(
    env_id: str,
    num_env_steps: int,
    seed: int,
    num_envs: int = 8,
    rollout: int = 256,
    num_workers: int = 2,
    num_splits: int = 2,
    factory: Callable[..., gymnasium.Env] = make,
) -> None:
    assert num_envs * rollout == ROWS
    register_env(env_id, factory)
    settings = {
        "algo": "APPO",
        "env": env_id,
        "seed": seed,
        "device": "cpu",
        "train_for_env_steps": num_env_steps,
        "num_workers": num_workers,
        "num_envs_per_worker": num_envs // num_workers,
        "worker_num_splits": num_splits,
        "set_workers_cpu_affinity": False,  # on two cores, pinned workers take the learner's
        "rollout": rollout,
        "batch_size": BATCH_SIZE,
        "num_batches_per_epoch": ROWS // BATCH_SIZE,
        "num_epochs": NUM_EPOCHS,
        "shuffle_minibatches": True,
        "learning_rate": 3e-4,
        "adam_eps": 1e-5,
        "max_grad_norm": 0.5,
        "ppo_clip_ratio": 0.2,
        "exploration_loss_coeff": 0.0,
        "use_rnn": False,
        "recurrence": 1,
        "encoder_mlp_layers": "64 64",
        "nonlinearity": "tanh",
        "actor_critic_share_weights": False,
        "normalize_input": False,
        "normalize_returns": False,
        "decorrelate_experience_max_seconds": 0,
    }
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        settings["train_dir"] = directory
        arguments = [word for name, value in settings.items() for word in (f"--{name}", *str(value).split())]
        parser, _ = parse_sf_args(arguments)
        _, runner = make_runner(parse_full_cfg(parser, arguments))
        runner.register_observer(clock)
        runner.init()
        runner.run()
    returns = runner.policy_avg_stats["reward"][0]
    script.report(clock.first, clock.last, sum(returns) / len(returns), script.versions("sample-factory", "torch"))


def waiting(seed: int, num_splits: str) -> None:
    ppo("waiting", 40_000, seed, num_envs=16, rollout=128, num_workers=8, num_splits=int(num_splits), factory=Waiting)


RECIPES: dict[str, Callable[..., None]] = {
    "waiting": waiting,
    "ppo_cartpole": functools.partial(ppo, "CartPole-v1", 100_000),
    "appo_cartpole": functools.partial(ppo, "CartPole-v1", 100_000, num_envs=32, rollout=64),
}

if __name__ == "__main__":
    script.main(RECIPES)
