"""alfish's side of the benchmarks.

  python benchmarks/runs/alfish_run.py RECIPE SEED [VARIANT] [--profile]
  python -m benchmarks.runs.alfish_run TASK SEED --benchmark=threshold
  python -m benchmarks.runs.alfish_run TASK SEED ALGORITHM --benchmark=defaults

A recipe is run by the trainer as it ships, with metrics, summaries and checkpoints, without evaluation. With --profile
it also prints the time of each part of the loop, as `alfish train --profile` does.
"""

import argparse
import functools
import json
import signal
import sys
import tempfile
import time
from typing import Any

import torch

import alfish
from alfish.algorithms.appo import APPO
from alfish.algorithms.dqn import DQN
from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.algorithms.td3 import TD3
from alfish.compiler import matmul
from alfish.configuration import reading
from alfish.configuration.runs import configured_trainer
from alfish.environments import make_environment
from alfish.environments.atari import EpisodicLife, FireOnReset, preprocess_atari
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.learner.optimizers import Adam
from alfish.networks import MLP, ActorCritic, DeterministicActor, QNetwork, Torso
from alfish.parameters.schedules import Linear
from alfish.training.listener import Listener, Report, Run
from alfish.training.listeners import CheckpointSaver, Evaluate, Summaries
from alfish.training.profiler import Profile
from alfish.training.trainer import Trainer
from alfish.transforms import FrameStack, RewardClip
from alfish.unrollers import AsyncUnroller, HostUnroller, SyncUnroller
from benchmarks.delayed import Delayed
from benchmarks.runs import script, threshold

VERSIONS = f"alfish {alfish.__version__}, torch {torch.__version__}"
# What a variant changes of the learner.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"compile": False},
    "compiled": {"compile": True},
    "auto": {"compile": True},  # with `Trainer.num_threads = 'auto'`
    "mkl": {"compile": True},
    "bfloat16": {"compile": True, "precision": "bfloat16"},
    "auto_bfloat16": {"compile": True, "precision": "bfloat16"},
    "sync": {"compile": True},
    "async": {"compile": True},
    "host": {"compile": True},  # with `HostUnroller`
    "gpu": {"compile": True},  # variants whose names begin so train on a GPU
    "gpu_host": {"compile": True},
    "gpu_graphs": {"compile": True, "cuda_graphs": True},
}
UNROLLERS = {"async": AsyncUnroller, "host": HostUnroller, "gpu_host": HostUnroller, "gpu_graphs": HostUnroller}


class Clock(Listener):
    """Stores counters at the end of the eighth update's iteration, when everything is compiled, and at the end."""

    first: script.Reading | None = None

    def after_iteration(self, run: Run, report: Report) -> None:
        if report.updates >= 8 and self.first is None:
            self.first = script.read(report.env_steps, report.updates)
        if report.finished:
            self.last = script.read(report.env_steps, report.updates)
        if "metrics/average_return" in report.scalars:
            self.average_return = report.scalars["metrics/average_return"]


def train(
    env_id: str, num_envs: int, seed: int, variant: str, learner: Any, environment: Any = None, **options: Any
) -> None:
    if variant == "mkl":  # torch's own kernel in place of alfish's, as on a processor where nobody measured
        matmul.MEASURED = ()
    clock = Clock()
    profile = [Profile()] if script.PROFILE in sys.argv else []
    with tempfile.TemporaryDirectory() as root_dir:
        Trainer(
            root_dir,
            environment=functools.partial(make_environment, env_id=env_id, num_envs=num_envs, **environment or {}),
            unroller=UNROLLERS.get(variant, SyncUnroller),
            learner=functools.partial(learner, **VARIANTS[variant]),
            listeners=[CheckpointSaver(), Summaries(), clock, *profile],
            seed=seed,
            device="cuda" if variant.startswith("gpu") else "cpu",
            num_threads="auto" if variant.startswith("auto") else torch.get_num_threads(),
            **options,
        ).train()
    script.report(clock.first, clock.last, clock.average_return, VERSIONS)


def ppo(env_id: str, num_env_steps: int, seed: int, variant: str = "plain") -> None:
    train(
        env_id,
        8,
        seed,
        variant,
        algorithm=functools.partial(PPO, value_coef=1.0),  # times half the squared error
        batches=functools.partial(EpochBatches, num_epochs=10, minibatch_size=256),
        learner=functools.partial(
            Learner,
            optimizer=functools.partial(Adam, eps=1e-5),
            learning_rate=3e-4,
            max_grad_norm=0.5,
        ),
        unroll_length=256,
        num_env_steps=num_env_steps,
    )


