"""The stream of time steps, and the records that packages exchange.

A row's reward and discount belong to the action taken BEFORE it, so an episode of k actions has k + 1 rows: FIRST, MID,
..., LAST. LAST with discount 0 is termination. LAST with discount 1 is truncation: its observation is the true final
one, and values are bootstrapped from it. The row after LAST is FIRST; the action at LAST is never trained.

Dims: T time, B environments, N samples; time comes first.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from alfish.nest import Array, Nest


class StepType:
    """Values of `TimeStep.step_type`."""

    FIRST = 0
    MID = 1
    LAST = 2
    PAD = 3  # padding at the end of a column with fewer rows than its neighbours


IS_STEP = np.array([False, True, True, False])  # by step type: whether the row is the result of an environment step


class TimeStep(NamedTuple):
    """A row of the environment's output, `[B]` while acting and `[T, B]` while training."""

    step_type: Array  # [B] int32
    reward: Array  # [B] float32, or [B, R]; 0 at FIRST
    discount: Array  # [B] float32 in [0, 1]; 0 where the environment terminated
    observation: Nest  # [B, ...] each leaf in its space's dtype, float64 as float32
    prev_action: Nest  # [B, ...] the action that was executed, in the algorithm's units; zeros at FIRST
    env_id: Array  # [B] int32


class AlgStep(NamedTuple):
    """The result of `rollout_step`, `predict_step` and `train_step`."""

    output: Nest = None  # the action, in the algorithm's units: Box actions in [-1, 1]
    state: Nest = None  # carried to the next step; None without memory
    info: Nest = None  # data for training


class Experience(NamedTuple):
    """Consecutive rows of B environments; every leaf `[T, B, ...]` except `state`."""

    time_step: TimeStep
    action: Nest  # as sampled, before it is clipped
    info: Nest  # of rollout_step; preprocess_experience may replace it
    state: Nest  # [B, ...] the policy's state at row 0, reset where row 0 is FIRST; None without memory
    policy_version: Array | None = None  # [B] int64, number of weight publications before the rows
    transform_state: Nest = None  # [B, ...] state of the transforms before row 0
    # [K, B] rows before row 0 that warm a memory up and do not train; `state` then belongs to the first of them
    burn_in: TimeStep | None = None
    # [T, B] float32, discounted sum of the rewards after each row, if replay keeps it; nan: the episode has not ended
    return_to_go: torch.Tensor | None = None


class Batch(NamedTuple):
    """A minibatch: experience, and a mask of the rows that train. From replay, also the place of each window."""

    experience: Experience
    mask: torch.Tensor  # [T', N] bool, the rows that train
    env_id: torch.Tensor | None = None  # [N]
    position: torch.Tensor | None = None  # [N] int64, of row 0
    weight: torch.Tensor | None = None  # [N] float32, importance weight of the window


class LossInfo(NamedTuple):
    """The result of `calc_loss`. The learner masks, weighs and averages it."""

    loss: torch.Tensor | dict[str, torch.Tensor]  # [T', N] for each parameter group; a tensor if there is one group
    scalar: dict[str, torch.Tensor] | None = None  # additional 0-d loss of a parameter group
    # For summaries: [T', N] (averaged over rows that train) or 0-d. The learner detaches these, and the priority.
    extra: dict[str, torch.Tensor] | None = None
    priority: torch.Tensor | None = None  # [T', N], priority of drawing a row again: |TD error|
    # [T', N]: skip this update and the rest of the iteration, if the mean over the rows that train is positive
    stop: torch.Tensor | None = None
    buffers: dict[torch.Tensor, torch.Tensor] | None = None  # new values, written unless the update is skipped


def trainable(step_type: Any) -> Any:
    """Returns the mask of rows that train: row t is FIRST or MID, and row t + 1 is MID or LAST.

    The learner, the returns, and replay's starts and priorities all use this mask.

    Args:
      step_type: `[T, B]` int32, a tensor or a numpy array.

    Returns:
      `[T-1, B]` bool, of the same kind.
    """
    here, arrival = step_type[:-1], step_type[1:]
    return (here <= StepType.MID) & ((arrival == StepType.MID) | (arrival == StepType.LAST))
