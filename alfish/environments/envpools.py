"""EnvPool's environments, which step in C++ threads and take seeds in the constructor only."""

import difflib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from alfish import nest
from alfish.data import TimeStep
from alfish.environments.environment import Environment
from alfish.environments.finding import named_kwargs
from alfish.environments.vector import VectorEnvironment
from alfish.errors import UsageError
from alfish.errors.user_code import calling
from alfish.nest import Nest


def make_envpool(
    env_id: Any,
    num_envs: int,
    seeds: Sequence[int],
    kwargs: Mapping[str, Any],
    action_mask: str | None,
    rewards: Sequence[str] | None,
) -> Environment:
    """Returns environments of EnvPool for training."""
    environment = EnvPoolEnvironment(env_id, seeds, kwargs, action_mask, rewards)
    assert environment.num_envs == num_envs
    environment.name, environment.stepping = env_id, "in EnvPool"
    return environment


class EnvPoolEnvironment(VectorEnvironment):
    """Environments of EnvPool, which takes seeds only in its constructor; a reset with seeds builds a new pool.

    Args:
      env_id: EnvPool's id of the environments.
      seeds: one seed for each environment.
      kwargs: arguments of EnvPool's constructor.
      action_mask, rewards: see `VectorEnvironment`.
    """

    def __init__(
        self,
        env_id: str,
        seeds: Sequence[int],
        kwargs: Mapping[str, Any],
        action_mask: str | None = None,
        rewards: Sequence[str] | None = None,
    ):
        super().__init__(_pool(env_id, seeds, kwargs), seeds, action_mask=action_mask, rewards=rewards)
        self._make_pool = functools.partial(_pool, env_id, kwargs=kwargs)

    def reset(self, seeds: Sequence[int | None] | None = None, rows: np.ndarray | None = None) -> TimeStep:
        self._members.first_seeds = None
        if seeds is not None:
            self.env.close()
            self.env = self._make_pool([seed or 0 for seed in seeds])
            self._members.follow(self.env)
            self._halves = self._halves_of_step()
        return super().reset(None, rows)

    def _halves_of_step(self) -> tuple[Callable[[Any], Any], Callable[[], Any]]:
        pool: Any = self.env
        return pool.send, pool.recv


class SinglePool(gymnasium.Env):
    """One environment of EnvPool with gymnasium's interface, for evaluations. It is rebuilt for each new seed.

    Args:
      env_id: EnvPool's id of the environment.
      kwargs: arguments of EnvPool's constructor.
    """

    def __init__(self, env_id: str, kwargs: Mapping[str, Any]):
        self._env_id = env_id
        self._kwargs = kwargs
        self._pool = _pool(env_id, [0], kwargs)
        self.observation_space, self.action_space = self._pool.observation_space, self._pool.action_space
        self.metadata, self.render_mode = self._pool.metadata, kwargs.get("render_mode")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._pool.close()
            self._pool = _pool(self._env_id, [seed], self._kwargs)
        observation, info = self._pool.reset()
        return _row(observation), _row(info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        batch = nest.map(lambda leaf: np.asarray(leaf)[None], action)
        observation, reward, terminated, truncated, info = self._pool.step(batch)
        return _row(observation), reward[0], bool(terminated[0]), bool(truncated[0]), _row(info)

    def render(self) -> Any:
        return self._pool.render()[0]

    def close(self) -> None:
        self._pool.close()


def _pool(env_id: Any, seeds: Sequence[int], kwargs: Mapping[str, Any]) -> Any:
    try:
        import envpool
    except ImportError as error:
        raise UsageError("vectorization 'envpool' needs the extra 'envpool': pip install 'alfish[envpool]'") from error
    if env_id not in envpool.list_all_envs():
        close = difflib.get_close_matches(str(env_id), envpool.list_all_envs(), 3, 0.5)
        raise UsageError(f"EnvPool has no environment {env_id!r}; close ones are {', '.join(close) or 'none'}")
    with calling(f"the constructor of {env_id}"), named_kwargs(env_id, kwargs), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting", category=UserWarning)
        pool = envpool.make_gymnasium(env_id, num_envs=len(seeds), seed=list(seeds), **kwargs)
        _ = pool.observation_space, pool.action_space  # built here to suppress gymnasium's warning about rounded bounds
        return pool


def _row(batch: Nest) -> Nest:
    """Returns copies of row 0 of each leaf `[1, ...]`; empty leaves, as in EnvPool's infos, are allowed."""
    return nest.map(lambda leaf: leaf[0].copy() if np.ndim(leaf) else leaf, batch)
