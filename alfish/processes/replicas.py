"""Several learners of one run, the ranks of torchrun: sums over learners, and values on which they agree.

Each of W ranks works like a single learner, with 1/W of the environments and of the rows of each update. Sums over rows
become sums over all ranks. All ranks make the same calls in the same order; a call waits for all ranks.

A program that torchrun did not start is a single learner. Sums then return their arguments, and torch.distributed is
not imported. Only this package uses torch.distributed.
"""

import contextlib
import datetime
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alfish.errors import RepeatedError, RunError, UsageError, first_line

if TYPE_CHECKING:
    import torch

# Environment variables that torchrun sets for each process. If one is missing, the process is the only learner, even if
# a scheduler has set the other variables.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# A long timeout, because learners wait while the first learner evaluates and saves. The death of a learner is detected
# immediately by its broken connection.
TIMEOUT = datetime.timedelta(hours=2)
# Seconds to wait for other learners with the same error before the error is reported.
MISTAKE_TIMEOUT = datetime.timedelta(seconds=5)

_group: "_Group | None" = None
_is_apart = False


class _Group:
    """The process group of all learners; `sum` is a functional collective, which compiled graphs may contain.

    Raises:
      UsageError: this version of torch lacks the functional collectives of tested versions.
    """

    def __init__(self) -> None:
        import torch
        import torch.distributed as distributed

        try:
            # This import defines the shapes of the operations in a graph.
            from torch.distributed import _functional_collectives  # noqa: F401

            self._operations: Any = torch.ops._c10d_functional
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"several learners need torch's functional collectives, which torch {torch.__version__} does not have "
                f"in the expected place ({first_line(error)}); install the version in constraints.txt, or train "
                "without torchrun"
            ) from error
        has_gpus = torch.cuda.is_available() and distributed.is_nccl_available()
        # gloo sums tensors on the CPU even if NCCL sums gradients on GPUs.
        distributed.init_process_group("cpu:gloo,cuda:nccl" if has_gpus else "gloo", timeout=TIMEOUT)
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.leave = distributed.destroy_process_group
        self.num_counters = 0
        self.store: Any = distributed.distributed_c10d._get_default_store()
        self._name = distributed.group.WORLD.group_name  # type: ignore[union-attr]

    def sum(self, values: "torch.Tensor") -> "torch.Tensor":
        with self.reaching():
            summed = self._operations.all_reduce(values, "sum", self._name)
            return self._operations.wait_tensor(summed)

    def reported(self, mistake: UsageError) -> UsageError:
        """Returns the error with which this learner ends; an error that all learners have is printed only once.

        The first learner tells the other learners what it reports. The first learner then waits for the other learners,
        because torch's store is in the first learner's process.
        """
        text, told = "alfish/mistake", [f"alfish/told-{rank}" for rank in range(1, self.size)]
        if self.rank == 0:
            self.store.set(text, str(mistake))
            with contextlib.suppress(RuntimeError):  # not all learners have made the mistake
                self.store.wait(told, MISTAKE_TIMEOUT)
            return mistake
        try:
            self.store.wait([text], MISTAKE_TIMEOUT)
            is_repeated = self.store.get(text).decode() == str(mistake)
            self.store.set(told[self.rank - 1], "")
        except RuntimeError:  # the first learner has not made the mistake, or has ended
            is_repeated = False
        return RepeatedError(str(mistake)) if is_repeated else UsageError(f"learner {self.rank}: {mistake}")

    @contextlib.contextmanager
    def reaching(self) -> Iterator[None]:
        """Within the context, raises RunError if torch cannot reach another learner."""
        try:
            yield
        except RuntimeError as error:
            reason = first_line(error).partition(". ")[0]
            raise RunError(
                f"learner {self.rank} cannot reach another learner, which has ended or reports the reason itself "
                f"({reason}); run the same command again to continue from the newest checkpoint"
            ) from error


class Counter:
    """A shared number that each learner can increase and read at any time, without waiting for other learners.

    If there are several counters, all learners must make them in the same order.
    """

    def __init__(self) -> None:
        assert _group is not None
        self._group, self._key = _group, f"alfish/counter-{_group.num_counters}"
        _group.num_counters += 1

    def add(self, amount: int) -> int:
        """Adds an amount to the number, and returns the new number; 0 only reads it."""
        with self._group.reaching():
            return self._group.store.add(self._key, amount)


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Within the context, connects the learners that torchrun started. Does nothing without torchrun.

    A UsageError in the context becomes a `RepeatedError` if the first learner has the same error.

    Raises:
      UsageError: torchrun would restart learners in a way that cannot succeed.
    """
    global _group
    if _group is not None or not all(name in os.environ for name in VARIABLES):
        yield
        return
    _refuse_shared_store()
    _group = _Group()
    try:
        yield
        _group.leave()  # after an error, other learners may wait in a sum, and leaving would wait for them
    except UsageError as mistake:
        raise _group.reported(mistake) from mistake
    finally:
        _group = None


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Within the context, limits sums to this learner: for work that one learner does, or that all do equally."""
    global _is_apart
    before, _is_apart = _is_apart, True
    try:
        yield
    finally:
        _is_apart = before


