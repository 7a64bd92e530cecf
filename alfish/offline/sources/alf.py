"""The replay buffer in a checkpoint of ALF: `ckpt-N-replay_buffer`, or a single checkpoint file.

Each environment has a ring: the row at position p has the index p modulo the ring's length. An episode whose beginning
was overwritten starts with its oldest row. The algorithm's `rollout_info` is not read. The format declares no spaces.
"""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alfish import nest
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.offline.episode import Episode, EpisodeSource, Unreadable, episodes_of_rows
from alfish.offline.limits import check_tensor
from alfish.offline.pickles import DType, numpy_number
from alfish.offline.recorded_spaces import NO_SPACES, Spaces
from alfish.offline.sources.source_files import check_zip, existing_file, said

REPLAY = "_replay_buffer."
FIELDS = ("step_type", "reward", "discount", "observation")


class ALFSource(EpisodeSource):
    """Reads the episodes of `alf:checkpoint`.

    Args:
      where: path of the file.
      environment: spaces of the environment, which are not used.

    Raises:
      UsageError: the file does not exist, is damaged, or does not hold exactly one replay buffer.
    """

    def __init__(self, where: str, environment: Spaces = NO_SPACES):
        path = existing_file(where, "a checkpoint of ALF")
        super().__init__(f"alf:{where}")
        check_zip(path)
        entries = _replay(_load(path), where)
        stored = {name: _nest_below(entries, ("time_step", name)) for name in FIELDS}
        self._action = _nest_below(entries, ("action",))
        lacking = [name for name, value in [*stored.items(), ("action", self._action)] if value is None]
        if "_buffer0" in entries:
            raise UsageError(
                f"{where} was saved by an old version of ALF, whose entries (_buffer0, _buffer1, ...) have no names; "
                "save it again with a newer version"
            )
        if lacking:
            raise UsageError(f"the replay buffer in {where} has no {' and no '.join(lacking)}")
        self._size, self._pos = (
            _counts(entries[name], f"{where}: {name}") for name in ("_current_size", "_current_pos")
        )
        shape = stored["step_type"].shape[:2]
        for label, leaf in nest.named_leaves((stored, self._action), "_replay_buffer"):
            check_tensor(leaf, f"{where}: {label}")
            if leaf.dim() < 2 or leaf.shape[:2] != shape or not self._pos.shape == self._size.shape == shape[:1]:
                raise UsageError(
                    f"{where} is damaged: {label} has shape {list(leaf.shape)}, but rings of {list(shape)} rows are "
                    "expected; copy it again"
                )
        self._rows, self._length = stored, shape[1]
        is_full = self._size == self._length  # the position of a full ring may be counted modulo its length
        if not ((self._size >= 0) & (self._size <= self._length) & (self._pos >= self._size * ~is_full)).all():
            raise UsageError(
                f"{where} is damaged: rings of {self._length} rows hold {self._size.tolist()}, written up to row "
                f"{self._pos.tolist()}; copy it again"
            )

    def episodes(self) -> Iterator[Episode | Unreadable]:
        for env, (pos, size) in enumerate(zip(self._pos, self._size)):
            order = torch.from_numpy(np.arange(pos - size, pos) % self._length)

            def read(leaf: torch.Tensor, env: int = env, order: torch.Tensor = order) -> np.ndarray:
                return leaf[env][order].numpy()

            step_type, reward, discount = (read(self._rows[name]) for name in FIELDS[:3])
            if size and step_type[0] != 0:
                self.note(
                    f"environment {env}: the beginning of its oldest episode was overwritten; its later rows are kept"
                )
            observation, action = nest.map(read, self._rows["observation"]), nest.map(read, self._action)
            yield from episodes_of_rows(str(env), step_type, reward, discount, observation, action)


def _load(path: Path) -> Any:
    """Loads the file without executing its content. Tensors stay on disk until they are read."""
    with open(path, "rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    if not is_zip:
        raise UsageError(f"{path} is not a checkpoint of ALF, or was saved by torch before 1.6; save it again")
    with torch.serialization.safe_globals(_numpy_numbers()):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            asked = str(error).split("GLOBAL ")
            named = f": it tries to load {asked[1].split()[0]}" if len(asked) > 1 else ""
            raise UsageError(
                f"{path} is refused{named}; a checkpoint of ALF holds tensors, numbers and names, and nothing in this "
                "file was executed"
            ) from error
        except (RuntimeError, OSError, EOFError, ValueError, LookupError, MemoryError) as error:
            raise UsageError(
                f"{path} is truncated or damaged: none of its {path.stat().st_size:,} bytes are readable, because the "
                f"table of contents at its end is missing; copy it again ({said(error)})"
            ) from error


def _counts(value: Any, name: str) -> np.ndarray:
    """Returns the integers of a tensor as an array `[N]` int64."""
    counts = check_tensor(value, name).numpy().reshape(-1)
    if counts.dtype.kind not in "iu":
        raise UsageError(f"{name} has dtype {counts.dtype}, but integers are expected; copy it again")
    return counts.astype(np.int64)


def _numpy_numbers() -> list[Any]:
    """Returns the functions that may construct a numpy number, such as `global_step`, each with its name in a file."""
    numbers = [(numpy_number, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    return [(DType, "numpy.dtype"), *numbers]


def _replay(checkpoint: Any, where: str) -> dict[str, torch.Tensor]:
    """Returns the entries of a checkpoint's only replay buffer by the last part of their names."""
    entries = checkpoint.get("algorithm", checkpoint) if isinstance(checkpoint, dict) else {}
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in entries.items():
        prefix, marker, tail = str(key).rpartition(REPLAY)
        if marker and isinstance(value, torch.Tensor):
            found.setdefault(prefix, {})[tail] = value
    found = {prefix: tails for prefix, tails in found.items() if {"_current_pos", "_current_size"} <= tails.keys()}
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        names = ", ".join(prefix + REPLAY.rstrip(".") for prefix in sorted(found))
        raise UsageError(
            f"{where} holds {len(found)} replay buffers ({names}); save a checkpoint with only one of them"
        )
    raise UsageError(
        f"{where} holds no replay buffer: ALF saves one in ckpt-N-replay_buffer, but only if "
        "TrainerConfig.checkpoint_replay_buffer (or enable_checkpoint) is set"
    )


def _nest_below(entries: dict[str, torch.Tensor], path: tuple[str, ...]) -> Nest:
    """Returns the nest of the leaves whose names begin with `path`; None if there is none."""
    tree: dict[str, Any] = {}
    for key, value in entries.items():
        parts = tuple(key.replace("|", ".").split("."))
        if parts[: len(path)] != path:
            continue
        rest = parts[len(path) :]
        if not rest:
            return value
        place = tree
        for part in rest[:-1]:
            place = place.setdefault(part, {})
        place[rest[-1]] = value
    return _with_tuples(tree) if tree else None


def _with_tuples(tree: Any) -> Nest:
    """Returns the nest in which each dict with the keys 0, 1, 2, ... is replaced by a tuple."""
    if not isinstance(tree, dict):
        return tree
    children = {key: _with_tuples(child) for key, child in tree.items()}
    if sorted(children) == sorted(map(str, range(len(children)))):
        return tuple(children[str(i)] for i in range(len(children)))
    return children
