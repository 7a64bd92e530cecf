"""Environments whose resets and steps are pure functions of JAX.

B environments step and reset in one compiled function. This function also returns the final observation of each
episode. Tensors are exchanged with JAX by dlpack, without copies. JAX and the libraries of environments are imported
when an environment is made.
"""

import abc
import os
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces

from alfish import nest
from alfish.environments.simulator import Simulator, SimulatorStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.simulators.libraries import library

COMMAND = "pip install jax"


class Transition(NamedTuple):
    """One step of one environment, in arrays of JAX without a batch dimension."""

    state: Any  # pytree
    observation: Any  # observation after the step, before any reset
    reward: Any
    terminated: Any
    truncated: Any = False  # truncation by the environment itself; `JaxEnvironment` adds its time limit


class JaxEnvironment(Simulator):
    """B environments of a subclass, whose methods `begin` and `advance` are pure functions of JAX for one environment.

    Each environment has its own random key, so its episodes do not depend on the number of environments. Checkpoints
    contain the whole state, so restored episodes continue bit for bit.

    Args:
      num_envs: number of environments, B.
      observation_space, action_space: gymnasium's spaces of one environment.
      seed: seed of the random keys.
      device: device of the environments and of the tensors; None means the CPU.
      time_limit: number of steps after which an episode is truncated; None means no limit.

    Raises:
      UsageError: JAX is not installed, or does not have the device.
    """

    def __init__(
        self,
        num_envs: int,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        seed: int = 0,
        device: str | None = None,
        time_limit: int | None = None,
    ):
        self._jax = jax = imported("jax", COMMAND)
        self.num_envs = num_envs
        self.device = torch.device(device or "cpu")
        self.time_limit = time_limit
        self.observation_space, self.action_space = observation_space, action_space
        try:
            self._place = jax.devices(self.device.type)[self.device.index or 0]
        except (RuntimeError, IndexError) as error:
            raise UsageError(
                f"JAX has no device {self.device}, on which {type(self).__name__} should compute; install JAX for "
                "this device, or set make_environment.env_kwargs = {'device': 'cpu'}"
            ) from error
        self._begin, self._advance = jax.jit(self._begin_all), jax.jit(self._advance_all)
        # Keys [B], numbers of steps [B] and states [B] of the current episodes.
        self._episodes: tuple[Any, Any, Any] = self._keys(seed), None, None

    @abc.abstractmethod
    def begin(self, key: Any) -> tuple[Any, Any]:
        """Returns the state, a pytree, and the observation at the beginning of an episode.

        Args:
          key: random key of JAX.
        """

    @abc.abstractmethod
    def advance(self, key: Any, state: Any, action: Any) -> Transition:
        """Returns one step, without a reset; its state has the structure of the state that `begin` returns.

        Args:
          key: random key of JAX.
          state: state before the step.
          action: action in the units of `action_space`; integers are int32.
        """

    def reset(self, seed: int | None) -> Nest:
        self._episodes, observation = self._begin(self._episodes[0] if seed is None else self._keys(seed))
        return self._jax.tree.map(torch.from_dlpack, observation)

    def step(self, action: Nest) -> SimulatorStep:
        self._episodes, step = self._advance(self._episodes, nest.map(self._to_jax, action))
        return self._jax.tree.map(torch.from_dlpack, step)

    def spread_first_episodes(self) -> None:
        """Shortens each current episode by a random number of steps below the time limit."""
        if self.time_limit is not None:
            jax, (keys, clock, state) = self._jax, self._episodes
            keys, drawing = jax.vmap(jax.random.split, out_axes=1)(keys)
            draw = jax.vmap(lambda key: jax.random.randint(key, (), 0, self.time_limit, clock.dtype))
            self._episodes = keys, draw(drawing), state

    def state_dict(self) -> dict[str, Any]:
        """Returns the keys, numbers of steps and states of the episodes: their leaves as tensors, by path."""
        return {path: torch.from_dlpack(leaf) for path, leaf in self._leaves()}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restores keys, numbers of steps and states.

        Raises:
          UsageError: the state belongs to a different class or number of environments.
        """
        own = self._leaves()
        if {path: tuple(leaf.shape) for path, leaf in state.items()} != {path: leaf.shape for path, leaf in own}:
            raise UsageError(
                f"the checkpoint's state does not match {self.num_envs} environments of {type(self).__name__}; "
                "continue with the class, task and num_envs that it was saved with"
            )
        leaves = [self._to_jax(state[path].to(self.device)) for path, _ in own]
        self._episodes = self._jax.tree.unflatten(self._jax.tree.structure(self._episodes), leaves)
        return True

    def _leaves(self) -> list[tuple[str, Any]]:
        tree_util = self._jax.tree_util
        return [(tree_util.keystr(path), leaf) for path, leaf in tree_util.tree_leaves_with_path(self._episodes)]

    def _keys(self, seed: int) -> Any:
        """Returns a key for each environment, `[B]` keys."""
        jax = self._jax
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.PRNGKey(seed), np.arange(self.num_envs))
        return jax.device_put(keys, self._place)

    def _to_jax(self, tensor: torch.Tensor) -> Any:
        """Returns a JAX array that shares a tensor's memory; JAX has no 64-bit integers, so they become int32."""
        return self._jax.dlpack.from_dlpack(tensor.int() if tensor.dtype == torch.int64 else tensor)

    def _begin_all(self, keys: Any) -> tuple[Any, Any]:
        """Returns new episodes and their first observations `[B, ...]`."""
        jax = self._jax
        action = jax.tree.map(jax.numpy.asarray, self.action_space.sample())  # only shapes and dtypes are used

        def begin(key: Any) -> tuple[Any, Any]:
            state, observation = self.begin(key)
            # Casts to the dtypes of later states, because JAX would compile the step again for other dtypes.
            return self._cast(state, jax.eval_shape(self.advance, key, state, action).state), observation

        keys, beginning = jax.vmap(jax.random.split, out_axes=1)(keys)
        states, observation = jax.vmap(begin)(beginning)
        return (keys, jax.numpy.zeros(self.num_envs, jax.numpy.int32), states), observation

    def _advance_all(self, episodes: tuple[Any, Any, Any], action: Any) -> tuple[Any, SimulatorStep]:
        """Returns the episodes after a step and its resets, and the results of the step `[B, ...]`."""
        jax, (keys, clock, state) = self._jax, episodes
        keys, advancing, beginning = jax.vmap(lambda key: jax.random.split(key, 3), out_axes=1)(keys)
        moved = jax.vmap(self.advance)(advancing, state, action)
        clock = clock + 1
        is_late = False if self.time_limit is None else clock >= self.time_limit
        terminated = moved.terminated.astype(bool)
        truncated = (moved.truncated.astype(bool) | is_late) & ~terminated
        ended = terminated | truncated
        after = self._cast(moved.state, state), moved.observation
        # A reset may cost as much as a step, so it is computed only if an episode has ended.
        begun = jax.lax.cond(ended.any(), lambda: self._cast(jax.vmap(self.begin)(beginning), after), lambda: after)

        def chosen(new: Any, old: Any) -> Any:
            return jax.numpy.where(ended.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        state, observation = jax.tree.map(chosen, begun, after)
        reward = moved.reward.astype(jax.numpy.float32)
        step = SimulatorStep(observation, reward, terminated, truncated, moved.observation)
        return (keys, jax.numpy.where(ended, 0, clock), state), step

    def _cast(self, tree: Any, like: Any) -> Any:
        """Casts a pytree to the dtypes of `like`, which has the same structure."""
        return self._jax.tree.map(lambda leaf, other: self._jax.numpy.asarray(leaf).astype(other.dtype), tree, like)


def imported(module: str, command: str) -> Any:
    """Imports JAX or a library of JAX environments; arguments as for `libraries.library`."""
    # By default JAX reserves three quarters of a GPU's memory, and torch needs memory too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return library(module, command)
