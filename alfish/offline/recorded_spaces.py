"""Spaces of recorded data: comparison with an environment's spaces, and storage in files."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from alfish import specs
from alfish.environments import make_environment
from alfish.errors import UsageError, printable


class Spaces(NamedTuple):
    """gymnasium's spaces of one environment; None if unknown."""

    observation: spaces.Space | None = None
    action: spaces.Space | None = None


NO_SPACES = Spaces()
MAX_SIZE = 2**25  # maximum total number of entries of the Boxes in a space

MAX_WORDS = 500  # maximum number of characters of a space in a message


class TrainedSpaces(NamedTuple):
    """Spaces of the environment in which a run was trained, as stored in its checkpoints."""

    observation: spaces.Space
    action: spaces.Space
    reward: spaces.Box  # see `specs.reward_spec`

    def to_json(self) -> dict[str, Any]:
        """Returns the spaces in JSON's types, see `spaces_by_policy`."""
        spaces = {"observation": to_json(self.observation), "action": to_json(self.action)}
        named = {"reward_names": list(specs.reward_names(self.reward))} if self.reward.shape else {}
        return {**spaces, "reward_shape": list(self.reward.shape), **named}


def spaces_by_policy(state: Mapping[str, Any]) -> dict[str, TrainedSpaces | None]:
    """Returns the spaces in which the policies of a run were trained, by policy name.

    Args:
      state: state of a checkpoint of the run, see `Trainer.state_dict`.

    Returns:
      A dict; the only policy of a run has the name ''. Older checkpoints do not store spaces; their value is None.

    Raises:
      Exception: the state does not come from `Trainer.state_dict`; `Checkpoints.load` then names the file.
    """
    if (stored := state.get("spaces")) is None:
        return {"": None}
    by_policy = stored.get("policies", {"": stored})
    return {name: _from_stored(own) for name, own in by_policy.items()}


