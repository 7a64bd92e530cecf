"""Converts vector environments of torch tensors to the stream of time steps; only actions are copied."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv

from alfish import nest, specs
from alfish.data import StepType, TimeStep
from alfish.environments.environment import Environment
from alfish.environments.masked_observation import marked
from alfish.environments.members import check_state, state_of
from alfish.environments.objectives import declared, named
from alfish.environments.sequential import close
from alfish.environments.vector import autoreset_mode
from alfish.errors import UsageError
from alfish.errors.user_code import calling, refuse
from alfish.nest import Nest
from alfish.runs import random_state
from alfish.specs import ActionUnits, ObservationUnits
from alfish.specs.units import HAS_DEVICE


class TensorEnvironment(Environment):
    """A `gymnasium.vector.VectorEnv` whose observations, rewards and flags are torch tensors `[B, ...]`.

    The environment must not write to tensors that it has returned, because these are not copied; it may write to
    actions. The autoreset mode is NEXT_STEP, or SAME_STEP with a batch of observations `infos['final_obs']`, of which
    rows are read only where an episode ends.

    Args:
      env: environment with `metadata['autoreset_mode']` and a `device`.
      seed: seed of the first reset.
      action_mask: leaf of the observation that is an action mask, 'observation:LEAF'; None means no mask.
      rewards: names of the entries of a vector reward; None means the names in `env.reward_space`, or else numbers.

    Attributes:
      device: device of all returned tensors.
    """

    def __init__(
        self,
        env: VectorEnv,
        seed: int,
        action_mask: str | None = None,
        rewards: Sequence[str] | None = None,
    ):
        mode = autoreset_mode(env)
        if mode == AutoresetMode.DISABLED:
            raise UsageError(f"{type(env).__name__} returns tensors and disables autoreset; give it NEXT_STEP")
        observed = (
            env.single_observation_space if action_mask is None else marked(env.single_observation_space, action_mask)
        )
        super().__init__(env.num_envs, observed, env.single_action_space, named(declared(env), rewards))
        self.device = device = torch.device(getattr(env, "device", "cpu"))
        self.env_id = torch.from_numpy(self.env_id).to(device)
        self.env = env
        self.uneven = mode == AutoresetMode.SAME_STEP
        self._seed: int | None = seed
        self._units = ActionUnits(env.single_action_space, device)
        self._observed = ObservationUnits(observed, device)
        self._was_done = torch.zeros(self.num_envs, dtype=torch.bool, device=device)
        self._resets: tuple[torch.Tensor, TimeStep] | None = None
        self._restart = False
        self._abandoned = False

    def reset(self, seeds: Sequence[int | None] | None = None, rows: np.ndarray | None = None) -> TimeStep:
        is_first = self._seed is not None
        seed, self._seed = (self._seed if seeds is None else seeds[0]), None
        with calling(f"{self.name}.reset"):
            observation, self.infos = self.env.reset(seed=seed)
        self._observed.check_kinds(observation, self.name)
        if is_first:
            check_state(self.env, self.name)
        self._was_done, self._restart = torch.zeros_like(self._was_done), False
        first = self._first(self._observed.from_environment(observation))
        self._check_shapes(first.observation)
        self._check_masks(first.observation)
        return first

    def step(self, action: Nest) -> TimeStep:
        if self._restart:
            # The seeds are drawn from a generator that the run restores, so that a resumed run does not repeat its
            # first episodes.
            return self.reset(random_state.draw_seeds(1))
        executed = self._units.executed(action)
        handed = nest.map(_apart, self._units.stretch(executed), executed)
        try:
            observation, reward, terminated, truncated, self.infos = self.env.step(handed)
        except BaseException as error:
            refuse(error, f"{self.name}.step")
            raise
        for result in (reward, terminated, truncated):
            if not isinstance(result, torch.Tensor):
                raise UsageError(f"{self.name}.step returned {type(result).__name__}; {HAS_DEVICE}")
        self._check_results(reward, terminated, truncated)
        terminated, truncated = terminated.to(torch.bool), truncated.to(torch.bool)
        observation, done, first = self._observed.from_environment(observation), terminated | truncated, self._was_done
        if self.uneven:
            self._resets = done, self._first(observation)
            if "final_obs" in self.infos:
                observation = nest.where(done, self._observed.from_environment(self.infos["final_obs"]), observation)
            elif bool(done.any()):  # reading these values is avoided where each step has final observations
                raise UsageError(
                    f"{type(self.env).__name__} resets in the same step but gives no infos['final_obs'] where an "
                    "episode ends, so truncated episodes cannot be bootstrapped; let it reset in the next step"
                )
        else:
            self._was_done = done
        # The operations read no tensor's value, because reading would wait for the device.
        last_or_mid = torch.where(done, StepType.LAST, StepType.MID)
        return TimeStep(
            step_type=torch.where(first, StepType.FIRST, last_or_mid).to(torch.int32),
            reward=_zero_where(first, reward.to(torch.float32)),
            discount=(~terminated | first).to(torch.float32),
            observation=observation,
            prev_action=nest.map(lambda leaf: _zero_where(first, leaf), executed),
            env_id=self.env_id,
        )

    def convert(self, rows: Nest) -> Nest:
        return nest.tensors(rows, self.device)

    def take_resets(self) -> tuple[torch.Tensor, TimeStep] | None:
        resets, self._resets = self._resets, None
        return resets

    def state_dict(self) -> dict[str, Any]:
        """Returns the environment's state if it has a method `get_state`, else an empty dict."""
        if self._abandoned or not hasattr(self.env, "get_state"):
            return {}
        return {"env": state_of(self.env, self.name), "was_done": self._was_done}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        self.reset()
        if "env" in state and hasattr(self.env, "set_state"):
            with calling(f"{self.name}.set_state"):
                self.env.set_state(state["env"])
            self._was_done = state["was_done"].to(self.device)
            return True
        self._restart = True
        return False

    def abandon(self) -> None:
        self._abandoned = True

    def close(self) -> None:
        with calling(f"{self.name}.close"):
            close(self.env)

    def _first(self, observation: Nest) -> TimeStep:
        reward_shape = self.reward_spec.shape
        return TimeStep(
            step_type=torch.full((self.num_envs,), StepType.FIRST, dtype=torch.int32, device=self.device),
            reward=torch.zeros(self.num_envs, *reward_shape, device=self.device),
            discount=torch.ones(self.num_envs, device=self.device),
            observation=observation,
            prev_action=specs.zeros(self.action_spec, (self.num_envs,), self.device),
            env_id=self.env_id,
        )


def _apart(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns `tensor`, or a copy if it begins at the same memory address as `other`."""
    return tensor.clone() if tensor.data_ptr() == other.data_ptr() else tensor


def _zero_where(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return values.masked_fill(nest.widened(rows, values), 0)
