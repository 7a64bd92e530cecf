from __future__ import annotations

import functools  # noqa: F401
import hashlib
import itertools  # noqa: F401
import math  # noqa: F401
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class NumpyPolicy:
    """Acts on one observation of the environment at a time, in numpy.

        policy = Policy()
        action = policy.act(observation)                 # the first call begins an episode
        action = policy.act(observation, reward=reward)  # a policy that does not read rewards ignores them

    The caller may also keep the state; `step` does not change the object's own state:

        state = policy.initial_state()
        action, state = policy.step(observation, state, first=True)

    Args:
      seed: seed of the random numbers; only sampling policies use it.

    Raises:
      ValueError: the weights file in the same directory belongs to a different export. `act` and `step` raise it for an
        observation of another shape, or with a value that is not finite.
    """

    weights_sha256: str
    weight_names: tuple[str, ...]
    observations: tuple[tuple[str, tuple[Any, ...], tuple[int, ...], str], ...]  # name, keys, shape, dtype
    reward_shape: tuple[int, ...]
    inputs: tuple[str, ...]  # inputs of `run` after the weights
    num_actions: int  # number of action leaves, the first results of `run`
    states: tuple[str, ...]
    noise: tuple[tuple[str, tuple[int, ...], str, tuple[int, ...]], ...]  # distribution, shape, dtype, bounds

    def __init__(self, seed: int | None = None):
        path = Path(__file__).with_suffix(".npz")
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != self.weights_sha256:
            raise ValueError(f"{path} does not contain the weights of {Path(__file__).name}; export both files again")
        with np.load(path, allow_pickle=False) as weights:
            self._initial = {name: weights[name] for name in self.states}
            self._prepared = self.prepare(*(weights[name] for name in self.weight_names))
        self._random: Any = np.random.default_rng(seed)
        self._state: dict[str, np.ndarray] | None = None

    def reset(self) -> None:
        """Clears the policy's memory; the next call of `act` begins an episode."""
        self._state = None

    def act(self, observation: Any, first: bool = False, reward: Any = None) -> Any:
        """Returns the action for an observation, both in the environment's units.

        Args:
          observation: observation of the environment. Dict leaves that do not affect the action may be missing.
          first: whether the observation is the first of an episode; if so, the memory is cleared.
          reward: reward of the last action; only some policies read it.
        """
        if self._state is None:
            self._state, first = self._initial, True
        action, self._state = self.step(observation, self._state, first, reward)
        return action

    def initial_state(self) -> dict[str, np.ndarray]:
        """Returns the state at the start of an episode, by name; empty for a policy without memory."""
        return dict(self._initial)

    def step(
        self,
        observation: Any,
        state: Mapping[str, np.ndarray],
        first: bool = False,
        reward: Any = None,
        noise: list[np.ndarray] | None = None,
    ) -> tuple[Any, dict[str, np.ndarray]]:
        """Returns the action and the next state. Only the object's random generator changes.

        Args:
          observation, first, reward: inputs of the step, see `act`.
          state: state that `initial_state` or the previous step returned.
          noise: random numbers; None means that `step` draws them.
        """
        leaves = {one[0]: _leaf(observation, *one) for one in self.observations}
        leaves["first"] = np.asarray(first, bool)
        if "reward" in self.inputs:
            if reward is None and not first:
                raise ValueError("the action depends on the reward of the last action; pass it as reward=")
            given = 0 if reward is None else reward
            leaves["reward"] = np.broadcast_to(np.asarray(given, np.float32), self.reward_shape)
        leaves.update(state)
        drawn = [self._draw(*one) for one in self.noise] if noise is None else noise
        with np.errstate(all="ignore"):
            results = self.run(*self._prepared, *(leaves[name] for name in self.inputs), *drawn)
        # Leaves are copied, because an action may be part of the state, and the caller may write to it.
        actions = [np.array(leaf)[()] for leaf in results[: self.num_actions]]
        return self.nested(actions), dict(zip(self.states, results[self.num_actions :]))

    @staticmethod
    def prepare(*weights: np.ndarray) -> list[Any]:
        """Returns the values that `run` reads from the weights."""
        raise NotImplementedError

    @staticmethod
    def run(*leaves: Any) -> list[np.ndarray]:
        """Returns the leaves of the action and of the next state."""
        raise NotImplementedError

    @staticmethod
    def nested(leaves: list[Any]) -> Any:
        """Returns the leaves in the structure of the action."""
        raise NotImplementedError

    def _draw(self, distribution: str, shape: tuple[int, ...], dtype: str, bounds: tuple[int, ...]) -> np.ndarray:
        draws = {
            "uniform": self._random.random,
            "normal": self._random.standard_normal,
            "exponential": self._random.standard_exponential,
        }
        if distribution == "integers":
            return self._random.integers(*bounds, size=shape).astype(dtype)
        return np.asarray(draws[distribution](shape, np.dtype(dtype)))


def _leaf(observation: Any, name: str, keys: tuple[Any, ...], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    for key in keys:
        observation = observation[key]
    leaf = np.asarray(observation, dtype)
    if leaf.shape != shape:
        raise ValueError(f"{name} has shape {list(leaf.shape)}, but {list(shape)} is expected")
    if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
        raise ValueError(f"{name} has a value that is not finite; the action would be meaningless")
    return leaf
