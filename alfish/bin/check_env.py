"""Says whether alfish can train on an environment, with which algorithms, and why not.

  alfish check-env --env_id=CartPole-v1
  alfish check-env --env_id=my_package.my_module:MyEnv-v0

It builds the environment, looks at its spaces, and acts at random for a few episodes: observations outside their space,
values that are not finite, resets that ignore their seed, episodes that never end and whatever is raised are reported.
"""

import importlib
import pkgutil
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from absl import flags
from gymnasium.vector.utils import iterate

import alfish.algorithms
from alfish import nest, specs
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.environments import make_environment
from alfish.errors import UsageError, first_line

FLAGS = flags.FlagValues()
flags.DEFINE_string("env_id", None, "A gymnasium id, as CartPole-v1 or my_module:MyEnv-v0.", flag_values=FLAGS)
flags.DEFINE_integer("num_steps", 1000, "Random steps to take.", 1, flag_values=FLAGS)


def main(flag_values: flags.FlagValues) -> int:
    if not flag_values.env_id:
        raise UsageError("--env_id is missing: name an environment, as in --env_id=CartPole-v1")
    environment = make_environment(flag_values.env_id, num_envs=2, evaluation=True)
    print(f"observation  {specs.describe(environment.observation_spec)}")
    print(f"action       {specs.describe(environment.action_spec)}  (the algorithm's units)")
    complaints = list(_examined(environment, flag_values.num_steps))
    environment.close()
    for complaint in complaints:
        print(f"problem      {complaint}")
    able = False
    for algorithm in algorithms():
        try:
            algorithm.check_specs(environment.observation_spec, environment.action_spec, environment.reward_spec)
            able = True
            print(f"{algorithm.__name__:<12} yes")
        except UsageError as error:
            print(f"{algorithm.__name__:<12} no: {error}")
    return 0 if able and not complaints else 1


def _examined(environment: Any, num_steps: int) -> Iterator[str]:
    """What `examine` yields, and the error that ends it: what an environment raises is what is to be told."""
    try:
        yield from examine(environment, num_steps)
    except Exception as error:
        traceback.print_exception(error)  # for whoever wrote the environment
        yield (
            f"{type(error).__name__}: {first_line(error)}; reset returns (observation, info), and step (observation, "
            "reward, terminated, truncated, info), with every part of the observation as its space says"
        )


def examine(environment: Any, num_steps: int) -> Iterator[str]:
    """Acts at random in two environments built for evaluation; yields what is wrong, each thing once."""
    env, space = environment.env, environment.observation_space
    observations = [environment.reset([5, 6]).observation for _ in range(2)]
    if any(not torch.isfinite(leaf.float()).all() for leaf in nest.leaves(observations[0])):
        yield "a reset returns an observation that is not finite"
    elif any(not torch.equal(a, b) for a, b in zip(*map(nest.leaves, observations))):
        yield "two resets with the same seed give different observations, so evaluations cannot be repeated"
    env.action_space.seed(0)
    num_ended, said_outside = 0, False
    for _ in range(num_steps):
        observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        outside = [one for one in iterate(env.observation_space, observation) if one not in space]
        if outside and not said_outside:
            said_outside = True
            yield f"an observation is not in the observation space {space}: {outside[0]}"
        if not np.isfinite(reward).all():
            yield f"a reward is not finite: {reward}"
            return
        done = terminated | truncated
        if done.any():
            num_ended += int(done.sum())
            environment.reset([None, None], done)
    if not num_ended:
        yield f"no episode ended in {num_steps} random steps; without an end there are no returns to report"


def algorithms() -> list[type[RLAlgorithm]]:
    """Every algorithm that ships, by importing the folder."""
    for module in pkgutil.iter_modules(alfish.algorithms.__path__):
        importlib.import_module(f"alfish.algorithms.{module.name}")
    found: list[type[RLAlgorithm]] = []
    frontier: list[type[RLAlgorithm]] = [*RLAlgorithm.__subclasses__()]
    while frontier:
        algorithm = frontier.pop()
        frontier += algorithm.__subclasses__()
        if algorithm.__module__.startswith("alfish.algorithms."):
            found.append(algorithm)
    return sorted(found, key=lambda algorithm: algorithm.__name__)
