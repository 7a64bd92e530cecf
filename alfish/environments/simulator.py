"""The interface of vectorised simulators, and the conversion to the stream of time steps.

A simulator steps B environments as tensors and resets an environment in the step in which its episode ends. For each
library, a subclass of `Simulator` returns the results of a step as a `SimulatorStep`; `SimulatorEnvironment` converts
this object to rows.
"""

import abc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.data import StepType, TimeStep
from alfish.environments.environment import Environment
from alfish.environments.masked_observation import marked
from alfish.environments.objectives import declared, named
from alfish.environments.sequential import close
from alfish.errors import UsageError
from alfish.errors.user_code import calling, refuse
from alfish.nest import Nest
from alfish.runs import random_state
from alfish.runs.checkpoint_file import check_loadable
from alfish.specs import ActionUnits, ObservationUnits


class SimulatorStep(NamedTuple):
    """The result of a simulator's step, tensors on its device.

    The simulator may modify these tensors later. Flags may be numbers. Rewards and flags may have the shape `[B, 1]`.
    """

    observation: Nest  # [B, ...] next observation; where an episode ended, the first one of the next episode
    reward: torch.Tensor  # [B], or [B, R] for vector rewards
    terminated: torch.Tensor  # [B] bool
    truncated: torch.Tensor  # [B] bool; ignored where terminated
    # [B, ...] final observations; ignored where no episode ended; None if no episode ended, or if they are lost
    final_observation: Nest = None
    log: Mapping[str, Any] | None = None  # scalars of the episodes that ended in this step; None means no scalars


class Simulator(abc.ABC):
    """B environments of a simulator, which are reset in the step in which an episode ends.

    Attributes:
      num_envs: number of environments, B.
      device: device of all tensors.
      observation_space, action_space: gymnasium's spaces of one environment.
      reward_space: Box of shape (R,) for vector rewards; None means scalar rewards.
      only_one: True if a process can hold only one such simulator.
    """

    num_envs: int
    device: torch.device
    observation_space: spaces.Space
    action_space: spaces.Space
    reward_space: spaces.Box | None = None
    only_one = False

    @abc.abstractmethod
    def reset(self, seed: int | None) -> Nest:
        """Resets all environments; returns observations `[B, ...]`.

        Args:
          seed: seed of the random generators; None means that they continue.
        """

    @abc.abstractmethod
    def step(self, action: Nest) -> SimulatorStep:
        """Executes actions `[B, ...]` in the units of `action_space`; the caller does not modify them later."""

    def state_dict(self) -> dict[str, Any]:
        """Returns a state from which episodes continue exactly; if this is impossible, only counters, or {}."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restores a result of `state_dict`; called after a reset.

        Returns:
          True if the episodes continue, False if new episodes begin.
        """
        return False

    def spread_first_episodes(self) -> None:
        """Sets the elapsed times of the episodes after a reset to random values, so that they end at different times.

        Default: does nothing.
        """

    def close(self) -> None:
        """Closes the simulator. Default: does nothing."""


_OPEN: weakref.WeakSet[Simulator] = weakref.WeakSet()  # open simulators that are `only_one`


