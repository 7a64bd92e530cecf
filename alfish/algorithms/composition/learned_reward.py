"""Rewards that are learned from demonstrations: recorded episodes of an expert, and the base of such rewards."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from alfish import nest, specs
from alfish.algorithms.composition.part import RewardPart, Transitions, transitions_of
from alfish.algorithms.imitation.external import External, is_opened_to_act
from alfish.data import Experience, StepType, TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks import MLP
from alfish.networks.layers import orthogonal
from alfish.offline import OfflineBuffer, Spaces
from alfish.offline.recorded_spaces import check_fit
from alfish.parameters.parts import build, build_network
from alfish.parameters.schedules import Schedule
from alfish.processes import replicas
from alfish.transforms import ObservationNormalizer, RewardNormalizer


class Demonstrations(External):
    """All steps of recorded episodes, in buffers that compiled updates can sample and checkpoints leave out.

    The episodes are read when the algorithm is built; a policy that only acts does not read them.

    Args:
      make_buffer: class or factory of the recorded data, an `OfflineBuffer`.
      name: name of the setting of `make_buffer` in messages, for example `GAIL.demonstrations`.
      observation_spec, action_spec: specs of the algorithm's observations and actions.

    Attributes:
      lengths: lengths of the episodes, in steps.

    Raises:
      UsageError: the data cannot be read, or their spaces differ from the environment's.
    """

    def __init__(self, make_buffer: Callable[..., OfflineBuffer], name: str, observation_spec: Nest, action_spec: Nest):
        super().__init__()
        self.name, self._spaces = name, Spaces()
        self.lengths: tuple[int, ...] = ()
        if is_opened_to_act():
            return
        data = build(make_buffer, OfflineBuffer, name)
        assert data.spaces.observation is not None and data.spaces.action is not None
        self.name, self._spaces = data.report.name, data.spaces
        found = specs.observation_spec(data.spaces.observation), specs.action_spec(data.spaces.action)
        for kind, there, here in zip(("observations", "actions"), found, (observation_spec, action_spec)):
            if there != here:
                raise UsageError(
                    f"the {kind} of {self.name} are {specs.describe(there)}, but {name} compares them with {kind} that "
                    f"are {specs.describe(here)}; use data of this environment, and leave out transforms of "
                    "observations (composition.NormalizedObservation normalizes them for the algorithm)"
                )
        self.checksum = data.state_dict()["sha256"]
        self.lengths = tuple(episode.length for episode in data.episodes)
        leaves, self._structure = nest.flatten(recorded_steps(data))
        for k, leaf in enumerate(leaves):
            self.register_buffer(f"leaf_{k}", leaf, persistent=False)
        self._num_leaves = len(leaves)

    @property
    def steps(self) -> Transitions:
        """All steps, `[M, ...]`."""
        return nest.unflatten(self._structure, [getattr(self, f"leaf_{k}") for k in range(self._num_leaves)])

    def forward(self, shape: torch.Size) -> Transitions:
        """Returns steps `[*shape, ...]`, drawn uniformly with replacement."""
        steps = self.steps
        index = torch.randint(len(steps.next_discount), shape, device=steps.next_discount.device)
        return nest.at(steps, index)

    def start(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        """Checks the units of actions, which are in the spaces but not in the specs."""
        check_fit(self._spaces, Spaces(observation_space, action_space), self.name)


def recorded_steps(data: OfflineBuffer) -> Transitions:
    """Returns the steps of all episodes, `[M, ...]`."""
    found: list[Any] = []
    for episode in data.episodes:
        position = torch.arange(episode.position, episode.position + episode.length + 1).unsqueeze(1)
        rows = data.read(torch.tensor([episode.column]), position)
        found.append(nest.map(lambda leaf: leaf.squeeze(1), transitions_of(rows.time_step)))
    return nest.map(lambda *leaves: torch.cat(leaves), *found)


class LearnedReward(RewardPart):
    """Base class of rewards that are learned from steps of an expert and of the policy.

    The base class holds the demonstrations, normalizes inputs and rewards, and builds the encoder of observations and
    actions.

    Subclasses set the defaults, and describe the arguments. Inputs are normalized by running moments over equally many
    steps of the policy and the expert; the moments start from the demonstrations.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        *,
        demonstrations: Callable[..., OfflineBuffer],
        coef: float | Schedule,
        encoder: Callable[[Nest], Any],
        normalize_reward: bool,
        gamma: float,
        clip: float,
    ):
        super().__init__(observation_spec, action_spec, coef)
        name = type(self).__name__
        self.demonstrations = Demonstrations(demonstrations, f"{name}.demonstrations", observation_spec, action_spec)
        sees = {"action": action_spec, "observation": observation_spec}
        scalar = specs.reward_spec()
        self.normalizer = None
        if any(map(specs.is_float, nest.leaves(sees))):
            self.normalizer = ObservationNormalizer(sees, scalar, leaves=("*",), clip=clip, epsilon=1e-8)
            sees = self.normalizer.observation_spec
        self.scale = RewardNormalizer(sees, scalar, gamma=gamma, clip=clip, epsilon=1e-8) if normalize_reward else None
        self.encoder: Any = build_network(encoder, f"{name}.encoder", sees)
        self.input_spec = sees
        if self.demonstrations.lengths and self.normalizer is not None:
            self._initialize_moments(self.normalizer)

    def reward(self, transitions: Transitions) -> torch.Tensor:
        reward = self.raw_reward(transitions.observation, transitions.action, transitions.trains)
        return reward if self.scale is None else self.scale.normalize(reward)

    @abc.abstractmethod
    def raw_reward(self, observation: Nest, action: Nest, trains: torch.Tensor | None) -> torch.Tensor:
        """Returns rewards `[...]` before normalization, without gradients.

        Args:
          observation, action: steps `[...]`.
          trains: mask of the trainable steps, `[...]` bool; None means all steps.
        """

    def after_iteration(self, experience: Experience, num_seen: int) -> None:
        # The last row of an on-policy unroll, before any PAD rows, occurs again in the next unroll, which counts it. A
        # row holds its observation and action, so a step does not need the next row.
        time_step, action = nest.at(
            (experience.time_step, experience.action), slice(0, len(experience.time_step.reward) - num_seen)
        )
        kind = time_step.step_type
        if num_seen:
            kind = torch.where(experience.time_step.step_type[num_seen:] == StepType.PAD, StepType.PAD, kind)
        acts = kind <= StepType.MID
        rows = time_step._replace(step_type=torch.where(acts, kind, StepType.PAD))
        action = nest.map(_bounded, self.action_spec, action)
        if self.scale is not None:
            reward = self.raw_reward(time_step.observation, action, acts)
            # Returns begin at the second step of an episode. A LAST row ends a return; its reward is not read.
            kind = torch.where(kind == StepType.LAST, StepType.FIRST, kind)
            self.scale.observe(time_step._replace(reward=reward, step_type=kind))
        if self.normalizer is not None:
            self.normalizer.observe(rows._replace(observation=_inputs(time_step.observation, action)))
            expert = self.demonstrations(acts.shape)
            self.normalizer.observe(rows._replace(observation=_inputs(expert.observation, expert.action)))

    def normalized(self, observation: Nest, action: Nest) -> Nest:
        """Returns the normalized {'action', 'observation'}."""
        inputs = _inputs(observation, action)
        return inputs if self.normalizer is None else self.normalizer.normalize(inputs)

    def make_network(self, layers: Sequence[int]) -> nn.Sequential:
        """Returns a network with one output, `[..., 1]`, for the encoder's features."""
        mlp = MLP(self.encoder.output_size, layers=layers, activation="relu", norm=None)
        return nn.Sequential(mlp, orthogonal(nn.Linear(mlp.output_size, 1), 1.0))

    def _features(self, observation: Nest, action: Nest) -> torch.Tensor:
        return self.encoder(self.normalized(observation, action))

    def _initialize_moments(self, normalizer: ObservationNormalizer) -> None:
        kinds = torch.full((1, sum(self.demonstrations.lengths)), StepType.MID, dtype=torch.int32)
        steps = nest.map(lambda leaf: leaf.unsqueeze(0), self.demonstrations.steps)
        rows = TimeStep(kinds, None, None, _inputs(steps.observation, steps.action), None, None)
        with replicas.apart(), torch.no_grad():  # no sums over learners, because all have the same data
            normalizer.observe(rows)


def _inputs(observation: Nest, action: Nest) -> Nest:
    return {"action": action, "observation": observation}


def _bounded(spec: spaces.Space, action: torch.Tensor) -> torch.Tensor:
    """Returns the executed action: clipped to the bounds of a Box."""
    if not isinstance(spec, spaces.Box):
        return action
    low, high = (torch.as_tensor(bound, device=action.device) for bound in (spec.low, spec.high))
    return torch.minimum(torch.maximum(action, low), high)
