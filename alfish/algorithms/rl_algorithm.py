"""The base class of all algorithms: the hooks, in the order in which they run.

An algorithm owns parameters, but no environment, replay, optimizer, unroller, metric or configuration. Therefore a
worker can unpickle an algorithm, and a test can call its hooks with tensors made by hand.

    rollout_step           acts                                           [B], no gradient
    random_action          replaces the action while replay warms up      [B], no gradient
    preprocess_experience  computes advantages and returns                [T+1, B], no gradient
    train_step             runs the networks for the loss                 [T, N], with gradients
    calc_loss              computes a loss for each trainable row         [T', N], with gradients
    after_update           updates target networks                        after each gradient step
    after_iteration        updates statistics from collected rows         after each iteration that collected rows

`after_update` and `after_iteration` may update buffers, in place or by assignment. All other hooks are pure: they write
no attribute, so the learner can compile a whole update. No hook may write into a time step.
"""

import abc
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import nn

from alfish import nest, specs
from alfish.data import AlgStep, Experience, LossInfo, TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest


class ReplayNeeds(NamedTuple):
    """Data that replay stores for an off-policy algorithm, in addition to rows."""

    info: tuple[str, ...] = ()  # fields of rollout_step's info to store; Experience.info is a dict of these fields
    return_gamma: float | None = None  # discount of Experience.return_to_go; None means that no returns are stored
    recurrent_state: bool = False  # whether to store states of the memory; windows then start at rows with a state


class UnrollUse(NamedTuple):
    """Ways in which an on-policy algorithm may use an unroll."""

    single_epoch: bool = True  # whether the loss may use a row only once; False if it allows later epochs
    preprocess_each_epoch: bool = False  # whether to call preprocess_experience again before each later epoch
    handles_stale_policies: bool = False  # whether the loss corrects for rows that older policies collected
    has_auxiliary_phase: bool = False  # whether to use `PhasicBatches`, which call `preprocess_auxiliary`