def appo(num_env_steps: int, seed: int, variant: str = "sync") -> None:
    """Trains PPO's recipe on 32 CartPoles, with 2048 rows in each iteration."""
    train(
        "CartPole-v1",
        32,
        seed,
        variant,
        algorithm=functools.partial(APPO, value_coef=1.0),  # times half the squared error
        batches=functools.partial(EpochBatches, num_epochs=10, minibatch_size=256),
        learner=functools.partial(
            Learner, optimizer=functools.partial(Adam, eps=1e-5), learning_rate=3e-4, max_grad_norm=0.5
        ),
        unroll_length=64,
        num_env_steps=num_env_steps,
    )


def appo_slow(num_env_steps: int, seed: int, variant: str = "sync") -> None:
    """Trains with steps of 2 ms, and with a network whose training takes as long as the collection."""
    torso = functools.partial(Torso, mlp=functools.partial(MLP, layers=(1024, 1024)))
    network = functools.partial(ActorCritic, actor_torso=torso, critic_torso=torso)
    train(
        "CartPole-v1",
        4,
        seed,
        variant,
        environment={"wrappers": [functools.partial(Delayed, mean=0.002)]},
        algorithm=functools.partial(APPO, network=network, value_coef=1.0),
        batches=functools.partial(EpochBatches, num_epochs=12, minibatch_size=64),
        learner=functools.partial(Learner, learning_rate=3e-4, max_grad_norm=0.5),
        unroll_length=32,
        num_env_steps=num_env_steps,
    )


def dqn(env_id: str, num_env_steps: int, seed: int, variant: str = "plain") -> None:
    mlp = functools.partial(MLP, layers=(64, 64), activation="relu")
    q_network = functools.partial(QNetwork, torso=functools.partial(Torso, mlp=mlp))
    train(
        env_id,
        1,
        seed,
        variant,
        algorithm=functools.partial(
            DQN, q_network=q_network, epsilon=Linear(1.0, 0.05, finish=0.2), double=False, target_period=125
        ),
        batches=functools.partial(
            ReplayBatches, capacity=50_000, batch_size=64, updates_per_env_step=0.25, warmup_env_steps=1000
        ),
        learner=functools.partial(Learner, learning_rate=1e-3, max_grad_norm=10.0),
        unroll_length=4,
        num_env_steps=num_env_steps,
    )


def actor_critic(algorithm: Any, env_id: str, num_env_steps: int, seed: int, variant: str = "plain") -> None:
    mlp = functools.partial(MLP, layers=(256, 256), activation="relu")
    actor = {"actor_mlp": mlp} if algorithm is SAC else {"actor": functools.partial(DeterministicActor, mlp=mlp)}
    train(
        env_id,
        1,
        seed,
        variant,
        algorithm=functools.partial(algorithm, **actor),
        batches=functools.partial(ReplayBatches, capacity=100_000, batch_size=256, warmup_env_steps=1000),
        learner=functools.partial(Learner, learning_rate=3e-4),
        unroll_length=1,
        num_env_steps=num_env_steps,
    )


GAME: dict[str, Any] = {
    "env_kwargs": script.ATARI | {"obs_type": "grayscale"},  # as in the shipped confs
    "wrappers": [preprocess_atari, FireOnReset],
    "training_wrappers": [EpisodicLife],
}
IMAGES = functools.partial(Torso, mlp=functools.partial(MLP, layers=()))  # nothing between Nature's network and heads


def ppo_pong(num_env_steps: int, seed: int, variant: str = "plain") -> None:
    """Trains the recipe of confs/ppo_pong.gin, with constant rates, and games one after another."""
    train(
        "ALE/Pong-v5",
        8,
        seed,
        variant,
        environment=GAME,
        transforms=[FrameStack, RewardClip],
        algorithm=functools.partial(
            PPO,
            network=functools.partial(ActorCritic, actor_torso=IMAGES, shared_torso=True),
            clip_range=0.1,
            value_coef=1.0,  # times half the squared error
            entropy_coef=0.01,
        ),
        batches=functools.partial(EpochBatches, num_epochs=4, minibatch_size=256),
        learner=functools.partial(
            Learner, optimizer=functools.partial(Adam, eps=1e-5), learning_rate=2.5e-4, max_grad_norm=0.5
        ),
        unroll_length=128,
        num_env_steps=num_env_steps,
    )


