"""Converts functional environments to the stream of time steps."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.experimental.functional import FuncEnv

from alfish import nest, specs
from alfish.data import StepType, TimeStep
from alfish.environments.environment import Environment
from alfish.environments.functional.advance import (
    advance,
    begin,
    max_episode_steps,
    num_draws,
    tensors_of,
    with_tensors,
)
from alfish.environments.functional.validation import check_class, check_methods
from alfish.environments.masked_observation import marked
from alfish.environments.objectives import declared, named
from alfish.errors import UsageError
from alfish.errors.user_code import refuse
from alfish.nest import Nest
from alfish.runs import random_state
from alfish.specs import ActionUnits, ObservationUnits

BLOCK = 32  # number of steps for which `SeparateNumbers` draws at once


class FunctionalEnvironment(Environment):
    """B copies of a functional environment that step together, see `alfish.environments.functional`.

    For training, one generator draws the numbers of all environments, and a finished environment begins its next
    episode in the same step (`uneven`). For evaluation, each environment has a separate generator, and the evaluator
    resets it after each episode. The episode of a seed therefore does not depend on the number of environments.

    Args:
      functional: functional environment; its tensors are moved to `device`.
      seeds: one seed per environment. For training only the first seed is used.
      device: device of all tensors.
      evaluation: whether environments are reset and seeded one by one.
      action_mask: leaf of the observation that is an action mask, 'observation:LEAF'; None means no mask.
      rewards: names of the entries of a vector reward; None means the names in `reward_space`, or the indices of the
        entries if there are no names.
      env_spec: specification in gymnasium's registry; None means a new specification with the environment's time limit.

    Attributes:
      functional: functional environment on `device`.
      state: current state, leaves `[B, ...]`; None before the first reset.
      clock: number of steps taken in each current episode, `[B]` int32.
      observation: observation from which the policy acts next, in the environment's units.
      device: device of all tensors.

    Raises:
      UsageError: a space or an attribute of the class cannot be used. The first reset raises it if a method does not
        return the structure, shape, dtype or device that alfish requires, or if it writes to its arguments.
    """

    state: Nest
    clock: torch.Tensor
    observation: Nest

    def __init__(
        self,
        functional: FuncEnv,
        seeds: Sequence[int],
        device: torch.device | str = "cpu",
        evaluation: bool = False,
        action_mask: str | None = None,
        rewards: Sequence[str] | None = None,
        env_spec: EnvSpec | None = None,
    ):
        name = type(functional).__name__
        check_class(functional, name)
        self.device = torch.empty(0, device=device).device  # the device has an index, as in cuda:0
        self.functional = with_tensors(functional, nest.to(tensors_of(functional), self.device))
        observed = functional.observation_space
        observed = observed if action_mask is None else marked(observed, action_mask)
        super().__init__(len(seeds), observed, functional.action_space, named(declared(functional), rewards))
        self.name, self.stepping = name, "in tensors"
        self.env_spec = env_spec or EnvSpec(id=name, max_episode_steps=max_episode_steps(functional))
        self.env_id = torch.from_numpy(self.env_id).to(self.device)
        self.uneven = not evaluation
        self.resets_rows = evaluation
        self.seeds_rows = evaluation
        self.state = None
        self._units = ActionUnits(self.action_space, self.device)
        self._observed = ObservationUnits(observed, self.device)
        kind = SeparateNumbers if evaluation else _SharedNumbers
        self._numbers = kind(seeds, num_draws(functional), self.device)
        self._resets: tuple[torch.Tensor, TimeStep] | None = None
        self._blank = TimeStep(  # FIRST rows, without observations yet
            step_type=torch.full((self.num_envs,), StepType.FIRST, dtype=torch.int32, device=self.device),
            reward=torch.zeros(self.num_envs, *self.reward_spec.shape, device=self.device),
            discount=torch.ones(self.num_envs, device=self.device),
            observation=None,
            prev_action=specs.zeros(self.action_spec, (self.num_envs,), self.device),
            env_id=self.env_id,
        )

    def reset(self, seeds: Sequence[int | None] | None = None, rows: np.ndarray | None = None) -> TimeStep:
        if self.state is None:
            check_methods(self.functional, type(self.functional).__name__, self.num_envs, self.device)
        self._numbers.seed(seeds, rows)
        begun = self._call(begin, self._numbers.draw(1, rows)[0])
        if rows is not None:
            begun = nest.where(
                torch.from_numpy(rows).to(self.device), begun, (self.state, self.clock, self.observation)
            )
        self.state, self.clock, self.observation = begun
        self._resets = None
        first = self._blank._replace(observation=self._observed.from_environment(self.observation))
        self._check_masks(first.observation)
        return first

    def step(self, action: Nest) -> TimeStep:
        try:
            with torch.no_grad():
                episodes, last, ended, first = self.advanced(self.tensors(), self.episodes, action, self.draw(1)[0])
        except BaseException as error:
            refuse(error, self.name)
            raise
        self.episodes = episodes
        self._resets = (ended, first) if self.uneven else None
        return last

    @property
    def episodes(self) -> tuple[Nest, torch.Tensor, Nest]:
        """State, clock and observation of the current episodes."""
        return self.state, self.clock, self.observation

    @episodes.setter
    def episodes(self, episodes: tuple[Nest, torch.Tensor, Nest]) -> None:
        self.state, self.clock, self.observation = episodes

    def tensors(self) -> Nest:
        """Returns the argument `tensors` of `advanced`: all tensors that it reads besides its other arguments."""
        return tensors_of(self.functional), self._units.tensors(), self._observed.tensors(), self._blank

    def advanced(
        self, tensors: Nest, episodes: Nest, action: Nest, u: torch.Tensor
    ) -> tuple[Nest, TimeStep, torch.Tensor, TimeStep]:
        """Computes a vector step as a pure function of tensors, which can be traced into a graph.

        Args:
          tensors: result of the method `tensors`.
          episodes: states, clocks and observations, as in the attribute `episodes`.
          action: actions `[B, ...]` in the algorithm's units.
          u: random numbers of the step, `[B, n]`: one row of a result of `draw`.

        Returns:
          The episodes after the step; the LAST or MID rows `[B]`; the mask `[B]` bool of the episodes that ended; and
          the FIRST rows `[B]`, valid where this mask is True.
        """
        of_functional, of_units, of_observed, blank = tensors
        units = self._units.with_tensors(of_units) if any(of_units) else self._units
        observed = self._observed.with_tensors(of_observed) if of_observed else self._observed
        executed = units.executed(action)
        functional, (state, clock, _) = with_tensors(self.functional, of_functional), episodes
        stepped = advance(functional, state, clock, units.stretch(executed), u)
        ended = stepped.terminated | stepped.truncated
        # No operation reads a tensor's value, because reading would wait for the device.
        last = TimeStep(
            step_type=torch.where(ended, StepType.LAST, StepType.MID).to(torch.int32),
            reward=stepped.reward.to(torch.float32),
            discount=(~stepped.terminated).to(torch.float32),
            observation=observed.from_environment(stepped.final_observation),
            prev_action=executed,
            env_id=blank.env_id,
        )
        first = blank._replace(observation=observed.from_environment(stepped.observation))
        return stepped[:3], last, ended, first

    def draw(self, num_steps: int) -> torch.Tensor:
        """Draws the random numbers of the next vector steps, `[num_steps, B, num_draws(functional)]` in [0, 1).

        On a CPU the numbers do not depend on how many steps are drawn at once.
        """
        return self._numbers.draw(num_steps)

    def convert(self, rows: Nest) -> Nest:
        return nest.tensors(rows, self.device)

    def method(self, name: str) -> Callable[..., Any] | None:
        return getattr(self.functional, name, None)

    def take_resets(self) -> tuple[torch.Tensor, TimeStep] | None:
        resets, self._resets = self._resets, None
        return resets

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the episodes and the generators; an empty dict before the first reset."""
        if self.state is None:
            return {}
        episodes = {"state": self.state, "clock": self.clock, "observation": self.observation}
        return {"episodes": nest.plain(episodes), "numbers": self._numbers.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restores episodes and generators, so that later time steps are bitwise the same as without the interruption.

        A generator on a GPU cannot load the state of a CPU's generator, or vice versa. It then gets a new seed.

        Raises:
          UsageError: the state belongs to a different class or number of environments.
        """
        if not state:
            return False
        if self.state is None:
            self.reset()
        own = {"state": self.state, "clock": self.clock, "observation": self.observation}
        saved = nest.leaves(state["episodes"])
        if [(x.shape, x.dtype) for x in saved] != [(x.shape, x.dtype) for x in nest.leaves(nest.plain(own))]:
            raise UsageError(
                f"the checkpoint's state does not match {self.num_envs} environments of {self.name}: its leaves have "
                f"the shapes {[tuple(x.shape) for x in saved]}; continue with the class and num_envs that it was saved "
                "with"
            )
        restored = nest.to(nest.like(nest.plain(own), state["episodes"]), self.device)
        self.state = nest.like(self.state, restored["state"])
        self.clock, self.observation = restored["clock"], nest.like(self.observation, restored["observation"])
        self._numbers.load_state_dict(state["numbers"])
        self._resets = None
        return True

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            with torch.no_grad():
                return function(self.functional, *arguments)
        except BaseException as error:
            refuse(error, self.name)
            raise


class _SharedNumbers:
    """Uniform random numbers in [0, 1) for B environments, from one generator on their device.

    Args:
      seeds: one seed per environment; only the first is used.
      count: number of random numbers of one environment in a step, n.
      device: device of the drawn tensors.
    """

    def __init__(self, seeds: Sequence[int], count: int, device: torch.device):
        self._shape, self._generator = (len(seeds), count), torch.Generator(device)
        self.seed(seeds)

    def seed(self, seeds: Sequence[int | None] | None, rows: np.ndarray | None = None) -> None:
        if seeds is not None and seeds[0] is not None:
            self._generator.manual_seed(seeds[0])

    def draw(self, num_steps: int, rows: np.ndarray | None = None) -> torch.Tensor:
        """Returns the numbers of the next steps, `[num_steps, B, n]`."""
        return torch.rand(num_steps, *self._shape, generator=self._generator, device=self._generator.device)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self._generator.device.type, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("kind") == self._generator.device.type:
            self._generator.set_state(state["generator"].cpu())  # map_location may have moved the state
        else:
            self._generator.manual_seed(random_state.draw_seeds(1)[0])


class SeparateNumbers:
    """Uniform random numbers in [0, 1) for B environments, each of which has its own generator on the CPU.

    Args:
      seeds: one seed per environment.
      count: number of random numbers of one environment in a step, n.
      device: device of the drawn tensors.
    """

    def __init__(self, seeds: Sequence[int], count: int, device: torch.device):
        self._generators = [torch.Generator() for _ in seeds]
        self._count, self._device = count, device
        self._ahead = torch.zeros(len(seeds), BLOCK, count)  # drawn in blocks, because each call of a generator is slow
        self._cursor = torch.full((len(seeds),), BLOCK)  # for each environment, index of its next step in `_ahead`
        self.seed(seeds)

    def seed(self, seeds: Sequence[int | None] | None, rows: np.ndarray | None = None) -> None:
        """Seeds the generators of `rows` (`[B]` bool; None means all), except where the seed is None."""
        for row, seed in enumerate(seeds or ()):
            if seed is not None and (rows is None or rows[row]):
                self._generators[row].manual_seed(seed)
                self._cursor[row] = BLOCK

    def draw(self, num_steps: int, rows: np.ndarray | None = None) -> torch.Tensor:
        """Returns random numbers for the next steps, `[num_steps, B, n]`; advances only environments in `rows`."""
        which = torch.ones_like(self._cursor) if rows is None else torch.from_numpy(rows).long()
        every = torch.arange(len(self._cursor))
        steps = []
        for _ in range(num_steps):
            for row in torch.nonzero((self._cursor == BLOCK) & (which == 1))[:, 0].tolist():
                self._ahead[row] = torch.rand(BLOCK, self._count, generator=self._generators[row])
                self._cursor[row] = 0
            steps.append(self._ahead[every, self._cursor.clamp(max=BLOCK - 1)])
            self._cursor += which
        return torch.stack(steps).to(self._device)

    def state_dict(self) -> dict[str, Any]:
        states = torch.stack([generator.get_state() for generator in self._generators])
        return {"generators": states, "ahead": self._ahead.clone(), "cursor": self._cursor.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for generator, own in zip(self._generators, state["generators"].cpu()):
            generator.set_state(own.clone())  # a copy, because torch 2.13 crashes with a view
        self._ahead, self._cursor = state["ahead"].cpu().clone(), state["cursor"].cpu().clone()
