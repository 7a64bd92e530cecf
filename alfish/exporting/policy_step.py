"""One step of a policy as a function of tensors, without batch dimension: from a raw observation to an action."""

from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.algorithms.acting import in_eval_mode, reset_state
from alfish.data import StepType, TimeStep
from alfish.specs import ActionUnits, ObservationUnits
from alfish.training.policy import Policy

CPU = torch.device("cpu")


class Leaf(NamedTuple):
    """A tensor that enters or leaves a step.

    Attributes:
      name: as `observation.camera`.
      example: of its shape and dtype; of a state, its initial value.
    """

    name: str
    example: torch.Tensor


class PolicyStep:
    """Function of one observation, in the environment's units, and the policy's state.

    Args:
      policy: on the CPU.
      sample: draw the action as in training; else take the mode.

    Attributes:
      inputs: observation leaves, `first`, `reward`, and the leaves of the state, in the order of `__call__`.
      num_observations: number of observation leaves among them.
      outputs: leaves of the action.
      state_names: names of the leaves of the state.
    """

    def __init__(self, policy: Policy, sample: bool):
        self._algorithm, self._transforms, self._sample = policy.algorithm, policy.transforms, sample
        self._read = ObservationUnits(policy.observation_space, CPU).from_environment
        self._units = ActionUnits(policy.action_space, CPU)
        observation = _examples("observation", policy.observation_space)
        self._observation_structure = nest.flatten(specs.map_space(lambda leaf: leaf, policy.observation_space))[1]
        reward = torch.zeros(policy.transforms.raw_reward_spec.shape)
        state = {
            "prev_action": specs.zeros(specs.action_spec(policy.action_space), (1,)),
            "transforms": policy.transforms.initial_state(1),
            "memory": policy.algorithm.initial_state(1),
        }
        leaves, self._state_structure = nest.flatten(state)
        self.state_names = [name for name, _ in nest.named_leaves(state, "state")]
        self.num_observations = len(observation)
        self.inputs = [
            *observation,
            Leaf("first", torch.tensor(True)),
            Leaf("reward", reward),
            *(Leaf(name, leaf[0].clone()) for name, leaf in zip(self.state_names, leaves)),
        ]
        self.outputs = _examples("action", policy.action_space)

    def __call__(self, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the leaves of the action, in the environment's units, and those of the next state."""
        rows = [leaf.unsqueeze(0) for leaf in inputs]
        observation = nest.unflatten(self._observation_structure, rows[: self.num_observations])
        first, reward, *state_leaves = rows[self.num_observations :]
        state = nest.unflatten(self._state_structure, state_leaves)

        def unless_first(leaf: torch.Tensor) -> torch.Tensor:
            return torch.where(nest.widened(first, leaf), torch.zeros_like(leaf), leaf)

        time_step = TimeStep(
            step_type=torch.where(first, int(StepType.FIRST), int(StepType.MID)).to(torch.int32),
            reward=unless_first(reward),
            discount=torch.ones(1),
            observation=self._transforms.encode(self._read(observation)),
            prev_action=nest.map(unless_first, state["prev_action"]),
            env_id=torch.zeros(1, dtype=torch.int32),
        )
        seen, transform_state = self._transforms(time_step, state["transforms"])
        memory = reset_state(state["memory"], self._algorithm.initial_state(1), seen.step_type)
        with in_eval_mode(self._algorithm, explores=self._sample):
            act = self._algorithm.rollout_step if self._sample else self._algorithm.predict_step
            step = act(seen, memory)
        executed = self._units.executed(step.output)
        after = {"prev_action": executed, "transforms": transform_state, "memory": step.state}
        actions = nest.leaves(self._units.stretch(executed))
        return [leaf[0] for leaf in actions], [leaf[0] for leaf in nest.leaves(after)]


def _examples(name: str, space: spaces.Space) -> list[Leaf]:
    """Returns zeros for each leaf of an environment's space, in its dtype."""
    found = nest.named_leaves(specs.map_space(lambda leaf: leaf, space), name)
    return [Leaf(leaf_name, torch.from_numpy(_zeros(leaf))) for leaf_name, leaf in found]


def _zeros(leaf: Any) -> np.ndarray:
    return np.zeros(leaf.shape or (), leaf.dtype)
