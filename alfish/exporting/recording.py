"""Recorded observations on which an exported policy is compared with the policy itself."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from alfish import nest
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.offline import Episode, Reading, Spaces
from alfish.training.policy import Policy
from alfish.training.trainer import Trainer

NUM_EPISODES = 8  # at a time; environments that cannot be seeded one by one need as many


class Step(NamedTuple):
    """The input of a policy before it acts."""

    observation: Nest  # in the environment's units and structure
    first: bool  # of an episode
    reward: np.ndarray  # of the action before; zeros at the first observation


def from_environment(trainer: Trainer, num_steps: int, seed: int) -> list[Step]:
    """Returns the steps of episodes in which the trainer's policy takes the mode of its actions.

    Args:
      trainer: with the policy's weights.
      num_steps: number of steps.
      seed: of the first episode.
    """
    with contextlib.closing(trainer.evaluator(NUM_EPISODES, 1, num_steps)) as evaluator:
        evaluator.log = lambda line: None  # that an episode is cut does not matter here
        seeds = itertools.count(seed, NUM_EPISODES)
        blocks = (evaluator.test_episodes(NUM_EPISODES, first) for first in seeds)
        return _steps(itertools.chain.from_iterable(blocks), num_steps)


def from_data(source: str, policy: Policy, num_steps: int) -> list[Step]:
    """Returns the first steps of recorded data.

    Args:
      source: as `OfflineBuffer.sources` names it.
      policy: whose spaces the data must fit.
      num_steps: number of steps.

    Raises:
      UsageError: the data cannot be read, do not fit, or have fewer steps.
    """
    reading = Reading([source], Spaces(policy.observation_space, policy.action_space))
    steps = _steps(iter(reading), num_steps)
    if len(steps) < num_steps:
        raise UsageError(f"{source} has {len(steps):,} steps, and {num_steps:,} were asked for (--num_steps)")
    return steps


def _steps(episodes: Iterable[Episode], num_steps: int) -> list[Step]:
    return list(itertools.islice(itertools.chain.from_iterable(map(_of_episode, episodes)), num_steps))


def _of_episode(episode: Episode) -> Iterator[Step]:
    for t in range(episode.length):
        reward: Any = episode.rewards[t - 1] if t else np.zeros_like(episode.rewards[0])
        yield Step(nest.map(lambda leaf, t=t: leaf[t], episode.observations), t == 0, np.asarray(reward, np.float32))
