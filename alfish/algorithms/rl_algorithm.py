"""The base class of all algorithms: the hooks, in the order they run, and nothing else.

An algorithm owns parameters. It owns no environment, replay, optimizer, unroller, metric or config, so it pickles to a
worker as it is and a test drives it with tensors made by hand.

    rollout_step           acts                                         [B], no gradient
    random_action          acts in its place while replay is warmed up  [B], no gradient
    preprocess_experience  advantages, returns, intrinsic rewards       whole sequences, no gradient
    train_step             the same networks again                      [T, N], with gradients
    calc_loss              a loss per row                               [T', N]
    after_update           target networks                              after each gradient step
    after_iteration        side modules                                 after each iteration

Hooks are pure apart from `after_update` and `after_iteration`: they write no attribute, so the learner may compile or
capture a whole update. Buffers are updated in place, never rebound. Never edit a time step in place.
"""

import abc
import contextlib
from collections.abc import Hashable, Iterable, Iterator
from typing import ClassVar, NamedTuple

import torch
from gymnasium import spaces
from torch import nn

from alfish import nest, specs
from alfish.data import AlgStep, Experience, LossInfo, TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest


class ReplayNeeds(NamedTuple):
    """What an off-policy algorithm reads beyond rows, so that replay stores it."""

    info: tuple[str, ...] = ()  # fields of rollout_step's info
    return_gamma: float | None = None  # discount of Experience.return_to_go; None: not read
    recurrent_state: bool = False  # windows start where a state of the memory was stored, and bring it


class UnrollUse(NamedTuple):
    """How an on-policy algorithm may use an unroll."""

    single_epoch: bool = True  # False: a ratio to the policy that acted, in the loss, corrects for earlier updates
    preprocess_each_epoch: bool = False  # call preprocess_experience again at the start of every later epoch
    handles_stale_policies: bool = False  # corrects for rows of an older policy; asynchronous unrollers require it


class RLAlgorithm(nn.Module, abc.ABC):
    """What an algorithm is: networks, and the hooks that unrollers and the learner call.

    Args:
      observation_spec: nest of spaces, after transforms.
      action_spec: canonical action nest: Box in [-1, 1], see `alfish.specs`.
      reward_spec: Box of shape (), or (R,) for vector rewards.
    """

    on_policy: ClassVar[bool]  # trains on the unroll itself, or on batches from replay
    # Groups whose loss is multiplied by replay's importance weights; None: all.
    weighted_losses: ClassVar[tuple[str, ...] | None] = None
    replay_needs = ReplayNeeds()  # off-policy
    unroll_use = UnrollUse()  # on-policy

    progress: torch.Tensor  # float64 0-d in [0, 1], published with the weights; schedules read it

    def __init__(self, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box):
        super().__init__()
        if not hasattr(self, "on_policy"):
            raise UsageError(
                f"{type(self).__name__} does not say whether it trains on the unroll itself or from replay; give the "
                "class on_policy = True or False"
            )
        self.check_specs(observation_spec, action_spec, reward_spec)
        self.observation_spec = observation_spec
        self.action_spec = action_spec
        self.reward_spec = reward_spec
        self.register_buffer("progress", torch.zeros((), dtype=torch.float64))

    @classmethod
    def check_specs(cls, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box) -> None:
        """Raises UsageError, naming the leaf, where the algorithm cannot learn from these. Default: takes all."""

    def initial_state(self, batch_size: int) -> Nest:
        """What is carried from step to step at an episode's start: memory, noise. None: nothing is."""
        return None

    @abc.abstractmethod
    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        """Acts, exploring. `time_step` `[B]`; `state` is already reset where a row is FIRST."""

    def random_action(self, time_step: TimeStep) -> Nest:
        """Returns actions `[B, ...]` drawn uniformly, while replay is warmed up. Default: from the whole action space.

        Override it where an environment takes only some actions at a time, and says in its observation which.
        """
        return specs.sample(self.action_spec, len(time_step.step_type))

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        """Acts as well as it can: the mode, not a sample. Default: `rollout_step`."""
        return self.rollout_step(time_step, state)

    def preprocess_experience(self, experience: Experience) -> Experience:
        """May replace `info`, whose leaves become `[T, ...]` of the T + 1 rows given on-policy. Default: unchanged."""
        return experience

    @abc.abstractmethod
    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        """Runs the networks in training. `experience` `[T, N]`; `info` is what `calc_loss` receives.

        `state` is the experience's: of its row 0, or of the first row of its `burn_in` (see `networks.burn_in_state`).
        """

    @abc.abstractmethod
    def calc_loss(self, experience: Experience, info: Nest) -> LossInfo:
        """A loss per row. The learner masks, weighs, averages, and differentiates each group's loss for that group."""

    def after_update(self) -> None:
        """Runs after every gradient step, under no_grad: target networks."""

    def after_iteration(self, experience: Experience) -> None:
        """Runs once an iteration with the rows just collected, under no_grad: side modules."""

    def graph_key(self) -> Hashable:
        """What of the counts that `after_update` keeps decides the course of the next update: a delayed actor's turn.

        train_step and calc_loss may depend on such a count only through this. Default: nothing does.
        """
        return None

    def parameter_groups(self) -> dict[str, Iterable[nn.Parameter]]:
        """Which loss drives which parameters. A trainable parameter that no group claims is an error at start."""
        return {"all": self.parameters()}

    @property
    def has_state(self) -> bool:
        return bool(nest.leaves(self.initial_state(1)))


@contextlib.contextmanager
def in_eval_mode(algorithm: RLAlgorithm) -> Iterator[None]:
    """Acts as `Module.eval` says, and leaves the algorithm as it was."""
    was_training = algorithm.training
    algorithm.eval()
    try:
        yield
    finally:
        algorithm.train(was_training)
