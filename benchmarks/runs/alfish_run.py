"""alfish's side: the trainer as it ships, with metrics, summaries and checkpoints, without evaluation."""

import functools
import json
import sys
import tempfile

import torch

import alfish
from alfish.algorithms.ppo import PPO
from alfish.batches import EpochBatches
from alfish.environments import make_environment
from alfish.learner import Learner
from alfish.listeners import CheckpointSaver, Summaries
from alfish.optimizers import Adam
from alfish.trainer import Listener, Report, Trainer


class Clock(Listener):
    """Remembers where the first iteration ended, and where the last one did."""

    def after_iteration(self, trainer: Trainer, report: Report) -> None:
        import time

        here = time.perf_counter(), report.env_steps, report.updates
        self.first = getattr(self, "first", here)
        self.last = here
        if "metrics/average_return" in report.scalars:
            self.average_return = report.scalars["metrics/average_return"]


def ppo(env_id: str, num_env_steps: int, seed: int) -> None:
    clock = Clock()
    with tempfile.TemporaryDirectory() as root_dir:
        Trainer(
            root_dir,
            algorithm=PPO,
            environment=functools.partial(make_environment, env_id=env_id, num_envs=8),
            batches=functools.partial(EpochBatches, num_epochs=10, minibatch_size=256),
            learner=functools.partial(
                Learner, optimizer=functools.partial(Adam, eps=1e-5), learning_rate=3e-4, max_grad_norm=0.5
            ),
            listeners=[CheckpointSaver(), Summaries(), clock],
            unroll_length=256,
            num_env_steps=num_env_steps,
            seed=seed,
            device="cpu",
        ).train()
    (start, steps, updates), (end, last_steps, last_updates) = clock.first, clock.last
    result = {"env_steps": last_steps - steps, "seconds": end - start, "updates": last_updates - updates}
    result |= {"return": clock.average_return, "versions": f"alfish {alfish.__version__}, torch {torch.__version__}"}
    print(json.dumps(result))


RECIPES = {
    "ppo_cartpole": functools.partial(ppo, "CartPole-v1", 100_000),
    "ppo_halfcheetah": functools.partial(ppo, "HalfCheetah-v5", 50_000),
}

if __name__ == "__main__":
    RECIPES[sys.argv[1]](seed=int(sys.argv[2]))
