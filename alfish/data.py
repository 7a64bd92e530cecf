"""The stream of time steps and the records that rooms hand to one another.

One grammar everywhere: a row's reward and discount belong to the action taken BEFORE it, so an episode of k actions has
k + 1 rows, FIRST MID ... LAST. LAST with discount 0 is termination; LAST with discount 1 is truncation, and its
observation is the true final one, to bootstrap from. The row after LAST is FIRST; the action at LAST is never trained.

Dims: T time, B environments, N samples; time comes first.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from alfish import nest
from alfish.nest import Array, Nest


class StepType:
    """Values of `TimeStep.step_type`."""

    FIRST = 0
    MID = 1
    LAST = 2
    PAD = 3  # filler at the end of a column with fewer rows than its neighbours: nothing happened here


IS_STEP = np.array([False, True, True, False])  # by step type: whether an environment's step arrived in the row


class TimeStep(NamedTuple):
    """What the environment says, `[B]` while acting and `[T, B]` while training."""

    step_type: Array  # [B] int32
    reward: Array  # [B] float32, or [B, R]; 0 at FIRST
    discount: Array  # [B] float32 in [0, 1]; 0 where the environment terminated
    observation: Nest  # [B, ...] each leaf in its space's dtype, float64 as float32
    prev_action: Nest  # [B, ...] the action that was executed, in the algorithm's units; zeros at FIRST
    env_id: Array  # [B] int32


class AlgStep(NamedTuple):
    """What `rollout_step`, `predict_step` and `train_step` return."""

    output: Nest = None  # the action, in the algorithm's units: Box actions in [-1, 1]
    state: Nest = None  # carried to the next step; None without memory
    info: Nest = None  # whatever training needs later


class Experience(NamedTuple):
    """Consecutive rows of B environments; every leaf `[T, B, ...]` except `state`."""

    time_step: TimeStep
    action: Nest  # the sample itself, unclipped
    info: Nest  # of rollout_step; preprocess_experience may replace it
    state: Nest  # [B, ...] the policy's state at row 0, reset where row 0 is FIRST; None without memory
    policy_version: Array | None = None  # [B] int64, how often weights had been published when they were made
    transform_state: Nest = None  # [B, ...] what transforms carried into row 0
    # [K, B] rows before row 0 that memory runs over and that train nothing; `state` is then that of the first of these
    burn_in: TimeStep | None = None
    # [T, B] float32, what follows each row up to its episode's end, discounted, where replay keeps it; nan: not ended
    return_to_go: torch.Tensor | None = None


class Batch(NamedTuple):
    """What the learner reads: experience with a verdict on each row. From replay, also where each window came from."""

    experience: Experience
    mask: torch.Tensor  # [T', N] bool, the rows that train
    env_id: torch.Tensor | None = None  # [N]
    position: torch.Tensor | None = None  # [N] int64, of row 0
    weight: torch.Tensor | None = None  # [N] float32, importance weight of the window


class LossInfo(NamedTuple):
    """What `calc_loss` returns. The learner masks, weighs and averages; the algorithm never does."""

    loss: torch.Tensor | dict[str, torch.Tensor]  # [T', N] a parameter group; a bare tensor where there is one group
    scalar: dict[str, torch.Tensor] | None = None  # a parameter group's additional 0-d loss
    extra: dict[str, torch.Tensor] | None = None  # for summaries: [T', N] (averaged over trained rows) or 0-d
    priority: torch.Tensor | None = None  # [T', N], how much a row deserves to be drawn again: |TD error|
    stop: torch.Tensor | None = None  # 0-d bool: skip this update and the rest of the iteration


def trainable(step_type: Any) -> Any:
    """Which rows train: row t is FIRST or MID, and row t + 1 is MID or LAST.

    The only place that says so, for the learner, the returns, and replay's valid starts and priorities.

    Args:
      step_type: `[T, B]` int32, a tensor or a numpy array.

    Returns:
      `[T-1, B]` bool, of the same kind.
    """
    here, arrival = step_type[:-1], step_type[1:]
    return (here <= StepType.MID) & ((arrival == StepType.MID) | (arrival == StepType.LAST))


def reset_state(state: Nest, initial_state: Nest, step_type: torch.Tensor) -> Nest:
    """The policy state to act from: `initial_state` where a row is FIRST, else `state`.

    The unrollers, the evaluator and memory networks call this before each step; an algorithm never does.

    Args:
      state: nest of `[B, ...]`, or None.
      initial_state: the same nest.
      step_type: `[B]` int32.
    """
    if state is None:
        return None
    return nest.where(step_type == StepType.FIRST, initial_state, state)
