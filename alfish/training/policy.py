"""A trained policy, ready to act."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.algorithms.acting import Actor
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import StepType, TimeStep
from alfish.errors import UsageError, counted, first_line
from alfish.nest import Nest
from alfish.specs import ActionMask, ActionUnits, ObservationUnits
from alfish.transforms import Transforms
from alfish.unrollers.policy_runner import PolicyRunner

# Number of calls with torch after a change of the number of rows, before the policy acts with numpy. Translation takes
# as long as some tens of calls, and a caller may change the number of rows in each call.
NUM_TORCH_CALLS = 8


class Policy:
    """A trained policy that maps observations to actions, in the environment's units.

    Args:
      algorithm, transforms: trained modules, which are only read.
      observation_space, action_space: spaces of one environment.
      env_steps: number of environment steps that the policy was trained for.

    Attributes:
      algorithm, transforms, observation_space, action_space, env_steps: the constructor's arguments.
    """

    def __init__(
        self,
        algorithm: RLAlgorithm,
        transforms: Transforms,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        env_steps: int = 0,
    ):
        self.algorithm, self.transforms, self.env_steps = algorithm, transforms, env_steps
        self.observation_space, self.action_space = observation_space, action_space
        self._actors = {sample: Actor(algorithm, transforms, sample, sets_mode=True) for sample in (False, True)}
        self._device = algorithm.progress.device
        spec = specs.observation_spec(observation_space)
        leaf_spaces = nest.leaves(specs.map_space(lambda leaf: leaf, observation_space))
        self._leaves = [
            _Leaf(name, keys, leaf_spec, ObservationUnits(space).from_environment)
            for (name, leaf_spec), keys, space in zip(
                nest.named_leaves(spec, "observation"), nest.keys(spec), leaf_spaces
            )
        ]
        self._structure = nest.flatten(spec)[1]
        self._action_spec = specs.action_spec(action_space)
        self._units = ActionUnits(action_space)
        self._batch_size = 0
        self._runners: dict[bool, PolicyRunner] = {}  # runners for `_batch_size` rows, by whether they sample
        self.reset()

    def reset(self) -> None:
        """Clears the policy's memory; in the next `act` every row begins an episode."""
        self._state = self._transform_state = self._prev_action = None

    @property
    def state(self) -> Nest:
        """State for the next call of `act`, arrays and tensors `[B, ...]`; each part is None after `reset`."""
        return {"prev_action": self._prev_action, "transforms": self._transform_state, "memory": self._state}

    def act(
        self, observation: Any, batched: bool = False, sample: bool = False, first: Any = None, reward: Any = None
    ) -> Any:
        """Returns the action for an observation.

        A leaf of a Dict or Tuple observation may be missing, or None, if the action does not depend on it.

        On a CPU, the policy acts with numpy if it can be translated (`PolicyRunner`); translation takes some
        milliseconds.

        Args:
          observation: observation of one environment; with `batched`, observations `[B, ...]` of several.
          batched: whether observation and action have a leading batch dimension `[B, ...]`.
          sample: whether to sample the action as in training; if not, the action is the mode.
          first: whether each observation is the first of an episode, `[B]` bool, or one bool for all rows. True clears
            the memory of the row. If all rows are True, their number may change. None means False; in the first call
            after `reset`, it means True.
          reward: reward of the last action, `[B]`, or a number for all rows; for vector rewards `[B, R]`, or `[R]`. It
            is not read where an episode begins. With None, `act` raises if the action depends on the reward (as with
            `PreviousStep`).

        Returns:
          The action as numpy arrays (an int for Discrete), in the action space's structure.

        Raises:
          UsageError: the action depends on a missing leaf or reward, a leaf does not have the shape of its space, or a
            value of a Discrete or MultiDiscrete leaf is outside its space.
          ValueError: the number of rows changed without a `reset`, or `first` or `reward` has the wrong shape.
        """
        time_step = self._time_step(self._read(observation, batched), first, reward)
        if self.transforms.encoders:
            stored = self.transforms.encode(nest.tensors(time_step.observation, self._device))
            time_step = time_step._replace(observation=stored)
        runner = self._runners[sample]
        runner.refresh()  # a trainer's policy shares its parameters
        step, transform_state = runner(time_step, self._transform_state, self._state)
        executed = self._units.executed(nest.arrays(step.output))
        self._state = step.state
        self._transform_state = transform_state
        self._prev_action = executed
        # A copy, because the caller may write to it.
        action = nest.map(np.array, self._units.stretch(executed))
        return action if batched else nest.map(lambda leaf: leaf[0], action)

    def _read(self, observation: Any, batched: bool) -> Nest:
        """Returns the observation `[B, ...]` in alfish's units; missing leaves are `_MissingLeaf`."""
        values = [_leaf_at(observation, leaf.keys) for leaf in self._leaves]
        sizes = [next(iter(np.shape(value)), 0) if batched else 1 for value in values if value is not None]
        if not sizes:
            raise UsageError(f"act was given none of the leaves {', '.join(leaf.name for leaf in self._leaves)}")
        leaves: list[Any] = []
        for (name, _, spec, read), value in zip(self._leaves, values):
            if value is None:
                leaves.append(_missing(name, spec, sizes[0], self._device))
                continue
            try:
                given = np.asarray(value) if batched else np.asarray(value)[None]
                rows = read(given)
            except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor that requires a gradient
                raise UsageError(
                    f"{name} is not an array of numbers ({first_line(error)}); act requires only the observation, the "
                    "first result of reset and step"
                ) from error
            _check_held(name, given, spec)
            if isinstance(spec, ActionMask):
                rows = rows.reshape(len(rows), -1)  # an environment's mask may have any shape
            if rows.shape != (sizes[0], *spec.shape):
                found, wanted = list(rows.shape), [sizes[0], *spec.shape]
                found, wanted = (found, wanted) if batched else (found[1:], wanted[1:])
                hint = "" if batched else "; with batched=True, each row is one observation"
                raise UsageError(f"{name} has shape {found}, but {wanted} is expected{hint}")
            _check_range(name, rows, spec)
            leaves.append(rows)
        return nest.unflatten(self._structure, leaves)

    def _time_step(self, observation: Nest, first: Any, reward: Any) -> TimeStep:
        size = len(nest.leaves(observation)[0])
        given = None if first is None else np.asarray(first, bool).reshape(-1)
        if given is not None and np.ndim(first) == 0:
            given = np.repeat(given, size)
        if given is not None and len(given) != size:
            raise ValueError(f"first has {len(given)} entries, but act was called with {size} observations")
        changes_size = self._prev_action is not None and size != self._batch_size
        if self._prev_action is None or (changes_size and given is not None and bool(given.all())):
            self._begin(size)
            return self._first_row._replace(observation=observation)
        if changes_size:
            raise ValueError(
                f"act was called with {counted(size, 'observation')} after {self._batch_size}; call reset() in "
                "between, or pass first=True if all of them begin an episode"
            )
        row = self._next_row._replace(observation=observation, prev_action=self._prev_action)
        if reward is not None or given is not None:
            row = row._replace(reward=self._reward(reward, np.zeros(size, bool) if given is None else given))
        if given is None:
            return row
        return row._replace(
            step_type=np.where(given, self._first_row.step_type, self._next_row.step_type),
            prev_action=nest.where(given, self._first_row.prev_action, self._prev_action),
        )

    @torch.no_grad()
    def _begin(self, size: int) -> None:
        """Begins an episode in each of `size` rows."""
        self._transform_state, self._state = self._actors[False].first_state(size)
        if size != self._batch_size:
            self._batch_size, num_torch_calls = size, NUM_TORCH_CALLS if self._runners else 0
            for sample, actor in self._actors.items():
                self._runners[sample] = PolicyRunner(actor, self._state, num_torch_calls)
            reward_spec = self.transforms.raw_reward_spec
            # Templates of the first rows of episodes, and of later rows. `act` replaces the fields that it was given.
            self._first_row = TimeStep(
                step_type=np.full(size, StepType.FIRST, np.int32),
                reward=nest.arrays(specs.zeros(reward_spec, (size,))),
                discount=np.ones(size, np.float32),
                observation=None,
                prev_action=nest.arrays(specs.zeros(self._action_spec, (size,))),
                env_id=np.arange(size, dtype=np.int32),
            )
            self._next_row = self._first_row._replace(
                step_type=np.full(size, StepType.MID, np.int32),
                reward=_missing("the reward of the last action", reward_spec, size, self._device),
            )
        for runner in self._runners.values():
            runner.initial_state = self._state

    def _reward(self, given: Any, is_first: np.ndarray) -> Any:
        """Returns rewards `[B]` or `[B, R]`: 0 where an episode begins; elsewhere a placeholder if none is given."""
        zeros = self._first_row.reward
        if is_first.all():
            return zeros
        if given is None:
            return self._next_row.reward
        shape = list(zeros.shape)
        if list(np.shape(given)) not in (shape[k:] for k in range(len(shape) + 1)):
            raise ValueError(f"reward has shape {list(np.shape(given))}, but {shape} is expected")
        reward = torch.as_tensor(given, dtype=torch.float32, device="cpu").numpy()
        return np.where(nest.widened(is_first, zeros), zeros, reward)


