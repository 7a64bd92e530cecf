"""Experts: modules that return the action to clone for any row."""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from alfish import nest
from alfish.algorithms.acting import Actor
from alfish.algorithms.actor_critic import ActorCriticAlgorithm
from alfish.algorithms.imitation.external import External, checksum_of, is_opened_to_act
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import TimeStep
from alfish.errors import UsageError, printable
from alfish.functional.distributions import Distribution
from alfish.nest import Nest
from alfish.parameters.parts import build
from alfish.specs import leaves_in_words
from alfish.transforms import Transforms


class Expert(External):
    """Labels rows with the action to clone. Subclass it for a controller or planner; use `PolicyExpert` for a policy.

    The methods of an expert must be pure, like the hooks of an algorithm: their results depend on arguments and buffers
    only.
    """

    def initial_state(self, batch_size: int) -> Nest:
        """Returns the state at the start of an episode, `[B, ...]`. Default: None, which means no state."""
        return None

    @abc.abstractmethod
    def forward(self, time_step: TimeStep, state: Nest) -> tuple[Nest, Nest]:
        """Returns labels, which are actions `[B, ...]` in the algorithm's units, and the next state.

        Args:
          time_step: row of each environment, `[B]`, as the algorithm receives it.
          state: state of the expert, already reset where a row is FIRST.
        """

    def distribution(self, time_step: TimeStep) -> Distribution:
        """Returns the distributions of actions for rows `[T, B]`, each row by itself, without gradient.

        Default: raises UsageError. `PriorKLPPO` calls this method, and requires the type of distribution that the
        policy in training has.
        """
        raise UsageError(f"{type(self).__name__} has no method `distribution`, so it cannot be a prior policy")

    def check_specs(self, observation_spec: Nest, action_spec: Nest) -> None:
        """Raises UsageError with the first difference if the expert cannot label rows of the given specs.

        Default: accepts all specs.
        """

    def start(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        """Checks the spaces of a training environment. Default: does nothing."""


class PolicyExpert(Expert):
    """A frozen trained policy; its label is the mode of its action distribution.

    The policy's parameters become non-persistent buffers. Optimizers, parameter counts and checkpoints leave them out;
    workers receive them.

    Args:
      algorithm, transforms: trained algorithm and its transforms; this module keeps and freezes both.
      action_space: action space of the environment that the policy was trained in.
      name: name of the policy's run, for messages.
      leaves: paths of the observation's leaves that the expert sees. Several leaves are joined in this order. None
        means the whole observation.
    """

    def __init__(
        self,
        algorithm: RLAlgorithm,
        transforms: Transforms,
        action_space: spaces.Space,
        name: str,
        leaves: Sequence[str] | None = None,
    ):
        super().__init__()
        self.name, self._leaves, self._action_space = name, leaves, action_space
        state = {**algorithm.state_dict(), **transforms.state_dict(prefix="transforms.")}
        self.checksum = checksum_of(state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor))
        self._algorithm, self._transforms = _frozen(algorithm), _frozen(transforms)
        self._actor = Actor(self._algorithm, self._transforms, samples=False)
        if any(transform.shows_rewards for transform in transforms.others):
            self.reward_spec = transforms.raw_reward_spec

    def initial_state(self, batch_size: int) -> Nest:
        return self._actor.first_state(batch_size)

    def forward(self, time_step: TimeStep, state: Nest) -> tuple[Nest, Nest]:
        stored = self._transforms.encode(self._selected(time_step.observation, _joined))
        step, of_transforms = self._actor.act(time_step._replace(observation=stored), *state)
        return step.output, (of_transforms, step.state)

    @torch.no_grad()
    def distribution(self, time_step: TimeStep) -> Distribution:
        algorithm, transforms = self._algorithm, self._transforms
        if not isinstance(algorithm, ActorCriticAlgorithm):
            raise UsageError(
                f"the policy {self.name} was trained by {type(algorithm).__name__}, whose distribution of actions has "
                "no KL divergence; give a policy of PPO, A2C or APPO"
            )
        if nest.leaves(self._actor.first_state(1)):
            raise UsageError(
                f"the policy {self.name} has a memory or stacks frames, but a prior policy sees each time step by "
                "itself; give a policy without memory, and stack frames in the environment"
            )
        rows = nest.map(lambda leaf: leaf.flatten(0, 1), time_step)  # `encode` takes one leading dimension
        stored = transforms.encode(self._selected(rows.observation, _joined))
        seen = transforms.transform(rows._replace(observation=stored), transforms.initial_state(1))
        policy, _ = algorithm.network.policy(seen, None)
        return nest.map(lambda leaf: leaf.unflatten(0, time_step.step_type.shape), policy)

    def check_specs(self, observation_spec: Nest, action_spec: Nest) -> None:
        if self._leaves is not None:
            for path in self._leaves:
                if path not in nest.paths(observation_spec):
                    found = leaves_in_words("the observation", observation_spec)
                    raise UsageError(f"the expert {self.name} should see {path!r}, but {found}")
        seen = self._selected(observation_spec, functools.partial(_joined_box, self.name))
        self._compare("observation", self._transforms.raw_observation_spec, seen)
        self._compare("action", self._algorithm.action_spec, action_spec)

    def start(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        """Checks that the action spaces are equal: specs lack the bounds, which are the units of the actions."""
        if self._action_space != action_space:
            raise UsageError(
                f"the expert {self.name} has the action space {printable(str(self._action_space))}, but this "
                f"environment has {printable(str(action_space))}; train the expert in this environment, wrapped as it "
                "is now"
            )

    def _selected(self, observation: Nest, join: Any) -> Nest:
        """Returns the part of an observation that the expert sees, in the expert's structure.

        Args:
          observation: nest of tensors or of spaces.
          join: function that returns several leaves as one.
        """
        if self._leaves is None:
            return observation
        by_path = dict(zip(nest.paths(observation), nest.leaves(observation)))
        leaves = [by_path[path] for path in self._leaves]
        only = leaves[0] if len(leaves) == 1 else join(leaves)
        return nest.map(lambda _: only, self._transforms.raw_observation_spec)

    def _compare(self, kind: str, there: Nest, here: Nest) -> None:
        """Raises UsageError that names the first leaf whose spec in the expert differs from its spec in the run."""
        one, other = dict(nest.named_leaves(there, kind)), dict(nest.named_leaves(here, kind))
        for path in [*one, *other]:
            if one.get(path) != other.get(path):
                found, wanted = (printable(str(each.get(path, "no such leaf"))) for each in (one, other))
                raise UsageError(
                    f"the expert {self.name} was trained on other {kind}s: {path} is {found} in its run and {wanted} "
                    "in this run; train it in this environment, leave out transforms of observations here (the expert "
                    "applies its own), or name the leaves that the expert sees with saved_policy.leaves"
                )


def _joined(leaves: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(leaves, -1)


def _joined_box(name: str, leaves: list[Any]) -> spaces.Box:
    """Returns the spec of joined leaves; raises UsageError if a leaf is not a vector of floats."""
    for leaf in leaves:
        if not isinstance(leaf, spaces.Box) or leaf.dtype != np.float32 or leaf.shape is None or len(leaf.shape) != 1:
            raise UsageError(f"the expert {name} sees several leaves joined, but {leaf} is not a float32 vector")
    low, high = (np.concatenate([getattr(leaf, end) for leaf in leaves]) for end in ("low", "high"))
    return spaces.Box(low, high, dtype=np.float32)


def _frozen(module: Any) -> Any:
    """Replaces parameters and buffers with non-persistent buffers; returns the module in evaluation mode.

    A module for which evaluation mode is not enough, such as a noisy layer, has a method `freeze`.
    """
    for part in module.modules():
        if callable(freeze := getattr(part, "freeze", None)):
            freeze()
        tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        for name, tensor in tensors:
            delattr(part, name)
            part.register_buffer(name, tensor.detach().clone(), persistent=False)
    return module.eval()


class AbsentExpert(Expert):
    """A placeholder for an expert in a policy that only acts; it cannot label rows."""

    name = "the expert"

    def forward(self, time_step: TimeStep, state: Nest) -> tuple[Nest, Nest]:
        raise UsageError(
            "the policy was loaded without its expert, so rows have no labels; only training computes them"
        )


def make_expert(expert: Callable[[], Expert], name: str) -> Expert:
    """Returns the expert that a factory makes; `AbsentExpert` for a policy that only acts.

    Args:
      expert: class or factory of the expert.
      name: name of the parameter, for messages.

    Raises:
      UsageError: the factory returns an object that is not an expert, such as a data set.
    """
    if is_opened_to_act():
        return AbsentExpert()
    made: Any = build(expert, object, name)
    if not isinstance(made, Expert):
        raise UsageError(
            f"{name} made a {type(made).__name__}, which cannot label new rows; give it a saved run ({name} = "
            "@saved_policy, saved_policy.root_dir = 'runs/x'), or clone recorded episodes with BC"
        )
    return made
