"""Means over updates, for summaries."""

from collections.abc import Collection, Iterable
from typing import Any

import torch

from alfish.learner.updates import UpdateStats
from alfish.processes import replicas

# Number of records that are kept before they are added to the sums. The many small tensors of records fragment the
# memory in which updates allocate large tensors: with 1000 records, SAC in bfloat16 took 2.5 GB and twice as long.
MAX_RECORDS = 64


class UpdateMeans:
    """Means over the updates since the last summary. Numbers stay on the device until `take`.

    Args:
      groups: names of all parameter groups.
    """

    def __init__(self, groups: Collection[str]):
        self._num_groups = len(groups)
        self._records: list[UpdateStats] = []  # records that are not yet added to the sums
        self._sums: dict[str, torch.Tensor] = {}  # [2] each: a sum and a count
        self._extras: set[str] = set()  # keys from `LossInfo.extra`; the count of such a key may be 0

    def add(self, records: Iterable[UpdateStats]) -> None:
        """Adds records. Whenever `MAX_RECORDS` are collected, adds them to the sums."""
        for record in records:
            self._records.append(record)
            if len(self._records) >= MAX_RECORDS:
                self._sum_up()

    @property
    def is_empty(self) -> bool:
        """True if nothing was added since the last `take`."""
        return not (self._records or self._sums)

    def take(self) -> dict[str, float]:
        """Returns the means over the updates of all learners, and removes all records; waits for the device.

        `loss` and `grad_norm` are means of finite values; with several groups they are `loss/GROUP` and so on.
        """
        self._sum_up()
        sums, self._sums = self._sums, {}
        if replicas.is_joined():
            sums = dict(zip(sums, replicas.total(torch.stack(list(sums.values())))))
        counts = {key: count.clamp(min=1) if key in self._extras else count for key, (_, count) in sums.items()}
        means = {key: total / counts[key] for key, (total, _) in sums.items()}
        read = torch.stack([mean.float() for mean in means.values()]).tolist()
        return dict(zip(means, read))

    def state_dict(self) -> dict[str, Any]:
        """Returns the numbers since the last summary, so that a resumed run has the same means.

        The state is empty with several learners, because a checkpoint has the numbers of the first learner only.

        Records are stacked, not summed: with sums, rounding would depend on when checkpoints are saved.
        """
        if replicas.is_joined():  # a checkpoint has the numbers of the first learner only
            return {}
        totals: dict[tuple[str, ...], list[torch.Tensor]] = {}
        extras: dict[str, list[torch.Tensor]] = {}
        for record in self._records:
            totals.setdefault(tuple(record.groups), []).append(record.total)
            for key, pair in record.extra.items():
                extras.setdefault(key, []).append(pair)
        return {
            "sums": dict(self._sums),
            "totals": [[list(groups), torch.stack(rows)] for groups, rows in totals.items()],
            "extras": {key: torch.stack(rows) for key, rows in extras.items()},
            "keys_of_extras": sorted(self._extras),
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continues from a state; an empty state means that there are no numbers yet.

        Args:
          state: result of `state_dict`.
          device: device of the updates.

        Raises:
          ValueError: a tensor of the state has a wrong shape.
        """
        sums, extras = (
            {key: rows.to(device) for key, rows in state.get(name, {}).items()} for name in ("sums", "extras")
        )
        totals = [(list(groups), rows.to(device)) for groups, rows in state.get("totals", [])]
        records = [UpdateStats(groups, row, {}) for groups, rows in totals for row in rows]
        fits = all(rows.shape[1:] == (2 * len(groups),) for groups, rows in totals)
        fits &= all(rows.shape[1:] == (2,) and len(rows) <= len(records) for rows in extras.values())
        if not fits or not all(pair.shape == (2,) for pair in sums.values()):
            raise ValueError("a tensor of the saved means over updates has a wrong shape")
        # The numbers of a key may move to other records. Their sum does not change, because the order is kept.
        for key, rows in extras.items():
            for record, row in zip(records, rows):
                record.extra[key] = row
        self._records = records
        self._sums = sums
        self._extras = set(state.get("keys_of_extras", ()))

    def _sum_up(self) -> None:
        """Adds the records to the sums and removes them."""
        records, self._records = self._records, []
        new: dict[str, torch.Tensor] = {}
        for groups in {tuple(record.groups): None for record in records}:  # groups may train in different updates
            rows = torch.stack([record.total for record in records if tuple(record.groups) == groups]).double()
            finite = rows.isfinite()
            keys = [self.name(kind, group) for kind in ("loss", "grad_norm") for group in groups]
            pairs = torch.stack([torch.where(finite, rows, 0).sum(0), finite.sum(0)], 1)
            for key, pair in zip(keys, pairs, strict=True):
                new[key] = new[key] + pair if key in new else pair
        for key in {key: None for record in records for key in record.extra}:  # an actor may train in some updates only
            new[key] = torch.stack([record.extra[key] for record in records if key in record.extra]).double().sum(0)
            self._extras.add(key)
        for key, pair in new.items():
            self._sums[key] = self._sums[key] + pair if key in self._sums else pair

    def name(self, kind: str, group: str) -> str:
        """Returns the name of a group's scalar; with one group, the name without the group."""
        return kind if self._num_groups == 1 else f"{kind}/{group}"
