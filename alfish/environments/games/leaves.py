"""Additional leaves of agents' observations: the game's state, other agents' observations, and the agent's identity.

These leaves allow centralised critics, which see the state although the actor does not:
`Encoder.leaves = {'state': None}` hides the leaf `state` from an actor.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from gymnasium import spaces
from gymnasium.spaces.utils import flatten, flatten_space

from alfish.errors import UsageError
from alfish.errors.user_code import calling
from alfish.specs import ActionMask

Leaf: TypeAlias = Literal["state", "others", "agent"]


class Leaves:
    """Adds leaves to the observations of agents.

    - 'state': result of the game's `state()`, an element of its `state_space`.
    - 'others': observations of the other agents of the game in the order of `possible_agents`, flattened and joined
      into one vector, without action masks. Absent agents have zeros; Discrete observations are one-hot.
    - 'agent': one-hot vector of the agent's index in its group.

    Args:
      names: leaves to add. An observation that is not a Dict becomes the leaf `observation`.
      game: game whose spaces are read.
      observed: observation space of each agent, in the order of `possible_agents`.
      groups: agents of each group.
      name: name of the game in messages.

    Raises:
      UsageError: 'state' is requested but the game has no state, or an observation already has a leaf with an added
        name.
    """

    def __init__(
        self,
        names: Sequence[Leaf],
        game: Any,
        observed: Mapping[str, spaces.Space],
        groups: Sequence[Sequence[str]],
        name: str,
    ):
        self._names = tuple(names)
        self._name = name
        self._observed = dict(observed)
        self._others = {agent: _without_mask(space) for agent, space in observed.items()}
        self._flat = {agent: flatten_space(space) for agent, space in self._others.items()} if self.wants_others else {}
        self._absent = {agent: np.zeros(space.shape or (), np.float32) for agent, space in self._flat.items()}
        self._one_hot = {
            agent: np.eye(len(agents), dtype=np.float32)[i] for agents in groups for i, agent in enumerate(agents)
        }
        self._state_space = _state_space(game, name) if "state" in self._names else None

    @property
    def wants_others(self) -> bool:
        return "others" in self._names

    def space(self, agent: str) -> spaces.Space:
        """Returns the space of an agent's observation with the added leaves."""
        own = self._observed[agent]
        if not self._names:
            return own
        parts = dict(own.spaces) if isinstance(own, spaces.Dict) else {"observation": own}
        more: dict[str, spaces.Space] = {}
        if self._state_space is not None:
            more["state"] = self._state_space
        if self.wants_others:
            others = [flat for other, flat in self._flat.items() if other != agent]
            if not others:
                raise UsageError(f"make_games.leaves has 'others', but {self._name} has only one agent; leave it out")
            low, high = (np.concatenate([getattr(flat, end).ravel() for flat in others]) for end in ("low", "high"))
            more["others"] = spaces.Box(  # the bounds include 0, for absent agents
                np.minimum(low, 0).astype(np.float32), np.maximum(high, 0).astype(np.float32), dtype=np.float32
            )
        if "agent" in self._names:
            more["agent"] = spaces.Box(0, 1, self._one_hot[agent].shape, np.float32)
        if taken := sorted(set(parts) & set(more)):
            raise UsageError(
                f"make_games.leaves has {taken[0]!r}, but the observation of {agent} in {self._name} already has a "
                "leaf of this name; remove it from make_games.leaves, or rename the leaf in the game"
            )
        return spaces.Dict({**parts, **more})

    def seen(self, game: Any, observations: Mapping[str, Any]) -> "Seen":
        """Returns the values that all rows of a game share in one step.

        Args:
          game: the game.
          observations: observations of all agents that are present.
        """
        state, flat = None, {}
        if self._state_space is not None:
            with calling(f"{self._name}.state"):
                state = game.state()
            if np.shape(state) != self._state_space.shape:
                raise UsageError(
                    f"{self._name}: state() returned an array of shape {np.shape(state)}, but its state_space is "
                    f"{self._state_space}"
                )
        if self.wants_others:
            flat = {agent: self._flattened(agent, observation) for agent, observation in observations.items()}
        return Seen(state, flat)

    def extended(self, agent: str, observation: Any, seen: "Seen") -> Any:
        """Returns an agent's observation with the added leaves."""
        if not self._names:
            return observation
        parts = dict(observation) if isinstance(self._observed[agent], spaces.Dict) else {"observation": observation}
        if self._state_space is not None:
            parts["state"] = seen.state
        if self.wants_others:
            parts["others"] = np.concatenate([
                seen.flat.get(other, absent) for other, absent in self._absent.items() if other != agent
            ])  # fmt: skip
        if "agent" in self._names:
            parts["agent"] = self._one_hot[agent]
        return parts

    def _flattened(self, agent: str, observation: Any) -> np.ndarray:
        space = self._others[agent]
        if isinstance(space, spaces.Dict) and isinstance(observation, dict):
            observation = {key: part for key, part in observation.items() if key in space.spaces}
        try:
            flat = np.asarray(flatten(space, observation), np.float32)
        except Exception as error:
            raise UsageError(
                f"{self._name}: the observation of {agent} does not match its observation_space {space} ({error})"
            ) from error
        if flat.shape != self._flat[agent].shape:
            raise UsageError(
                f"{self._name}: the observation of {agent} has {flat.size} numbers, but its observation_space {space} "
                f"has {self._absent[agent].size}"
            )
        return flat


class Seen:
    """Values that all rows of a game share in one step.

    Args:
      state: state of the game; None if it is not requested.
      flat: flattened observations of the agents that are present.
    """

    def __init__(self, state: Any, flat: Mapping[str, np.ndarray]):
        self.state, self.flat = state, flat


def _without_mask(space: spaces.Space) -> spaces.Space:
    """Returns an observation space without the action mask at its first level."""
    if not isinstance(space, spaces.Dict):
        return space
    return spaces.Dict({key: part for key, part in space.items() if not isinstance(part, ActionMask)})


def _state_space(game: Any, name: str) -> spaces.Box:
    space = getattr(game, "state_space", None)
    if not isinstance(space, spaces.Box):
        found = "has no state_space" if space is None else f"has the state_space {space}, which is not a Box"
        raise UsageError(
            f"make_games.leaves has 'state', but {name} {found}; give the game a state_space of type Box and a method "
            "state(), or set make_games.leaves = ['others']"
        )
    return space
