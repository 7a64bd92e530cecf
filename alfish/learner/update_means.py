"""Means over updates, for summaries."""

from collections.abc import Collection, Iterable

import torch

from alfish.learner.updates import UpdateStats
from alfish.processes import replicas

# Number of records after which they are added to the sums. The records' small tensors lie between the large tensors of
# an update, and malloc rarely reuses the memory between them: with 1000 records, SAC in bfloat16 took 2.5 GB and twice
# as long.
MAX_RECORDS = 64


class UpdateMeans:
    """Means over the updates since the last summary. The updates' numbers stay on the device until `take`.

    Args:
      groups: names of all parameter groups.
    """

    def __init__(self, groups: Collection[str]):
        self._num_groups = len(groups)
        self._records: list[UpdateStats] = []  # records that are not yet added to the sums
        self._sums: dict[str, torch.Tensor] = {}  # [2] each: a sum and a count
        self._extras: set[str] = set()  # keys of extras, some of which may have no rows

    def add(self, records: Iterable[UpdateStats]) -> None:
        """Adds records, and sums them up whenever there are `MAX_RECORDS`."""
        for record in records:
            self._records.append(record)
            if len(self._records) >= MAX_RECORDS:
                self._sum_up()

    @property
    def is_empty(self) -> bool:
        """True if nothing was added since the last `take`."""
        return not (self._records or self._sums)

    def take(self) -> dict[str, float]:
        """Returns the means over the updates of all learners, and removes the numbers; waits for the device.

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

    def _sum_up(self) -> None:
        """Adds the records to the sums and removes them."""
        records, self._records = self._records, []
        new: dict[str, torch.Tensor] = {}
        for groups in {tuple(record.groups): None for record in records}:  # groups may train at different updates
            rows = torch.stack([record.total for record in records if tuple(record.groups) == groups]).double()
            finite = rows.isfinite()
            keys = [self.name(kind, group) for kind in ("loss", "grad_norm") for group in groups]
            pairs = torch.stack([torch.where(finite, rows, 0).sum(0), finite.sum(0)], 1)
            for key, pair in zip(keys, pairs, strict=True):
                new[key] = new[key] + pair if key in new else pair
        for key in {key: None for record in records for key in record.extra}:  # an actor may train at some updates
            new[key] = torch.stack([record.extra[key] for record in records if key in record.extra]).double().sum(0)
            self._extras.add(key)
        for key, pair in new.items():
            self._sums[key] = self._sums[key] + pair if key in self._sums else pair

    def name(self, kind: str, group: str) -> str:
        """Returns the name of a group's number; with one group, only the number's kind."""
        return kind if self._num_groups == 1 else f"{kind}/{group}"
