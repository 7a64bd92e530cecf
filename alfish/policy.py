"""A trained policy, ready to act."""

from typing import Any

import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.algorithms.rl_algorithm import RLAlgorithm, in_eval_mode
from alfish.data import StepType, TimeStep, reset_state
from alfish.specs import ActionUnits, ObservationUnits
from alfish.transforms import Transforms


class Policy:
    """Acts on observations as the environment gives them, in the environment's units.

    Args:
      algorithm, transforms: trained; read, not changed.
      observation_space, action_space: the environment's, of one environment.
      env_steps: of its training.
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
        self._device = algorithm.progress.device
        self._read = ObservationUnits(observation_space).from_environment
        self._observation_space = observation_space
        self._action_spec = specs.action_spec(action_space)
        self._units = ActionUnits(action_space)
        self.reset()

    def reset(self) -> None:
        """Forgets what a policy with memory remembers; the next `act` is the first of an episode."""
        self._state = self._transform_state = self._prev_action = None
        self._batch_size = 0

    @torch.no_grad()
    def act(self, observation: Any, batched: bool = False, sample: bool = False) -> Any:
        """The action for an observation.

        Args:
          observation: one observation of the environment, or with `batched` one a row.
          batched: whether observation and action have a leading batch dimension.
          sample: act as in training; else take the mode.

        Returns:
          The action as numpy arrays (an int for Discrete), in the action space's structure.
        """
        if not batched:
            observation = specs.batch_of_one(observation, self._observation_space)
        seen = self._time_step(nest.to(nest.map(torch.from_numpy, self._read(observation)), self._device))
        seen, self._transform_state = self.transforms(seen, self._transform_state)
        state = reset_state(self._state, self._initial_state, seen.step_type)
        with in_eval_mode(self.algorithm):
            step = (self.algorithm.rollout_step if sample else self.algorithm.predict_step)(seen, state)
        self._state = step.state
        executed = nest.map(lambda leaf: leaf.cpu().numpy(), step.output)
        self._prev_action = nest.map(torch.from_numpy, self._units.executed(executed))
        action = self._units.to_environment(executed)
        return action if batched else nest.map(lambda leaf: leaf[0], action)

    def _time_step(self, observation: Any) -> TimeStep:
        size = len(nest.leaves(observation)[0])
        begins = self._prev_action is None
        if begins:
            self._batch_size = size
            self._initial_state = nest.to(self.algorithm.initial_state(size), self._device)
            self._state = self._initial_state
            self._transform_state = nest.to(self.transforms.initial_state(size), self._device)
            self._prev_action = specs.zeros(self._action_spec, (size,))
        elif size != self._batch_size:
            raise ValueError(f"act was called with {size} observations after {self._batch_size}; call reset() between")
        kind = StepType.FIRST if begins else StepType.MID
        return TimeStep(
            step_type=torch.full((size,), kind, dtype=torch.int32, device=self._device),
            reward=torch.zeros(size, *self.algorithm.reward_spec.shape, device=self._device),
            discount=torch.ones(size, device=self._device),
            observation=observation,
            prev_action=nest.to(self._prev_action, self._device),
            env_id=torch.arange(size, dtype=torch.int32, device=self._device),
        )