def dqn_pong(num_env_steps: int, seed: int, variant: str = "plain") -> None:
    q_network = functools.partial(QNetwork, torso=IMAGES)
    train(
        "ALE/Pong-v5",
        1,
        seed,
        variant,
        environment=GAME,
        transforms=[FrameStack, RewardClip],
        algorithm=functools.partial(
            DQN, q_network=q_network, epsilon=Linear(1.0, 0.05, finish=0.2), double=False, target_period=250
        ),
        batches=functools.partial(
            ReplayBatches, capacity=10_000, batch_size=32, updates_per_env_step=0.25, warmup_env_steps=1000
        ),
        learner=functools.partial(Learner, learning_rate=1e-4, max_grad_norm=10.0),
        unroll_length=4,
        num_env_steps=num_env_steps,
    )


RECIPES = {
    "ppo_cartpole": functools.partial(ppo, "CartPole-v1", 100_000),
    "ppo_halfcheetah": functools.partial(ppo, "HalfCheetah-v5", 100_000),
    "appo_cartpole": functools.partial(appo, 200_000),
    "appo_slow": functools.partial(appo_slow, 4_000),
    "dqn_cartpole": functools.partial(dqn, "CartPole-v1", 30_000),
    "ppo_pong": functools.partial(ppo_pong, 8_192),
    "dqn_pong": functools.partial(dqn_pong, 4_000),
    "sac_halfcheetah": functools.partial(actor_critic, SAC, "HalfCheetah-v5", 3_000),
    "td3_halfcheetah": functools.partial(actor_critic, TD3, "HalfCheetah-v5", 3_000),
}


class Threshold(Listener):
    """Ends training when the race is over; the last listener, so that the time of checkpoints and summaries counts."""

    def __init__(self, race: threshold.Race):
        self._race = race

    def start(self, run: Run) -> None:
        with self._race.stopped_clock():
            num_episodes = self._race.task.num_episodes
            self._evaluator = run.evaluator(num_episodes, num_envs=num_episodes)

    def after_iteration(self, run: Run, report: Report) -> None:
        if self._race.is_over(report.env_steps, report.updates, run.clock.finished, self._mean) and not report.finished:
            signal.raise_signal(signal.SIGTERM)  # the trainer stops after one more iteration

    def close(self) -> None:
        self._evaluator.close()

    def _mean(self) -> float:
        return self._evaluator.evaluate(self._race.task.num_episodes, seed=threshold.EVALUATION_SEED).mean


def train_to_threshold(arguments: argparse.Namespace) -> None:
    """Trains a shipped conf as `alfish train` does, with the race's evaluation in place of its own."""
    race = threshold.Race(threshold.TASKS[arguments.recipe], arguments.started, arguments.max_env_steps)
    bindings = [f"Trainer.seed = {arguments.seed}", "Trainer.num_threads = 1", *arguments.gin_param]
    found = reading.read([f"{arguments.recipe}.gin"], bindings)
    with tempfile.TemporaryDirectory() as root_dir:
        trainer = configured_trainer(root_dir, found)
        kept = [listener for listener in trainer.listeners if not isinstance(listener, Evaluate)]
        trainer.listeners[:] = [*kept, Threshold(race)]  # the list that the trainer calls
        trainer.train()
    race.print_result(VERSIONS)


def train_by_default(arguments: argparse.Namespace) -> None:
    """Calls `alfish.train(ALGORITHM, environment)` with no setting but budget and seed."""
    from benchmarks.runs import unknown_tasks

    (name,), task = arguments.variant, unknown_tasks.TASKS[arguments.recipe]
    num_env_steps = unknown_tasks.BUDGETS[name]
    with tempfile.TemporaryDirectory() as root_dir:
        began = time.monotonic()
        policy = alfish.train(
            name, task.env, num_env_steps=num_env_steps, seed=arguments.seed, root_dir=f"{root_dir}/run"
        )
        seconds = time.monotonic() - began

    def act(observation: Any, is_first: bool) -> Any:
        return policy.act(observation, first=is_first)

    print(json.dumps({"seconds": seconds, "returns": unknown_tasks.returns(task, act)}))


def main() -> None:
    script.main(RECIPES, threshold=train_to_threshold, defaults=train_by_default)


if __name__ == "__main__":
    main()