def changed_actions(state: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns a clause about actions whose units have changed since a checkpoint was saved; '' without a change.

    Args:
      state: state of the checkpoint.
      now: spaces of the environment now, in the form of `state["spaces"]`.
    """
    here = spaces_by_policy({"spaces": now})
    for name, then in spaces_by_policy(state).items():
        own = here.get(name)
        if then is not None and own is not None and not _actions_fit(then.action, own.action):
            whose = f" of {name}" if name else ""
            return (
                f"the environment has the actions {_shown(own.action)}{whose}, but the policy was trained with "
                f"{_shown(then.action)}"
            )
    return ""


def _from_stored(stored: Mapping[str, Any]) -> TrainedSpaces:
    """Returns the spaces that `TrainedSpaces.to_json` stored."""
    observation, action = (from_json(stored[name]) for name in ("observation", "action"))
    if observation is None or action is None:
        raise ValueError("a space is missing")
    entries = stored.get("reward_names", *stored["reward_shape"])  # older checkpoints store no names
    return TrainedSpaces(observation, action, specs.reward_spec(entries))


def spaces_of(env_id: Any, env_kwargs: dict[str, Any] | None = None) -> tuple[Spaces, spaces.Box]:
    """Returns the spaces of the environment that `make_environment` builds, and the space of its reward.

    Raises:
      UsageError: `make_environment` raised it.
    """
    environment = make_environment(env_id, env_kwargs=env_kwargs, evaluation=True)
    environment.close()
    return Spaces(environment.observation_space, environment.action_space), environment.reward_spec


def check_rewards(found: int, wanted: int, name: str) -> None:
    """Checks that rewards have as many entries as the environment's rewards; 0 means a scalar.

    Raises:
      UsageError: the numbers of entries are not equal; the message gives both numbers, and names the data.
    """
    if found != wanted:
        has, needs = (f"have {size} entries" if size else "are scalars" for size in (found, wanted))
        raise UsageError(
            f"the rewards of {name} {has}, but the environment's rewards {needs}; give the environment that the data "
            "were recorded in, and its make_environment.rewards"
        )


def check_fit(data: Spaces, environment: Spaces, name: str, whose: str = "the environment's") -> None:
    """Checks that data can be used as data of the environment without conversion.

    Observations may differ in their bounds, and may be float32 or float64, because algorithms see neither bounds nor
    float64. Bounds of actions must be equal, because they define the units. The data may lack the environment's action
    mask.

    Args:
      data: spaces of the data, called `name` in messages; None fits every space.
      environment: spaces of the environment, called `whose` in messages; None fits every space.

    Raises:
      UsageError: the data do not fit; the message names both spaces.
    """
    for kind, there, here, fits in (
        ("observations", data.observation, environment.observation, _observations_fit),
        ("actions", data.action, environment.action, _actions_fit),
    ):
        if there is not None and here is not None and not fits(there, here):
            raise UsageError(
                f"the {kind} of {name} are {_shown(there)}, but {whose} are {_shown(here)}; give the environment that "
                "the data were recorded in, with the same wrappers"
            )


def differences(data: Spaces, environment: Spaces) -> list[str]:
    """Returns sentences about differences that `check_fit` allows, each with both spaces."""
    return [
        f"the {kind} are declared as {_shown(there)}, but the environment's are {_shown(here)}"
        for kind, there, here in zip(("observations", "actions"), data, environment)
        if there is not None and here is not None and not any(_same(there, form) for form in (here, *unmasked(here)))
    ]


def _shown(space: spaces.Space) -> str:
    """Returns the text of a space for a message, shortened."""
    words = printable(str(space))
    return words if len(words) <= MAX_WORDS else f"{words[:MAX_WORDS]}..."


def to_json(space: spaces.Space | None) -> Any:
    """Returns a space in JSON's types without loss; `from_json` is the inverse."""
    if space is None:
        return None
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "spaces": {key: to_json(child) for key, child in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "spaces": [to_json(child) for child in space.spaces]}
    if isinstance(space, spaces.Box):
        low, high = (_bound_to_json(bound) for bound in (space.low, space.high))
        return {"type": "Box", "low": low, "high": high, "shape": list(space.shape), "dtype": str(space.dtype)}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)}
    if isinstance(space, spaces.MultiDiscrete):
        nvec, start = space.nvec.tolist(), space.start.tolist()
        return {"type": "MultiDiscrete", "nvec": nvec, "start": start, "dtype": str(space.dtype)}
    if isinstance(space, specs.ActionMask):
        return {"type": "ActionMask", "n": space.n}
    assert isinstance(space, spaces.MultiBinary), f"{space} is not a space that alfish supports"
    return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else [int(size) for size in space.n]}


