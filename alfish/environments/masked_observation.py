"""Action masks of environments, as a leaf of the observation.

`make_environment.action_mask` names the source of an environment's mask:
- 'observation:action_mask': a leaf of the observation (PettingZoo), or 'observation:game.legal' in a nested Dict;
- 'info:action_mask': an entry of the info of reset and step (gymnasium's Taxi);
- 'method:action_masks': a method of the environment (sb3-contrib).
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from alfish import specs
from alfish.errors import UsageError
from alfish.errors.user_code import calling
from alfish.specs import ActionMask, ActionUnits, MaskLayout
from alfish.specs.masks import check_entries

LEAF = "action_mask"  # name of the leaf for a mask from an info or a method
KINDS = ("observation", "info", "method")


class MaskedObservation(gymnasium.Wrapper):
    """Adds the action mask of an environment to its observation, as a leaf with the space `ActionMask`.

    A mask from an info or a method becomes the leaf `action_mask`, next to the leaves of a Dict observation; any other
    observation becomes the leaf `observation`. At the end of an episode, a mask that is missing or allows nothing is
    replaced by all 1, because no action follows.

    Args:
      env: the environment.
      source: source of the mask: 'observation:LEAF', 'info:KEY' or 'method:NAME'.

    Raises:
      UsageError: the source has no mask, or the mask does not fit the action. A reset or step raises it if a mask is
        missing or allows no choice for an entry of the action; a step also if the mask forbids the action taken.
    """

    def __init__(self, env: gymnasium.Env, source: str):
        super().__init__(env)
        self._name = f"make_environment.action_mask = {source!r}"
        self._leaf = MaskLeaf(source, env.observation_space, env.action_space, "make_environment.action_mask")
        self._units = ActionUnits(env.action_space)
        self.observation_space = self._leaf.observation_space
        if self._leaf.kind == "method":
            where = self._leaf.where
            method = env.get_wrapper_attr(where) if env.has_wrapper_attr(where) else None
            if not callable(method):
                owner = type(env.unwrapped).__name__
                found = "" if method is None else f": {owner}.{where} is {method!r}"
                raise UsageError(
                    f"{self._name}, but {owner} has no method {where}{found}; give a method without arguments that "
                    "returns the mask"
                )
        self._mask = np.ones((1, self._leaf.layout.size), np.int8)  # mask of the newest row
        self._num_steps = 0  # number of steps since the last reset

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**arguments)
        self._num_steps = 0
        return self._masked(observation, info, False), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        canonical = self._units.from_environment(specs.batch_of_one(action, self.env.action_space))
        if self._leaf.layout.forbids(self._mask, canonical)[0]:
            raise UsageError(
                f"{self._name}: the action {action} after {self._num_steps} steps of an episode is forbidden by its "
                f"mask, which allows the choices {np.flatnonzero(self._mask[0]).tolist()}; an algorithm reads masks "
                "from the observation, see RLAlgorithm.action_masks"
            )
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._num_steps += 1
        return self._masked(observation, info, terminated or truncated), reward, terminated, truncated, info

    def _masked(self, observation: Any, info: dict[str, Any], has_ended: bool) -> Any:
        """Returns the observation with its mask as a leaf."""
        mask = self._leaf.fitted(
            self._given(observation, info), has_ended, f"after {self._num_steps} steps of an episode"
        )
        self._mask = mask
        return self._leaf.put(observation, mask[0])

    def _given(self, observation: Any, info: dict[str, Any]) -> Any:
        """Returns the mask in the environment's form; None if it is missing."""
        if self._leaf.kind != "method":
            return self._leaf.given(observation, info)
        with calling(f"{self._name}: {type(self.env.unwrapped).__name__}.{self._leaf.where}()"):
            return self.env.get_wrapper_attr(self._leaf.where)()


