"""The stream of time steps, and the records that are passed between packages.

A row's reward and discount belong to the action taken BEFORE the row, so an episode of k actions has k + 1 rows: FIRST,
MID, ..., LAST. A LAST row with discount 0 is a termination. A LAST row with discount 1 is a truncation: it has the true
final observation, and returns bootstrap from its value. After LAST comes FIRST; actions at LAST are never trained on.

Dimensions: T time, B environments, N samples of a minibatch, T' the rows at the beginning of a sample that have a
loss; time comes first.
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
    PAD = 3  # padding at the end of a shorter column


IS_STEP = np.array([False, True, True, False])  # for each step type, whether the row results from an environment step


class TimeStep(NamedTuple):
    """A row of the environment's output: `[B]` while acting, `[T, B]` while training."""

    step_type: Array  # [B] int32
    reward: Array  # [B] float32, or [B, R]; 0 at FIRST
    discount: Array  # [B] float32 in [0, 1]; 0 where the environment terminated
    observation: Nest  # [B, ...] leaves in the dtypes of their spaces, with float32 instead of float64
    prev_action: Nest  # [B, ...] the action executed before the row, in the algorithm's units; zeros at FIRST
    env_id: Array  # [B] int32, id of each environment, unique across workers


class AlgStep(NamedTuple):
    """The result of the hooks `rollout_step`, `predict_step` and `train_step`."""

    output: Nest = None  # the action, in the algorithm's units: Box actions are in [-1, 1]
    state: Nest = None  # state for the next step; None without memory
    info: Nest = None  # data for training


class Ends(NamedTuple):
    """LAST rows of environments that end an episode and begin the next one in the same vector step."""

    ended: Array  # [T, B] bool, whether a LAST row belongs between rows t and t + 1 of the column
    time_step: TimeStep  # [T, B] the LAST rows where `ended`; other entries are not read


class Experience(NamedTuple):
    """Consecutive rows of B environments; leaves are `[T, B, ...]`, unless a comment says otherwise."""

    time_step: TimeStep
    action: Nest  # action as sampled, before clipping
    info: Nest  # info of rollout_step; preprocess_experience may replace it
    state: Nest  # [B, ...] policy state at row 0, reset where row 0 is FIRST; None without memory
    policy_version: Array | None = None  # [B] int64, number of weight publications before the rows were collected
    transform_state: Nest = None  # [B, ...] state of the transforms before row 0
    # [K, B] rows before row 0 that only warm up a memory; if present, `state` belongs to the first of these rows
    burn_in: TimeStep | None = None
    # [T, B] float32, discounted sum of the rewards after each row, if replay keeps it; nan in an unfinished episode
    return_to_go: torch.Tensor | None = None
    # LAST rows that are stored separately; `in_line` inserts them; None means that no LAST row is missing from the rows
    ends: Ends | None = None
    trains: torch.Tensor | None = None  # [T', N] bool, rows that the loss uses; set only in an update, see `Batch.mask`


class Batch(NamedTuple):
    """A minibatch: experience and a mask of the rows that the loss uses; from replay, also each window's position."""

    experience: Experience
    mask: torch.Tensor  # [T', N] bool, True for rows that the loss uses
    env_id: torch.Tensor | None = None  # [N] environment of the window
    position: torch.Tensor | None = None  # [N] int64, position of the window's row 0 in replay
    weight: torch.Tensor | None = None  # [N] float32, importance weight of the window


class LossInfo(NamedTuple):
    """The result of `calc_loss`; the learner masks, weighs and averages the losses."""

    loss: torch.Tensor | dict[str, torch.Tensor]  # [T', N] loss of each parameter group; a tensor for a single group
    scalar: dict[str, torch.Tensor] | None = None  # additional 0-d losses, by parameter group
    # For summaries: [T', N] (averaged over `Batch.mask`) or 0-d. The learner detaches `extra` and `priority`.
    extra: dict[str, torch.Tensor] | None = None
    priority: torch.Tensor | None = None  # [T', N] priority of drawing a row again, such as |TD error|
    # [T', N] The learner skips this update and the rest of the iteration if the mean over `Batch.mask` is positive.
    stop: torch.Tensor | None = None
    buffers: dict[torch.Tensor, torch.Tensor] | None = None  # new values of buffers, unless the update is skipped
    # [T', N] KL(rollout policy, policy) in nats; `learner.kl_adaptive` adapts a learning rate to it
    kl: torch.Tensor | None = None


class InLine(NamedTuple):
    """The result of `in_line`."""

    experience: Experience  # [R, B] all rows in order of time, with PAD rows at the ends of columns
    acted: torch.Tensor | None  # [T, B] int64, index in `experience` of each input row; None means that no row moved


def in_line(experience: Experience, num_rows: int | None = None) -> InLine:
    """Returns an unroll in which the LAST rows of `experience.ends` are inserted where their episodes ended.

    The action and the info of a LAST row are those of the row before it. R is the largest number of rows of a column;
    computing R waits for a GPU. Existing PAD rows move to the ends of columns.

    Args:
      experience: rows `[T, B]`, arrays or tensors; an on-policy unroll ends with a row from which no step was taken.
        Without `ends`, no row moves.
      num_rows: number R of rows of the result, at least the largest number of rows of a column; None computes R.

    Returns:
      The experience as tensors, without `ends`, and the new index of each input row, -1 for PAD rows.
    """
    if experience.ends is None:
        return InLine(experience, None)
    given = nest.tensors((experience.time_step, experience.action, experience.info))
    ended, last = nest.tensors(experience.ends)
    step_type = given[0].step_type
    present, num_steps = step_type != StepType.PAD, len(ended)
    is_followed = torch.zeros_like(present)
    is_followed[:num_steps] = ended
    number = present.long() + is_followed
    end = number.cumsum(0)
    num_rows = int(end[-1].max()) if num_rows is None else num_rows
    # PAD rows, and entries of `last` without an end, are written to an additional last row, which is cut off.
    row = torch.where(present, end - number, num_rows)
    last_row = torch.where(ended, end[:num_steps] - 1, num_rows)
    column = torch.arange(step_type.shape[1], device=step_type.device)

    def placed(leaf: torch.Tensor, at_end: torch.Tensor) -> torch.Tensor:
        rows = leaf.new_zeros(num_rows + 1, *leaf.shape[1:])
        rows[row, column] = leaf
        rows[last_row, column] = at_end
        return rows[:num_rows]

    follows = last, *nest.at(given[1:], slice(num_steps))
    time_step, action, info = nest.map(placed, given, follows)
    time_step.step_type.masked_fill_(torch.arange(num_rows, device=column.device)[:, None] >= end[-1], StepType.PAD)
    others = nest.tensors((experience.state, experience.policy_version, experience.transform_state))
    return InLine(Experience(time_step, action, info, *others), torch.where(present, row, -1))


def trainable(step_type: Any) -> Any:
    """Returns the mask of trainable rows: row t is trainable if it is FIRST or MID and row t + 1 is MID or LAST.

    The learner, the returns, and replay all use this mask; replay uses it for window starts and priorities.

    Args:
      step_type: `[T, B]` int32, a tensor or a numpy array.

    Returns:
      `[T-1, B]` bool, a tensor or a numpy array like `step_type`.
    """
    here, arrival = step_type[:-1], step_type[1:]
    return (here <= StepType.MID) & ((arrival == StepType.MID) | (arrival == StepType.LAST))