class RLAlgorithm(nn.Module, abc.ABC):
    """Base class: networks, and the hooks that unrollers and the learner call.

    Args:
      observation_spec: nest of spaces, after transforms.
      action_spec: canonical spec of the actions, in which bounded Box leaves are in [-1, 1]; see `alfish.specs`.
      reward_spec: Box of shape (), or (R,) for vector rewards.

    Attributes:
      action_masks: reader of the action mask in observations; None without a mask. Hooks return allowed actions only.
    """

    on_policy: bool  # True trains on the unroll itself, False on batches from replay
    weighted_losses: tuple[str, ...] | None = None  # groups whose loss gets replay's importance weights; None means all
    replay_needs = ReplayNeeds()  # for off-policy algorithms
    unroll_use = UnrollUse()  # for on-policy algorithms
    update_periods: Mapping[str, int] = {}  # group -> n: every n-th update trains the group; 1 for other groups
    feature_module: str | None = None  # path of the submodule whose outputs `Composed` uses in auxiliary losses
    updates_batch_norms: tuple[str, ...] = ()  # submodules that are called with `Moments`, see `networks.bodies`

    num_updates = 0  # number of updates made; the learner writes it
    measures_kl = False  # whether calc_loss must return LossInfo.kl; a learner with a KL-adaptive rate sets it

    known_progress: float | None = None  # `progress` as a Python number, set by the trainer
    progress: torch.Tensor  # spent fraction of the budget, 0-d float64; read by schedules, sent to workers with weights

    def __init__(self, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box):
        super().__init__()
        if not isinstance(getattr(self, "on_policy", None), bool):
            raise UsageError(
                f"the class {type(self).__name__} has no attribute on_policy; set on_policy = True to train on "
                "unrolls, or False to train from replay"
            )
        self.check_specs(observation_spec, action_spec, reward_spec)
        self.observation_spec, self.action_spec, self.reward_spec = observation_spec, action_spec, reward_spec
        self.action_masks = specs.mask_reader(observation_spec, action_spec)
        self.register_buffer("progress", torch.zeros((), dtype=torch.float64))

    @classmethod
    def check_specs(cls, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box) -> None:
        """Raises UsageError, naming the leaf, if the algorithm does not support the specs. Default: does nothing."""

    def progress_number(self) -> float:
        """Returns `progress` as a number; waits for the device unless the trainer has set `known_progress`."""
        return float(self.progress) if self.known_progress is None else self.known_progress

    def tell_progress(self, number: float) -> None:
        """Sets `known_progress`, because reading the buffer `progress` would wait for its device."""
        self.__dict__["known_progress"] = number

    def __getstate__(self) -> dict[str, Any]:
        # Copies, such as those of workers, receive the buffer `progress`, and nobody tells them the number.
        return {name: value for name, value in self.__dict__.items() if name != "known_progress"}

    def initial_state(self, batch_size: int) -> Nest:
        """Returns the state at the start of an episode, `[B, ...]`, such as memory or noise; None means no state."""
        return None

    @abc.abstractmethod
    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        """Returns actions that explore. `time_step` is `[B]`; `state` is already reset where a row is FIRST."""

    def random_action(self, time_step: TimeStep) -> Nest:
        """Returns random actions `[B, ...]` for the warm-up of replay, uniform over all allowed actions."""
        masks = None if self.action_masks is None else self.action_masks(time_step.observation)
        return specs.sample(self.action_spec, len(time_step.step_type), masks)

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        """Returns the most probable actions, not samples. Default: calls `rollout_step`."""
        return self.rollout_step(time_step, state)

    def state_value(self, time_step: TimeStep, state: Nest) -> torch.Tensor:
        """Returns estimates `[B]`, for rows `[B]`, of the return that the policy maximizes. Default: raises."""
        raise NotImplementedError

    def log_prob(self, time_step: TimeStep, action: Nest) -> torch.Tensor:
        """Returns the log-probability `[...]` of actions under the policy that `rollout_step` samples. Default: raises.

        Parts of `Composed` call this only for policies without a state. `time_step` has only observations, `[...]`.
        """
        raise NotImplementedError

    def preprocess_experience(self, experience: Experience) -> Experience:
        """Returns the experience with a new `info`, of T or T + 1 rows for an unroll of T + 1. Default: no change."""
        return experience

    @abc.abstractmethod
    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        """Runs the networks over `[T, N]` rows; `calc_loss` receives the `info` of the result.

        `state` belongs to row 0, or to the first row of `experience.burn_in` (see `networks.burn_in_state`).
        """

    @abc.abstractmethod
    def calc_loss(self, experience: Experience, info: Nest) -> LossInfo:
        """Returns a loss for each row and parameter group; the learner averages over rows, and trains each group."""

    def after_update(self) -> None:
        """Updates target networks, after every gradient step, under no_grad."""

    def after_iteration(self, experience: Experience) -> None:
        """Updates statistics from the transformed rows that an iteration collected, under no_grad."""

    def trains(self, group: str) -> bool:
        """Returns whether the next update trains a group of `update_periods`; if not, the group needs no loss."""
        return (self.num_updates + 1) % self.update_periods.get(group, 1) == 0

    def graph_key(self) -> Hashable:
        """Returns a key of the next update's control flow. Default: whether it trains each group of `update_periods`.

        One graph is compiled for each key, so the key must contain all state on which train_step and calc_loss branch.
        """
        return tuple(map(self.trains, self.update_periods)) or None

    def parameter_groups(self) -> dict[str, Iterable[nn.Parameter]]:
        """Returns the parameters that the loss of each group trains. Each trainable parameter must be in a group."""
        return {"all": self.parameters()}

    def overrides(self, hook: str) -> bool:
        """Returns True if the named hook is overridden; callers skip a hook whose default does nothing."""
        return getattr(type(self), hook) is not getattr(RLAlgorithm, hook)

    @property
    def reward_weights(self) -> torch.Tensor | None:
        """The buffer `[R]` with the weights of a vector reward's entries; None if the algorithm has no such buffer."""
        return getattr(getattr(self, "values", None), "weights", None)

    @property
    def parts_with_statistics(self) -> Sequence[str]:
        """Names of parts of `Composed` whose statistics need collected rows."""
        return ()

    @property
    def has_state(self) -> bool:
        """Returns True if `initial_state` returns tensors."""
        return bool(nest.leaves(self.initial_state(1)))