class MaskLeaf:
    """The leaf of an observation that is the action mask.

    Args:
      source: source of the mask, see `MaskedObservation`.
      observation_space, action_space: spaces of the environment.
      setting: name of the setting in messages.

    Attributes:
      observation_space: space of the observation with the mask.
      layout: positions of the choices of each action entry in the mask.
      kind, where: parts of `source` before and after the colon, such as 'info' and 'action_mask'.

    Raises:
      UsageError: as for `MaskedObservation`.
    """

    def __init__(self, source: str, observation_space: spaces.Space, action_space: spaces.Space, setting: str):
        self._name = f"{setting} = {source!r}"
        self.kind, self.where = parsed(source, setting)
        self._action_spec = specs.action_spec(action_space)
        if self.kind == "observation":
            self.observation_space = marked(observation_space, source, setting)
        else:
            self.observation_space = self._extended(observation_space)
        self._has_parts = isinstance(observation_space, spaces.Dict)
        self._path = self.where.split(".") if self.kind == "observation" else [LEAF]
        self.layout = MaskLayout(self._action_spec, at(self.observation_space, self._path).n, self._name)

    def given(self, observation: Any, info: dict[str, Any]) -> Any:
        """Returns the mask from an observation or info, in the environment's form; None if it is missing."""
        return at(observation, self._path) if self.kind == "observation" else info.get(self.where)

    def fitted(self, given: Any, has_ended: bool, when: str) -> np.ndarray:
        """Returns a copy of a mask in the leaf's form, `[1, n]` int8.

        Args:
          given: mask in the environment's form; a list has a mask for each entry of the action. None means a missing
            mask.
          has_ended: whether no action follows in this episode.
          when: time at which the mask was returned, for messages, such as 'after 3 steps of an episode'.

        Raises:
          UsageError: an action follows, and the mask is missing or allows no choice for an entry of the action.
        """
        whole = np.ones((1, self.layout.size), np.int8)
        mask = whole if given is None else self._in_form(given)
        if self.layout.is_empty(mask)[0]:
            if not has_ended:
                raise UsageError(
                    f"{self._name}: the mask {when} forbids every choice of an entry of the action "
                    f"({_shown(mask[0])}); at least one choice must be allowed until the episode ends"
                )
            mask = whole
        if given is None and not has_ended:
            raise UsageError(
                f"{self._name}, but there was no mask {when}; the environment must return a mask at each reset and step"
            )
        return mask

    def put(self, observation: Any, mask: np.ndarray) -> Any:
        """Returns the observation with `mask`, `[n]`, as its leaf for the action mask."""
        if self.kind == "observation":
            return _replaced(observation, self._path, mask)
        return {**(observation if self._has_parts else {"observation": observation}), LEAF: mask}

    def _in_form(self, given: Any) -> np.ndarray:
        flat = np.hstack(given) if isinstance(given, (list, tuple)) else np.asarray(given)
        check_entries(flat, self._name)
        mask = flat.reshape(1, -1).astype(np.int8)
        if mask.shape[1] != self.layout.size:
            mask = MaskLayout(self._action_spec, mask.size, self._name).whole(mask).astype(np.int8)
        return mask

    def _extended(self, space: spaces.Space) -> spaces.Dict:
        """Returns the observation space with the leaf `action_mask`, which has one entry for each choice."""
        parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {"observation": space}
        if LEAF in parts:
            raise UsageError(
                f"{self._name}, but the observation already has a leaf {LEAF}; refer to it as 'observation:{LEAF}'"
            )
        size = max(1, specs.num_choices(self._action_spec))  # size 0 is refused elsewhere with a clearer message
        return spaces.Dict({**parts, LEAF: ActionMask(size)})


def parsed(source: str, setting: str = "make_environment.action_mask") -> tuple[str, str]:
    """Returns the parts of a source before and after the colon, such as ('info', 'action_mask')."""
    kind, _, where = source.partition(":")
    if kind not in KINDS or not where:
        raise UsageError(
            f"{setting} is {source!r}; it must be 'observation:LEAF', 'info:KEY' or 'method:NAME', such as "
            "'info:action_mask'"
        )
    return kind, where


def marked(space: spaces.Space, source: str, setting: str = "make_environment.action_mask") -> spaces.Space:
    """Returns an observation space with the leaf named by `source` marked as an `ActionMask`.

    Raises:
      UsageError: the leaf does not exist or is not a space of numbers, or the mask is not a leaf of the observation.
    """
    kind, where = parsed(source, setting)
    if kind != "observation":
        raise UsageError(
            f"{setting} is {source!r}, but a vector class can have its masks only in the observation; put the mask "
            "there, and refer to it as 'observation:LEAF'"
        )
    leaf = at(space, where.split("."))
    if not isinstance(leaf, (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)):
        raise UsageError(
            f"{setting} is {source!r}, but "
            + ("the observation has no such leaf" if leaf is None else f"that leaf is {leaf}, not an array of 0 and 1")
            + f" ({space})"
        )
    return _replaced(space, where.split("."), ActionMask(int(np.prod(leaf.shape))))


def at(value: Any, path: list[str]) -> Any:
    """Returns the leaf at `path` of a dict observation or of a Dict space; None if the path does not exist."""
    for key in path:
        parts = value.spaces if isinstance(value, spaces.Dict) else value
        if not isinstance(parts, dict) or key not in parts:
            return None
        value = parts[key]
    return value


def _replaced(value: Any, path: list[str], leaf: Any) -> Any:
    """Returns a dict observation or a Dict space with the leaf at `path` replaced."""
    if not path:
        return leaf
    parts = {**value, path[0]: _replaced(value.get(path[0], {}), path[1:], leaf)}
    return spaces.Dict(parts) if isinstance(value, spaces.Dict) else parts


def _shown(mask: np.ndarray) -> str:
    return np.array2string(mask, threshold=20)
