"""The base of Q-learning for one Discrete action: a network of action values that acts epsilon-greedily."""

from collections.abc import Callable
from typing import Any

import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, TimeStep
from alfish.errors import UsageError
from alfish.functional.values import Scalar
from alfish.nest import Nest
from alfish.parameters import UnitInterval
from alfish.parameters.parts import build_network
from alfish.parameters.schedules import Schedule, as_schedule


class QLearning(RLAlgorithm):
    """Acts with a network of action values. Subclasses train the network; their constructors call `make_network`.

    Attributes:
      values: representation of the values that the network predicts.
      q_network: maps time steps to the values of all actions.
    """

    values: Scalar
    q_network: Any
    feature_module = "q_network.torso"

    def make_network(self, q_network: Callable[..., Any], values: Scalar, epsilon: UnitInterval | Schedule) -> None:
        """Makes the network and the schedule of exploration; see `DQN` for `q_network` and `epsilon`."""
        self.num_actions = int(nest.leaves(self.action_spec)[0].n)
        self.values = values
        name, arguments = f"{type(self).__name__}.q_network", (self.observation_spec, self.num_actions)
        self.q_network = build_network(values.sized(q_network), name, *arguments, has=("initial_state",), takes=2)
        self._epsilon = as_schedule(epsilon)

    @classmethod
    def check_specs(cls, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box) -> None:
        leaves = nest.leaves(action_spec)
        if len(leaves) != 1 or not isinstance(leaves[0], spaces.Discrete):
            others = "SAC or PPO" if isinstance(action_spec, spaces.Box) else "PPO"
            raise UsageError(
                f"{cls.__name__} requires one Discrete action leaf, not {action_spec}; train with {others}"
            )

    def initial_state(self, batch_size: int) -> Nest:
        return self.q_network.initial_state(batch_size)

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        q, state = self.q_network(time_step, state)
        mask = self.mask(time_step)
        greedy = greedy_choice(self.values.scalarized(q), mask)
        explore = torch.rand(greedy.shape, device=greedy.device) < self._epsilon(self.progress)
        uniform = torch.randint_like(greedy, self.num_actions) if mask is None else specs.uniform_choice(mask)
        return AlgStep(self._nested(torch.where(explore, uniform, greedy)), state)

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        q, state = self.q_network(time_step, state)
        return AlgStep(self._nested(greedy_choice(self.values.scalarized(q), self.mask(time_step))), state)

    def state_value(self, time_step: TimeStep, state: Nest) -> torch.Tensor:
        """Returns the values `[B]` of the greedy actions at rows `[B]`."""
        q = self.values.scalarized(self.q_network(time_step, state)[0])
        return allowed_q(q, self.mask(time_step)).amax(-1)

    def mask(self, time_step: TimeStep) -> torch.Tensor | None:
        """Returns the allowed actions, `[..., A]` bool; None means that all are allowed."""
        return None if self.action_masks is None else self.action_masks(time_step.observation)[0]

    def _nested(self, action: torch.Tensor) -> Nest:
        return nest.map(lambda _: action, self.action_spec)


def allowed_q(q: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Returns q `[..., A]` with -inf for forbidden actions; rows where `mask` allows no action do not change."""
    if mask is None:
        return q
    allows_none = mask.amax(-1, keepdim=True).logical_not()  # occurs at the end of an episode
    return torch.where(mask | allows_none, q, -torch.inf)


def greedy_choice(q: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Returns the best allowed action, `[...]` int64; where `mask` allows none, the best of all actions."""
    return allowed_q(q, mask).argmax(-1)