class _Leaf(NamedTuple):
    """A leaf of the observation.

    Attributes:
      name: name of the leaf, for messages.
      keys: path of the leaf in the observation.
      spec: spec of the leaf in alfish's units.
      read: function that converts values of the leaf from the environment's units to alfish's units.
    """

    name: str
    keys: tuple[Any, ...]
    spec: Any
    read: Callable[[np.ndarray], np.ndarray]


def _check_held(name: str, rows: np.ndarray, spec: spaces.Space) -> None:
    """Raises UsageError if the integer or bool dtype of a leaf cannot hold the given values, such as 0.5 in uint8."""
    assert spec.dtype is not None
    if spec.dtype.kind not in "biu" or rows.dtype == spec.dtype:
        return
    with np.errstate(invalid="ignore"):
        lost = rows.astype(spec.dtype) != rows
    if lost.any():
        raise UsageError(
            f"{name} has the value {rows[lost][0]}, but its dtype is {spec.dtype}; act requires observations as the "
            "environment returns them"
        )


def _check_range(name: str, rows: np.ndarray, spec: spaces.Space) -> None:
    """Raises UsageError if a float is not finite, or a (Multi)Discrete value, counted from 0, is outside its space."""
    if rows.dtype.kind == "f":
        # One call checks all entries.
        if not -math.inf < np.add.reduce(rows, axis=None, dtype=np.float64) < math.inf:
            raise UsageError(f"{name} has a value that is not finite; the action would be meaningless")
        return
    if not isinstance(spec, (spaces.Discrete, spaces.MultiDiscrete)):
        return
    sizes = spec.n if isinstance(spec, spaces.Discrete) else spec.nvec
    if ((rows < 0) | (rows >= sizes)).any():
        raise UsageError(f"{name} has a value outside its space of {sizes} values")