class SimulatorEnvironment(Environment):
    """Converts the steps of a `Simulator` to the stream of time steps.

    Tensors from the simulator are copied, because it may modify them later. No step waits for the device.

    Args:
      simulator: simulator to step.
      seed: seed of the first reset.
      action_mask: leaf of the observation that is an action mask, 'observation:LEAF'; None means no mask.
      rewards: names of the entries of a vector reward; None means the names in `reward_space`, or the indices of the
        entries if there are no names.
      final_observation: treatment of a truncation without a final observation. 'given' raises UsageError. 'drop' does
        not train on the time step before the truncation; returns bootstrap from the observation of that time step.
        'before' uses that observation as the final observation, as rsl_rl does, for comparisons. Terminations need no
        final observation.
      spread: whether first episodes begin with random elapsed times (`Simulator.spread_first_episodes`), also after a
        resume.

    Attributes:
      simulator, env: the simulator.
      device: device of all tensors.

    Raises:
      UsageError: a space is not supported. The first reset or step raises it if the simulator does not return the
        structure, shape or device that it declares; an unroll raises it if a final observation is lost with 'given'.
    """

    env: Any
    uneven = True
    _state_method = "state_dict"

    def __init__(
        self,
        simulator: Simulator,
        seed: int,
        action_mask: str | None = None,
        rewards: Sequence[str] | None = None,
        final_observation: Literal["given", "drop", "before"] = "given",
        spread: bool = False,
    ):
        observed = simulator.observation_space
        observed = observed if action_mask is None else marked(observed, action_mask)
        super().__init__(simulator.num_envs, observed, simulator.action_space, named(declared(simulator), rewards))
        self.name = type(simulator).__name__
        self.simulator = self.env = simulator
        self.device = device = torch.device(simulator.device)
        self.env_id = torch.from_numpy(self.env_id).to(device)
        self._final, self._spreads = final_observation, spread
        self._seed: int | None = seed
        self._units = ActionUnits(simulator.action_space, device)
        self._observed = ObservationUnits(observed, device)
        self._resets: tuple[torch.Tensor, TimeStep] | None = None
        self._blank = TimeStep(  # FIRST rows, without observations yet
            step_type=torch.full((self.num_envs,), StepType.FIRST, dtype=torch.int32, device=device),
            reward=torch.zeros(self.num_envs, *self.reward_spec.shape, device=device),
            discount=torch.ones(self.num_envs, device=device),
            observation=None,
            prev_action=specs.zeros(self.action_spec, (self.num_envs,), device),
            env_id=self.env_id,
        )
        self._before: Nest = None  # observation before the step, for `final_observation` 'before'
        self._restart = self._abandoned = False
        self._unchecked = {"step", "final_observation"}  # parts of a step's result that have not been checked yet
        self.only_one = simulator.only_one
        if self.only_one:
            _OPEN.add(simulator)

    def reset(self, seeds: Sequence[int | None] | None = None, rows: np.ndarray | None = None) -> TimeStep:
        """Resets all environments. Only evaluations pass seeds; their first episodes are not spread."""
        if seeds is not None:
            return self._reset(seeds[0], spreads=False)
        seed, self._seed = self._seed, None
        first = self._reset(seed, spreads=seed is not None)
        if seed is not None:
            check_loadable(self._simulator_state(), f"{self.name}.{self._state_method}()")
        return first

    def _reset(self, seed: int | None, spreads: bool) -> TimeStep:
        with calling(f"{self.name}.reset"):
            observation = self.simulator.reset(seed)
            if self._spreads and spreads:
                self.simulator.spread_first_episodes()
        self._check_observation(observation, self.observation_space, "observation")
        self._observed.check_kinds(observation, self.name)
        self._restart = False
        self._resets = None
        self.infos = {}
        self._before = nest.map(_copy, self._observed.from_environment(observation))
        self._check_masks(self._before)
        return self._blank._replace(observation=self._before)

    def step(self, action: Nest) -> TimeStep:
        if self._restart:
            # Seeds come from a generator that the run restores, so that a resumed run does not repeat its first
            # episodes.
            return self._reset(random_state.draw_seeds(1)[0], spreads=True)
        executed = self._units.executed(action)
        handed = nest.map(_apart, self._units.stretch(executed), executed)
        try:
            step = self.simulator.step(handed)
        except BaseException as error:
            refuse(error, f"{self.name}.step")
            raise
        if self._unchecked and ("step" in self._unchecked or step.final_observation is not None):
            self._check_step(step)
        self.infos = {} if step.log is None else step.log  # type: ignore[assignment]
        # No operation reads a tensor's value, because reading would wait for the device.
        terminated, truncated = (flag.reshape(self.num_envs).to(torch.bool) for flag in step[2:4])
        reward = step.reward.reshape(self._blank.reward.shape).to(torch.float32)
        return self._rows(step._replace(reward=reward, terminated=terminated, truncated=truncated), executed)

    def convert(self, rows: Nest) -> Nest:
        return nest.tensors(rows, self.device)

    def take_resets(self) -> tuple[torch.Tensor, TimeStep] | None:
        resets, self._resets = self._resets, None
        return resets

    def judge(self, sign: float) -> None:
        if sign > 0:
            raise UsageError(
                f"{self.name} truncated {int(sign)} episodes without returning final observations, so returns cannot "
                "bootstrap from them; let the simulator return them, or set make_environment.final_observation = 'drop'"
            )

    def methods(self, name: str) -> list[Callable[..., Any]]:
        method = getattr(self.env, name, None)
        return [] if method is None else [method]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the simulator, if it has one; an empty dict after `abandon`."""
        state = None if self._abandoned else self._simulator_state()
        if state is None:
            return {}
        return {"env": state, **({"before": self._before} if self._final == "before" else {})}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        self._restart = True
        if "env" in state:
            self._reset(self._seed, spreads=False)
            with calling(f"{self.name}.load_state_dict"):
                self._restart = not self.simulator.load_state_dict(state["env"])
        if "before" in state and not self._restart:
            self._before = self.convert(state["before"])
        return not self._restart

    def abandon(self) -> None:
        self._abandoned = True
        super().abandon()

    def close(self) -> None:
        _OPEN.discard(self.simulator)
        close(self.simulator)

    def _rows(self, step: SimulatorStep, executed: Nest) -> TimeStep:
        """Returns the LAST and MID rows of `step`, whose flags are bools; stores the FIRST rows for `take_resets`."""
        begun = nest.map(_copy, self._observed.from_environment(step.observation))
        done, truncated = step.terminated | step.truncated, step.truncated & ~step.terminated
        self._resets, observation, self.lost = (done, self._blank._replace(observation=begun)), begun, None
        if step.final_observation is not None:
            observation = nest.where(done, self._observed.from_environment(step.final_observation), begun)
        elif self._final == "drop":
            self.lost = truncated
        elif self._final == "before":
            observation = nest.where(truncated, self._before, begun)
        else:
            count = truncated.sum()
            self.sign = count if self.sign is None else self.sign + count
        self._before = begun
        return TimeStep(
            step_type=torch.where(done, StepType.LAST, StepType.MID).to(torch.int32),
            reward=_copy(step.reward),
            discount=(~step.terminated).to(torch.float32),
            observation=observation,
            prev_action=executed,
            env_id=self.env_id,
        )

    def _simulator_state(self) -> Nest:
        """Returns the simulator's state; None if it has none."""
        with calling(f"{self.name}.{self._state_method}"):
            state = self.simulator.state_dict()
        return None if isinstance(state, dict) and not state else state

    def _check_step(self, step: SimulatorStep) -> None:
        """Raises UsageError if a step's result cannot be converted; called until a final observation was checked."""
        if not isinstance(step, SimulatorStep):
            raise UsageError(f"{self.name}.step returned {type(step).__name__}; it must be alfish's SimulatorStep")
        flags, rewards = (self.num_envs,), (self.num_envs, *self.reward_spec.shape)
        for name, shape in (("reward", rewards), ("terminated", flags), ("truncated", flags)):
            value = getattr(step, name)
            self._check_tensor(value, name, "step")
            if tuple(value.shape) != shape and (tuple(value.shape) != (*shape, 1) or len(shape) > 1):
                raise UsageError(
                    f"{self.name}.step returned {name} of shape {tuple(value.shape)}; with {self.num_envs} "
                    f"environments it must be {shape}"
                )
        for name in ("observation", "final_observation"):
            observation = getattr(step, name)
            if observation is not None:
                self._check_observation(observation, self.observation_space, name, "step")
        self._unchecked -= {"step"} if step.final_observation is None else {"step", "final_observation"}

    def _check_observation(self, value: Any, space: spaces.Space, name: str, method: str = "reset") -> None:
        """Raises UsageError if a part of an observation is missing or does not have the declared device and shape."""
        if isinstance(space, (spaces.Dict, spaces.Tuple)):
            parts = space.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
            for key, child in parts:
                try:
                    part = value[key]
                except (LookupError, TypeError):
                    names = ", ".join(map(str, value)) if isinstance(value, Mapping) else None
                    has = "" if names is None else f", which has {names}" if names else ", which is empty"
                    raise UsageError(
                        f"{self.name}.{method} returned no {key!r} in {name}{has}, although the space declares it: "
                        f"{space}"
                    ) from None
                self._check_observation(part, child, f"{name}.{key}", method)
            return
        self._check_tensor(value, name, method)
        shape = (self.num_envs, *specs.observation_spec(space).shape)
        if tuple(value.shape) != shape:
            raise UsageError(
                f"{self.name}.{method} returned {name} of shape {tuple(value.shape)}; with {self.num_envs} "
                f"environments and the space {space} it must be {shape}"
            )

    def _check_tensor(self, value: Any, name: str, method: str) -> None:
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{self.name}.{method} returned {name} as {type(value).__name__}; its attribute `device` promises "
                f"tensors on {self.device}"
            )
        if value.device.type != self.device.type or self.device.index not in (None, value.device.index):
            raise UsageError(
                f"{self.name}.{method} returned {name} on {value.device}, but its attribute `device` is {self.device}; "
                "return all tensors on this device, or correct the attribute"
            )


def refuse_second(make: Callable[..., Any]) -> None:
    """Raises UsageError if the process already has a simulator of a class that allows only one."""
    kind: Any = getattr(make, "func", make)  # `func` of a partial is the class
    if getattr(kind, "only_one", False) and any(isinstance(simulator, kind) for simulator in _OPEN):
        raise UsageError(
            f"{kind.__name__} is used a second time, but a process can hold only one such simulator; close the first "
            "one, or evaluate in another process: `alfish evaluate`"
        )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _apart(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous `tensor`; a copy if it begins at the same memory address as `other`."""
    return _copy(tensor) if tensor.data_ptr() == other.data_ptr() else tensor.contiguous()
