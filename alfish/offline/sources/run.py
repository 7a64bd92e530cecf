"""The rows that a run collected, from its newest checkpoint in `replay/`.

Rows are in the algorithm's units, so the environment's spaces are needed to convert them to the environment's units.
The checkpoint contains the spaces. The configuration of the run is not read, and no environment or network is built.
"""

import functools
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from alfish import nest
from alfish.data import StepType
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.offline.episode import Episode, EpisodeSource, Unreadable, episodes_of_rows
from alfish.offline.limits import check_memory, check_nest, check_tensor
from alfish.offline.recorded_spaces import NO_SPACES, Spaces, spaces_by_policy
from alfish.offline.sources.recognition import said_of_directory
from alfish.offline.sources.source_files import existing_directory
from alfish.parameters.description import CONFIG_FILE
from alfish.replay import AlignedRingBuffer, RingBuffer
from alfish.runs.checkpoints import checkpoints_of
from alfish.specs import ActionUnits, ObservationUnits, observation_spec


class RunSource(EpisodeSource):
    """Reads the episodes of `run:root_dir`.

    Args:
      where: directory of an off-policy run of `alfish train`.
      environment: spaces of the environment, used if the run did not store its spaces.

    Raises:
      UsageError: the run does not exist, has no replay, or its spaces are unknown.
    """

    def __init__(self, where: str, environment: Spaces = NO_SPACES):
        root_dir = existing_directory(where, "a run of `alfish train`")
        if not (root_dir / CONFIG_FILE).exists() and not (root_dir / "checkpoints").exists():
            raise UsageError(f"{where} is not a run of `alfish train`; {said_of_directory(root_dir)}")
        self._replay = checkpoints_of(root_dir, "replay")
        if not self._replay.steps():
            raise UsageError(
                f"{where} has no replay/checkpoint-*.pt: an on-policy run keeps no rows, and with ReplayBatches.save = "
                "False none are saved"
            )
        checkpoints = checkpoints_of(root_dir)
        _, state = checkpoints.load("latest", spaces_by_policy) if checkpoints.steps() else (0, {})
        by_policy = spaces_by_policy(state)
        if "" not in by_policy:
            raise UsageError(
                f"run:{where} has the rows of several policies ({', '.join(by_policy)}), which cannot be read as the "
                "data of one environment; use the replay of a run with one policy"
            )
        stored = by_policy[""]
        spaces = environment if stored is None else Spaces(stored.observation, stored.action)
        if None in spaces:
            raise UsageError(
                f"run:{where} was saved by an older version, without its environment's spaces; give the environment "
                "that it was trained in (--env_id, or OfflineBuffer.env_id)"
            )
        super().__init__(f"run:{where}", spaces)
        if others := list(root_dir.glob("ranks/rank-???/replay")):
            self.warn(f"the rows of {len(others)} other learners, in {where}/ranks, are not read")

    def episodes(self) -> Iterator[Episode | Unreadable]:
        _, state = self._replay.load("latest", _check_state)
        sizes = (state["pos"] - state["start"]).clamp(max=state["length"]).tolist()
        make = functools.partial(AlignedRingBuffer, end_fraction=1.0) if "end_before" in state else RingBuffer
        ring = make(state["length"] * len(sizes), len(sizes), state_period=state.get("state_period"))
        ring.load_state_dict(state)
        for column, size in enumerate(sizes):
            if size == 0:
                continue
            step = nest.map(lambda leaf: leaf[:, 0].numpy(), ring.stream(column).time_step)
            if step.step_type[0] != StepType.FIRST:
                self.note(
                    f"environment {column}: the beginning of its oldest episode was overwritten; later rows are kept"
                )
            assert self.spaces.observation is not None and self.spaces.action is not None
            self._check_raw(step.observation, observation_spec(self.spaces.observation))
            observation = ObservationUnits(self.spaces.observation).to_environment(step.observation)
            # Uses the executed action from the next row, because the sampled action may be out of bounds.
            executed = nest.map(lambda leaf: np.concatenate([leaf[1:], leaf[:1]]), step.prev_action)
            actions = ActionUnits(self.spaces.action).stretch(executed)
            yield from episodes_of_rows(str(column), step.step_type, step.reward, step.discount, observation, actions)

    def _check_raw(self, observation: Nest, spec: Nest) -> None:
        """Raises UsageError if leaves `[T, ...]` are features of a `FrozenEncoder` instead of raw observations."""
        for (name, leaf), space in zip(nest.named_leaves(observation, "observation"), nest.leaves(spec)):
            if leaf.shape[1:] != space.shape or leaf.dtype != space.dtype:
                raise UsageError(
                    f"{self.name} stores {leaf.shape[1]} features of an encoder instead of the {name}; record episodes "
                    "of its policy with `alfish record`"
                )


def _check_state(state: Any) -> None:
    """Checks that a state is the state of a replay, and has as many rows as it declares.

    Raises:
      UsageError, LookupError, TypeError, ValueError: the state fails a check.
    """
    by_row = "end_before" if "end_before" in state else "startable"
    pos, start, of_rows = (check_tensor(state[name], name) for name in ("pos", "start", by_row))
    length, num_columns = operator.index(state["length"]), len(pos)
    if length < 1 or tuple(of_rows.shape) != (length, num_columns) or start.shape != pos.shape:
        raise ValueError(f"its {num_columns} columns of {length} rows do not match its arrays")
    if not ((start >= 0) & (start <= pos)).all():
        raise ValueError("its positions are not valid")
    check_nest(state["rows"], "rows")
    leaves = [check_tensor(leaf, "rows") for leaf in nest.leaves(state["rows"])]
    filled = min(int(pos.max()), length) * num_columns
    if any(leaf.shape[:1] != (filled,) for leaf in leaves):
        raise ValueError(f"it does not have {filled} rows")
    if by_row == "end_before":
        _check_ends(state, of_rows, leaves)
    row_bytes = sum(leaf[:1].nbytes for leaf in leaves)
    check_memory(row_bytes * filled, "the replay")  # rows that were never written use no memory


def _check_ends(state: Any, end_before: torch.Tensor, rows: list[torch.Tensor]) -> None:
    """Checks the LAST rows in the state of an `AlignedRingBuffer`; raises as `_check_state` does."""
    num_ends = int(check_tensor(state["num_ends"], "num_ends"))
    check_nest(state["last"], "last")
    leaves = [check_tensor(leaf, "last") for leaf in nest.leaves(state["last"])]
    alike = len(leaves) == len(rows) and all(a.shape[1:] == b.shape[1:] for a, b in zip(leaves, rows))
    if not alike or len({len(leaf) for leaf in leaves}) != 1:
        raise ValueError("its last rows of episodes do not match its rows")
    if end_before.dtype != torch.int64 or (end_before >= num_ends).any():
        raise ValueError("it refers to LAST rows that do not exist")