def from_json(value: Any) -> spaces.Space | None:
    """Returns the space that `to_json` converted.

    Raises:
      KeyError, TypeError, ValueError: the value is not a result of `to_json`,
        or its Boxes have more than `MAX_SIZE` entries.
    """
    if value is None:
        return None
    if _size(value) > MAX_SIZE:
        raise ValueError(f"a space of {_size(value):,} numbers is not supported")
    kind = value["type"]
    if kind == "Dict":
        return spaces.Dict({key: from_json(child) for key, child in value["spaces"].items()})  # type: ignore[misc]
    if kind == "Tuple":
        return spaces.Tuple([from_json(child) for child in value["spaces"]])  # type: ignore[misc]
    if kind == "Box":
        dtype, shape = np.dtype(value["dtype"]), tuple(value["shape"])
        if dtype.kind not in "biuf":
            raise ValueError(f"a Box of shape {shape} and {dtype} is not supported")
        low, high = (
            np.broadcast_to(np.vectorize(_number(dtype), otypes=[dtype])(np.array(value[end], object)), shape)
            for end in ("low", "high")
        )
        return spaces.Box(low.copy(), high.copy(), shape, dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(value["n"], start=value["start"], **_integers(value))
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(np.array(value["nvec"]), start=np.array(value["start"]), **_integers(value))
    if kind == "MultiBinary":
        return spaces.MultiBinary(value["n"])
    if kind == "ActionMask":
        return specs.ActionMask(value["n"])
    raise ValueError(f"{kind!r} is not a space")


def _size(value: Any) -> int:
    """Returns the total number of entries in all Boxes of a space in JSON's types."""
    if value["type"] == "Box":
        return math.prod(value["shape"])
    parts = value.get("spaces", ())
    return sum(map(_size, parts.values() if isinstance(parts, dict) else parts))


def _integers(value: Any) -> dict[str, Any]:
    """Returns the keyword argument `dtype` of a space of integers in JSON's types; {} for int64, the default."""
    dtype = np.dtype(value.get("dtype", "int64"))  # older files have no dtype
    if dtype.kind not in "iu":
        raise ValueError(f"{value['type']} of {dtype} is not a space of integers")
    return {} if dtype == np.int64 else {"dtype": dtype.type}  # in gymnasium 1.1, Discrete does not take a dtype


def _number(dtype: np.dtype) -> Any:
    return float if dtype.kind == "f" else int  # floats are stored as text, because JSON has no infinity


def _bound_to_json(bound: np.ndarray) -> Any:
    """Returns a bound in JSON's types; one number if all entries are equal, because images have many entries."""
    if bound.size and (bound == bound.flat[0]).all():
        bound = bound.flat[0].reshape(())
    return bound.astype(str).tolist() if bound.dtype.kind == "f" else bound.astype(int).tolist()


def unmasked(space: spaces.Space) -> list[spaces.Space]:
    """Returns the possible spaces of observations without the action mask; [] if there is no mask."""
    if not isinstance(space, spaces.Dict):
        return []
    rest = {key: child for key, child in space.spaces.items() if not isinstance(child, specs.ActionMask)}
    if len(rest) < len(space.spaces):
        bare = [rest["observation"]] if rest.keys() == {"observation"} else []
        return [spaces.Dict(rest), *bare]
    return [spaces.Dict({**rest, key: form}) for key, child in rest.items() for form in unmasked(child)]


def _observations_fit(there: spaces.Space, here: spaces.Space) -> bool:
    return _same_observations(there, here) or any(_same_observations(there, form) for form in unmasked(here))


def _same_observations(there: spaces.Space, here: spaces.Space) -> bool:
    if isinstance(there, spaces.Box) and isinstance(here, spaces.Box):
        # Compares the shapes and dtypes that algorithms see; float64 counts as float32.
        one, other = specs.observation_spec(there), specs.observation_spec(here)
        return one.shape == other.shape and one.dtype == other.dtype
    return _fit(there, here, _same_observations)


def _actions_fit(there: spaces.Space, here: spaces.Space) -> bool:
    if isinstance(there, spaces.Box) and isinstance(here, spaces.Box):
        # An integer Box does not fit a float Box: its bounds are widened by 0.5 before scaling, see `ActionUnits`.
        if there.shape != here.shape or (there.dtype.kind == "f") != (here.dtype.kind == "f"):
            return False
        there, here = specs.without_vast_bounds(there), specs.without_vast_bounds(here)
        return np.allclose(there.low, here.low) and np.allclose(there.high, here.high)
    return _fit(there, here, _actions_fit)


def _fit(there: spaces.Space, here: spaces.Space, fit: Any) -> bool:
    if isinstance(there, spaces.Dict) and isinstance(here, spaces.Dict):
        return there.spaces.keys() == here.spaces.keys() and all(
            fit(child, here.spaces[key]) for key, child in there.spaces.items()
        )
    if isinstance(there, spaces.Tuple) and isinstance(here, spaces.Tuple):
        return len(there.spaces) == len(here.spaces) and all(map(fit, there.spaces, here.spaces))
    if isinstance(there, spaces.Discrete) and isinstance(here, spaces.Discrete):
        return (there.n, there.start) == (here.n, here.start)  # the stream is int64, whatever the spaces' dtypes are
    if isinstance(there, spaces.MultiDiscrete) and isinstance(here, spaces.MultiDiscrete):
        return np.array_equal(there.nvec, here.nvec) and np.array_equal(there.start, here.start)
    return there == here


def _same(there: spaces.Space, here: spaces.Space) -> bool:
    """Returns whether two spaces are equal; dtypes of integers are ignored."""
    return _fit(there, here, _same)
