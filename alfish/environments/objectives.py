"""Vector rewards of environments.

An environment declares a vector reward by `reward_space`, a Box of shape (R,), and returns arrays `[R]` from `step`, as
in mo-gymnasium. `make_environment.rewards` names the entries, or gives a source for each entry:
- `['treasure', 'time']`: names of the entries of the environment's own vector;
- `{'speed': 'info:reward_forward', 'energy': 'info:reward_ctrl'}`: numbers in the info of each step;
- `{'score': 'reward', 'energy': 'info:reward_ctrl'}`: 'reward' is the environment's own number, and 'reward:1' the
  second entry of its vector.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces

from alfish import specs
from alfish.errors import UsageError

Rewards: TypeAlias = Sequence[str] | Mapping[str, str]


class VectorRewards(gymnasium.Wrapper):
    """Returns a vector reward with named entries, `[R]` float32.

    Args:
      env: the environment.
      rewards: names of the entries of the environment's vector reward, or the source of each entry by name; None means
        the environment's own vector and names.

    Attributes:
      reward_space: space of the reward, `specs.VectorReward`.

    Raises:
      UsageError: the number of names differs from the number of entries of the environment's reward, or a source does
        not exist. A step raises it if a reward does not have the declared shape, or if an entry of the info is missing
        or not a number.
    """

    def __init__(self, env: gymnasium.Env, rewards: Rewards | None = None):
        super().__init__(env)
        name = type(env.unwrapped).__name__ if rewards is None else f"make_environment.rewards = {rewards!r}"
        self._entries = RewardEntries(declared(env), rewards, name)
        self.reward_space = self._entries.reward_space

    def step(self, action: Any) -> tuple[Any, np.ndarray, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, self._entries(reward, info), terminated, truncated, info


class RewardEntries:
    """Computes a vector reward, `[R]` float32, from the reward and the info of a step.

    Args:
      space: reward space that the environment declares; None means a number.
      rewards: as for `VectorRewards`.
      name: name of the setting or of the environment, for messages.

    Attributes:
      reward_space: space of the result, `specs.VectorReward`.

    Raises:
      UsageError: as for `VectorRewards`.
    """

    def __init__(self, space: spaces.Box | None, rewards: Rewards | None, name: str):
        self._name = name
        self._shape: tuple[int, ...] | None = None  # required shape of the environment's reward; None means any shape
        if isinstance(rewards, Mapping):
            self._sources = [self._source(where, space) for where in rewards.values()]
            self.reward_space = specs.reward_spec(list(rewards))
        else:
            self._sources = []
            self.reward_space = named(space, rewards, name.partition(" = ")[0])
            self._shape = self.reward_space.shape

    def __call__(self, reward: Any, info: dict[str, Any]) -> np.ndarray:
        shape = np.asarray(reward).shape
        if self._shape is not None and shape != self._shape:
            raise UsageError(
                f"{self._name}: a step returned a reward of shape {shape}, but the environment declared {self._shape}; "
                "a wrapper that adds the entries up needs a reward_space of shape ()"
            )
        entries = [source(reward, info) for source in self._sources] if self._sources else reward
        return np.asarray(entries, np.float32)

    def _source(self, where: str, space: spaces.Box | None) -> Callable[[Any, dict[str, Any]], float]:
        """Returns a function that computes an entry from the environment's reward and info."""
        kind, _, key = where.partition(":")
        if where == "reward":
            return lambda reward, info: self._number(reward, where)
        if kind == "reward" and key.isdecimal():
            self._shape = named(space, None).shape
            size = sum(self._shape)
            if int(key) >= size:
                raise UsageError(
                    f"{self._name}: {where!r} is not one of the {size} entries of the environment's reward"
                )
            return lambda reward, info: self._number(reward[int(key)], where)
        if kind == "info" and key:
            return lambda reward, info: self._number(info.get(key), where)
        raise UsageError(
            f"{self._name}: {where!r} is not a source of a reward; write 'info:KEY', 'reward', or 'reward:1' for the "
            "second entry of a vector"
        )

    def _number(self, value: Any, where: str) -> float:
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            words = "was missing" if value is None else f"was {value!r}, which is not a number"
            raise UsageError(f"{self._name}: {where!r} {words} after a step; each step must return it") from error


def declared(env: Any) -> spaces.Box | None:
    """Returns the `reward_space` of a single or vector environment; None if its rewards are scalars.

    A wrapper may declare the space. `mo_gymnasium.wrappers.LinearReward` has no such space, because it adds the entries
    up.
    """
    while isinstance(env, gymnasium.Wrapper) and not hasattr(env, "reward_space"):
        if type(env).__name__ == "LinearReward":
            return None
        env = env.env
    space = getattr(env, "reward_space", None)
    return space if space is not None and space.shape else None


def named(
    space: spaces.Box | None, names: Sequence[str] | None, setting: str = "make_environment.rewards"
) -> spaces.Box:
    """Returns the spec of the reward that an environment declares.

    Args:
      space: space of the environment's rewards; None means a scalar.
      names: names of the entries; None means the names in the space, or indices if the space has no names.
      setting: name of the setting that gives the names, for messages.

    Raises:
      UsageError: the number of names differs from the number of entries.
    """
    size = 0 if space is None else sum(space.shape)
    if names is None:
        return specs.reward_spec(None if space is None else specs.reward_names(space))
    if len(names) != size:
        has = f"has {size} entries" if size else "is a scalar: it has no reward_space of shape (R,)"
        raise UsageError(f"{setting} names {len(names)} entries, but the environment's reward {has}")
    return specs.reward_spec(list(names))
