"""One step of a policy, from a raw observation to an action, as a function of tensors without batch dimension."""

from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.algorithms.acting import Actor
from alfish.data import StepType, TimeStep
from alfish.specs import ActionUnits, ObservationUnits
from alfish.training.policy import Policy

CPU = torch.device("cpu")


class ExportedLeaf(NamedTuple):
    """A tensor that enters or leaves a step.

    Attributes:
      name: name of the tensor, such as `observation.camera`.
      example: tensor of the same shape and dtype; for a state, its initial value.
    """

    name: str
    example: torch.Tensor


class PolicyStep:
    """Function of one observation, in the environment's units, and of the policy's state.

    Args:
      policy: policy on the CPU.
      sample: whether the action is sampled, as in training; otherwise the mode is used.

    Attributes:
      inputs: leaves of the observation, `first`, `reward`, and the leaves of the state, in the order of `__call__`.
      num_observations: number of leaves of the observation among the inputs.
      outputs: leaves of the action.
      state_names: names of the leaves of the state.
    """

    def __init__(self, policy: Policy, sample: bool):
        self._actor = Actor(policy.algorithm, policy.transforms, sample, sets_mode=True)
        self._read = ObservationUnits(policy.observation_space, CPU).from_environment
        self._units = ActionUnits(policy.action_space, CPU)
        observation = _examples("observation", policy.observation_space)
        self._observation_structure = nest.flatten(specs.map_space(lambda leaf: leaf, policy.observation_space))[1]
        reward = torch.zeros(policy.transforms.raw_reward_spec.shape)
        transform_state, memory = self._actor.first_state(1)
        prev_action = specs.zeros(specs.action_spec(policy.action_space), (1,))
        state = {"prev_action": prev_action, "transforms": transform_state, "memory": memory}
        leaves, self._state_structure = nest.flatten(state)
        self.state_names = [name for name, _ in nest.named_leaves(state, "state")]
        self.num_observations = len(observation)
        self.inputs = [
            *observation,
            ExportedLeaf("first", torch.tensor(True)),
            ExportedLeaf("reward", reward),
            *(ExportedLeaf(name, leaf[0].clone()) for name, leaf in zip(self.state_names, leaves)),
        ]
        self.outputs = _examples("action", policy.action_space)

    def __call__(self, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the leaves of the action, in the environment's units, and the leaves of the next state."""
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
            observation=self._actor.transforms.encode(self._read(observation)),
            prev_action=nest.map(unless_first, state["prev_action"]),
            env_id=torch.zeros(1, dtype=torch.int32),
        )
        initial_state = self._actor.algorithm.initial_state(1)
        step, transform_state = self._actor.act(time_step, state["transforms"], state["memory"], initial_state)
        executed = self._units.executed(step.output)
        after = {"prev_action": executed, "transforms": transform_state, "memory": step.state}
        actions = nest.leaves(self._units.stretch(executed))
        return [leaf[0] for leaf in actions], [leaf[0] for leaf in nest.leaves(after)]


def _examples(name: str, space: spaces.Space) -> list[ExportedLeaf]:
    """Returns zeros for each leaf of an environment's space, in its dtype."""
    found = nest.named_leaves(specs.map_space(lambda leaf: leaf, space), name)
    return [ExportedLeaf(leaf_name, torch.from_numpy(_zeros(leaf))) for leaf_name, leaf in found]


def _zeros(leaf: Any) -> np.ndarray:
    return np.zeros(leaf.shape or (), leaf.dtype)
