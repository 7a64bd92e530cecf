"""Observations without some of their leaves."""

from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
from gymnasium import spaces

from alfish.errors import UsageError


class LeftOut(gymnasium.ObservationWrapper):
    """Leaves parts of a Dict observation out, as texts, which no network takes.

    Args:
      env: the environment to wrap.
      paths: names of the parts, 'mission', or 'goal.text' inside a Dict that is a part itself.

    Raises:
      UsageError: there is no such part, or none is left.
    """

    def __init__(self, env: gymnasium.Env, paths: Sequence[str]):
        super().__init__(env)
        known = list(_paths(env.observation_space))
        if unknown := [path for path in paths if path not in known]:
            has = f"has {', '.join(known)}" if known else f"is {env.observation_space}, which has no named parts"
            raise UsageError(f"make_environment.leave_out names {unknown[0]!r}, and the observation {has}")
        self._kept = _kept(env.observation_space, set(paths))
        if not self._kept:
            raise UsageError(f"make_environment.leave_out is {[*paths]}, and no part of the observation is left")
        self.observation_space = _part_of(env.observation_space, self._kept)

    def observation(self, observation: Any) -> dict[str, Any]:
        return _without(observation, self._kept)


def _paths(space: spaces.Space, prefix: str = "") -> Iterator[str]:
    """Yields the paths of all parts of a Dict."""
    for key, child in space.items() if isinstance(space, spaces.Dict) else ():
        yield f"{prefix}{key}"
        yield from _paths(child, f"{prefix}{key}.")


def _kept(space: spaces.Space, paths: set[str], prefix: str = "") -> dict[str, Any]:
    """Returns the names of the parts that stay: of a Dict a dict of the same kind, else an empty one."""
    kept = {}
    for key, child in space.items() if isinstance(space, spaces.Dict) else ():
        inner = _kept(child, paths, f"{prefix}{key}.")
        if f"{prefix}{key}" not in paths and (inner or not isinstance(child, spaces.Dict)):
            kept[key] = inner
    return kept


def _part_of(space: spaces.Space, kept: dict[str, Any]) -> spaces.Space:
    if not isinstance(space, spaces.Dict):
        return space
    return spaces.Dict({key: _part_of(space[key], inner) for key, inner in kept.items()})


def _without(value: Any, kept: dict[str, Any]) -> Any:
    return {key: _without(value[key], inner) for key, inner in kept.items()} if kept else value