def is_joined() -> bool:
    """Returns True if torchrun started this process, even as the only learner."""
    return _group is not None and not _is_apart


def rank() -> int:
    """Returns the index of this learner; 0 without torchrun."""
    return 0 if _group is None else _group.rank


def size() -> int:
    """Returns the number of learners; 1 without torchrun."""
    return 1 if _group is None else _group.size


def local_rank() -> int:
    """Returns the index of this learner among the learners of its machine; 0 without torchrun."""
    return 0 if _group is None else int(os.environ["LOCAL_RANK"])


def own_directory(path: str | Path) -> Path:
    """Returns the directory inside `path` for this learner's files; `path` itself for rank 0."""
    return Path(path) / "ranks" / f"rank-{rank():03}" if rank() else Path(path)


def total(values: "torch.Tensor") -> "torch.Tensor":
    """Returns the elementwise sum over learners, bitwise equal in all; `values` without torchrun or in `apart`."""
    return values if _group is None or _is_apart else _group.sum(values)


def mean(own: "torch.Tensor", mask: "torch.Tensor") -> "torch.Tensor":
    """Returns the mean over the rows of all learners; without torchrun or within `apart`, returns `own`.

    Args:
      own: 0-d mean over the rows of this learner.
      mask: bool tensor, True at each row of the mean.
    """
    if not is_joined():
        return own
    import torch

    num_rows = mask.sum()
    summed, count = total(torch.stack([own * num_rows, num_rows]))
    return summed / count.clamp(min=1)


def gather(*numbers: float) -> list[list[float]]:
    """Returns the numbers of all learners: one list per rank. The numbers are exchanged as float64."""
    if _group is None or _is_apart:
        return [list(numbers)]
    import torch

    table = torch.zeros(_group.size, len(numbers), dtype=torch.float64)
    table[_group.rank] = torch.tensor(numbers, dtype=torch.float64)
    return total(table).tolist()


def of_first(text: str) -> str:
    """Returns the text of rank 0."""
    own = text.encode()
    length = int(gather(len(own))[0][0])
    return bytes(int(code) for code in gather(*own[:length], *[0] * (length - len(own)))[0]).decode()


def fraction(count: int, what: str) -> int:
    """Returns the share of each learner in a count, `count / size()`.

    Args:
      count: total of all learners, such as a number of environments.
      what: name of the setting, for the message.

    Raises:
      UsageError: the number is not divisible by the number of learners.
    """
    own, rest = divmod(count, size())
    if rest:
        nearest = " or ".join(str(n) for n in (own * size(), (own + 1) * size()) if n)
        raise UsageError(f"{what} is {count}, which {size()} learners cannot divide equally; set it to {nearest}")
    return own


def seed_of(seed: int) -> int:
    """Returns the seed of this learner's environments and noise; for rank 0, the run's seed."""
    if rank() == 0:
        return seed
    import numpy as np

    return int(np.random.SeedSequence(seed, spawn_key=(2, rank())).generate_state(1)[0] >> 1)


def check_equal(tensors: "Mapping[str, torch.Tensor]") -> None:
    """Checks that tensors are bitwise equal in all learners.

    Args:
      tensors: tensors by name.

    Raises:
      RunError: a tensor is not equal in all learners; the message names the first such tensor.
    """
    if not is_joined():
        return
    checksums = gather(*(_checksum(tensor) for tensor in tensors.values()))
    for name, of_ranks in zip(tensors, zip(*checksums, strict=True), strict=True):
        if len(set(of_ranks)) > 1:
            differing = next(rank for rank, each in enumerate(of_ranks) if each != of_ranks[0])
            raise RunError(
                f"{name} differs between learners 0 and {differing}; code that updates it from rows, such as "
                "after_iteration or a running mean in a module, must sum over all learners with "
                "alfish.processes.replicas.total"
            )


def _checksum(tensor: "torch.Tensor") -> int:
    import torch

    content: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(content)


def _refuse_shared_store() -> None:
    """Raises UsageError if restarted learners could find the address of a dead learner.

    torchrun shares its store with the learners if TORCHELASTIC_USE_AGENT_STORE is true (pytorch#135712).
    """
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("true", "1"):
        mistake = UsageError if os.environ["RANK"] == "0" else RepeatedError  # the first learner reports it
        raise mistake(
            f"torchrun has --max-restarts={restarts} and shares its store with the learners "
            "(TORCHELASTIC_USE_AGENT_STORE), in which a restarted learner may find the address of a dead learner; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and use --standalone or --rdzv-backend=c10d"
        )
