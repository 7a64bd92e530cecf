"""The base class of all algorithms: the hooks, in the order they run, and nothing else.

An algorithm owns parameters. It owns no environment, replay, optimizer, unroller, metric or configuration. A worker can
therefore unpickle it, and a test can call it with tensors made by hand.

    rollout_step           acts                                           [B], no gradient
    random_action          replaces the action while replay warms up      [B], no gradient
    preprocess_experience  computes advantages and returns                [T+1, B], no gradient
    train_step             runs the networks for the loss                 [T, N], with gradients
    calc_loss              computes a loss for each row that trains       [T', N]
    after_update           updates target networks                        after each gradient step
    after_iteration        updates side modules                           after each iteration that collected rows

All hooks but `after_update` and `after_iteration` are pure. They write no attribute, so the learner can compile a whole
update. Update buffers in place, and never write into a time step.
"""

import abc
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import torch
from gymnasium import spaces
from torch import nn

from alfish import nest, specs
from alfish.data import AlgStep, Experience, LossInfo, TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest


class ReplayNeeds(NamedTuple):
    """Data that replay stores for an off-policy algorithm, in addition to rows."""

    info: tuple[str, ...] = ()  # fields of rollout_step's info, a NamedTuple; Experience.info is then a dict of them
    return_gamma: float | None = None  # discount of Experience.return_to_go; None: no returns
    recurrent_state: bool = False  # states of the memory; windows then start at rows that have one


class UnrollUse(NamedTuple):
    """Ways in which an on-policy algorithm may use an unroll."""

    single_epoch: bool = True  # False: the loss is right after updates, too (a ratio, or no policy gradient)
    preprocess_each_epoch: bool = False  # whether to call preprocess_experience again before each later epoch
    handles_stale_policies: bool = False  # corrects for rows of an older policy; asynchronous unrollers require it


class RLAlgorithm(nn.Module, abc.ABC):
    """Networks, and the hooks that unrollers and the learner call.

    Args:
      observation_spec: nest of spaces, after transforms.
      action_spec: canonical action nest: Box in [-1, 1], see `alfish.specs`.
      reward_spec: Box of shape (), or (R,) for vector rewards.

    Attributes:
      action_masks: reader of the mask in observations; None: there is none. Hooks return actions that it allows.
    """

    on_policy: bool  # True: trains on the unroll itself; False: on batches from replay
    weighted_losses: tuple[str, ...] | None = None  # groups whose loss gets replay's importance weights; None: all
    replay_needs = ReplayNeeds()  # off-policy
    unroll_use = UnrollUse()  # on-policy

    progress: torch.Tensor  # float64 0-d in [0, 1], published with the weights; schedules read it

    def __init__(self, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box):
        super().__init__()
        if not isinstance(getattr(self, "on_policy", None), bool):
            raise UsageError(
                f"the class {type(self).__name__} has no on_policy; set it to True to train on unrolls, or to False to "
                "train from replay"
            )
        self.check_specs(observation_spec, action_spec, reward_spec)
        self.observation_spec, self.action_spec, self.reward_spec = observation_spec, action_spec, reward_spec
        self.action_masks = specs.mask_reader(observation_spec, action_spec)
        self.register_buffer("progress", torch.zeros((), dtype=torch.float64))

    @classmethod
    def check_specs(cls, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box) -> None:
        """Raises UsageError, which names the leaf, if the algorithm cannot learn from these. Default: accepts all."""

    def initial_state(self, batch_size: int) -> Nest:
        """Returns the state at the start of an episode, `[B, ...]`: memory, noise. None: there is no state."""
        return None

    @abc.abstractmethod
    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        """Returns actions that explore. `time_step` is `[B]`; `state` is already reset where a row is FIRST."""

    def random_action(self, time_step: TimeStep) -> Nest:
        """Returns uniformly random actions `[B, ...]` for the warm-up of replay; allowed ones if there is a mask."""
        masks = None if self.action_masks is None else self.action_masks(time_step.observation)
        return specs.sample(self.action_spec, len(time_step.step_type), masks)

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        """Returns the best actions: the mode, not a sample. Default: calls `rollout_step`."""
        return self.rollout_step(time_step, state)

    def preprocess_experience(self, experience: Experience) -> Experience:
        """Returns the experience with another `info`; on-policy `[T, ...]` for T + 1 rows. Default: unchanged."""
        return experience

    @abc.abstractmethod
    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        """Runs the networks over `[T, N]` rows; `calc_loss` receives the `info`.

        `state` belongs to row 0, or to the first row of `experience.burn_in` (see `networks.burn_in_state`).
        """

    @abc.abstractmethod
    def calc_loss(self, experience: Experience, info: Nest) -> LossInfo:
        """Returns a loss for each row. The learner masks and averages it, and differentiates it for its own group."""

    def after_update(self) -> None:
        """Updates target networks, after every gradient step, under no_grad."""

    def after_iteration(self, experience: Experience) -> None:
        """Updates side modules with the rows that an iteration collected, if any, after transforms; under no_grad."""

    def graph_key(self) -> Hashable:
        """Returns a key of the next update's control flow, e.g. whether a delayed actor trains. Default: None.

        One graph is compiled for each key; train_step and calc_loss may branch on no other state.
        """
        return None

    def parameter_groups(self) -> dict[str, Iterable[nn.Parameter]]:
        """Returns the parameters that each loss trains. A trainable parameter in no group is an error at start."""
        return {"all": self.parameters()}

    def overrides(self, hook: str) -> bool:
        """Returns True if the named hook differs from its default, which does nothing, so that callers skip it."""
        return getattr(type(self), hook) is not getattr(RLAlgorithm, hook)

    @property
    def reward_weights(self) -> torch.Tensor | None:
        """`[R]`, the buffer of the weights of a vector reward's entries; None: there is none."""
        return getattr(getattr(self, "values", None), "weights", None)

    @property
    def has_state(self) -> bool:
        """Returns True if `initial_state` has tensors."""
        return bool(nest.leaves(self.initial_state(1)))