def _leaf_at(observation: Any, keys: Sequence[Any]) -> Any:
    """Returns the leaf at a path of keys and positions; None if there is no such leaf."""
    for key in keys:
        if isinstance(observation, Mapping):
            observation = observation.get(key)
        elif isinstance(observation, (tuple, list)) and isinstance(key, int) and key < len(observation):
            observation = observation[key]
        else:
            return None
    return observation


class _MissingLeaf(torch.Tensor):
    """Zeros in place of a missing leaf.

    Results of computations with a missing leaf have this type too, so hooks and transforms run as usual. Reading the
    values of such a result raises, for example when an action becomes an array.

    Attributes:
      missing: names of the missing leaves on which the tensor depends. The name `names` is taken: all tensors have it.
    """

    missing: frozenset[str]

    def __deepcopy__(self, memo: Any) -> "_MissingLeaf":
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        zeros = torch.zeros(tuple(self.shape), dtype=self.dtype, device=self.device)
        return _as_missing, (zeros, self.missing)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [one for one in nest.leaves((args, kwargs)) if isinstance(one, cls)]
        name = getattr(func, "__name__", "")
        # Writing into a plain tensor raises, because a plain tensor cannot record the dependence.
        writes = _WRITES.fullmatch(name) and not isinstance(args[0], cls)
        if name in _LOOKS_AT_VALUES or writes:
            missing = sorted(frozenset().union(*(one.missing for one in inputs)))
            raise UsageError(f"the policy's action depends on {' and '.join(missing)}, which was not given")
        result = super().__torch_function__(func, types, args, kwargs or {})
        names = frozenset().union(*(one.missing for one in inputs))
        for leaf in nest.leaves((result,)):
            if isinstance(leaf, cls):
                leaf.missing = names
        return result


_LOOKS_AT_VALUES = {
    "__array__",
    "__bool__",
    "__contains__",
    "__float__",
    "__index__",
    "__int__",
    "allclose",
    "equal",
    "is_nonzero",
    "item",
    "numpy",
    "tolist",
}
_WRITES = re.compile(r"__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor)__|(?!_)\w*[a-z0-9]_")


def _missing(name: str, spec: spaces.Space, size: int, device: torch.device) -> torch.Tensor:
    return _as_missing(specs.zeros(spec, (size,), device), frozenset([name]))


def _as_missing(zeros: torch.Tensor, missing: frozenset[str]) -> torch.Tensor:
    leaf = zeros.as_subclass(_MissingLeaf)
    leaf.missing = missing
    return leaf


def completed(time_step: TimeStep, observation_spec: Nest) -> TimeStep:
    """Returns rows with every leaf of `observation_spec`.

    A missing leaf becomes a placeholder, which raises if an action depends on it.

    Args:
      time_step: rows `[B]`.
      observation_spec: spec of the observations that the policy was trained on.
    """
    given = dict(zip(nest.keys(time_step.observation), nest.leaves(time_step.observation)))
    size, device = len(time_step.step_type), time_step.step_type.device
    names = nest.named_leaves(observation_spec, "observation")
    leaves = [
        given[keys] if keys in given else _missing(name, spec, size, device)
        for keys, (name, spec) in zip(nest.keys(observation_spec), names)
    ]
    return time_step._replace(observation=nest.unflatten(nest.flatten(observation_spec)[1], leaves))
