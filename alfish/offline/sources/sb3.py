"""Stable-Baselines3's replay buffers, pickled by `model.save_replay_buffer`.

The pickle is read without Stable-Baselines3, and without executing code (`pickles`). Each environment is a column, read
from its oldest row. Box actions in the file are in [-1, 1]; they are stretched to the bounds of the space.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from alfish import nest, specs
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.offline.episode import Episode, EpisodeSource, Unreadable
from alfish.offline.limits import check_nest
from alfish.offline.pickles import Inert, load, shown
from alfish.offline.recorded_spaces import MAX_SIZE, NO_SPACES, Spaces
from alfish.offline.sources import flat
from alfish.offline.sources.source_files import existing_file

SPACES = (
    "box.Box",
    "discrete.Discrete",
    "multi_discrete.MultiDiscrete",
    "multi_binary.MultiBinary",
    "dict.Dict",
    "tuple.Tuple",
)
# Classes that a saved buffer refers to, each read as an inert object. The generators belong to the spaces.
INERT = (
    "stable_baselines3.common.buffers.ReplayBuffer",
    "stable_baselines3.common.buffers.DictReplayBuffer",
    "stable_baselines3.common.buffers.NStepReplayBuffer",
    "stable_baselines3.her.her_replay_buffer.HerReplayBuffer",
    "stable_baselines3.her.goal_selection_strategy.GoalSelectionStrategy",
    *(f"{gym}.spaces.{name}" for gym in ("gymnasium", "gym") for name in SPACES),
    "torch.device",
    "numpy.random._pickle.__generator_ctor",
    "numpy.random._pickle.__bit_generator_ctor",
    "numpy.random._generator.Generator",
    "numpy.random._pcg64.PCG64",
    "numpy.random._pcg64.__pyx_unpickle_PCG64",
    "numpy.random.bit_generator.SeedSequence",
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence",
    "numpy.random._pickle.__randomstate_ctor",  # used by older gym
    "numpy.random.mtrand.RandomState",
    "numpy.random._mt19937.MT19937",
    "gymnasium.utils.seeding.RandomNumberGenerator",
    "gym.utils.seeding.RandomNumberGenerator",
    "gym.utils.seeding.RandomNumberGenerator._generator_ctor",
)
ARRAYS = ("observations", "actions", "rewards", "dones", "timeouts", "next_observations")
SEQUENCES = (list, tuple, np.ndarray)
MAX_PARTS = 300  # maximum number of parts of a space: the space and all spaces nested in it
NEEDED = ("observations", "actions", "rewards", "dones", "pos", "full", "observation_space", "action_space")


class SB3Source(EpisodeSource):
    """Reads the episodes of `sb3:file.pkl`.

    Args:
      where: path of the file.
      environment: spaces of the environment, which are not used.
      dones: meaning of `dones` in a buffer that does not record time-outs, 'terminated' or 'truncated'; None means
        'truncated', with a warning.

    Raises:
      UsageError: the file does not exist or is not a replay buffer, or `dones` is given although the buffer records
        which episodes timed out.
    """

    def __init__(self, where: str, environment: Spaces = NO_SPACES, dones: str | None = None):
        path = existing_file(where, "a replay buffer of Stable-Baselines3")
        with open(path, "rb") as file:
            is_zip = file.read(4) == b"PK\3\4"
        if is_zip:
            raise UsageError(
                f"{where} is a zip file, as `model.save` writes; the replay buffer is in the file that "
                "`model.save_replay_buffer` writes"
            )
        buffer = load(path, "a replay buffer of Stable-Baselines3", INERT)
        fields = buffer.attributes if isinstance(buffer, Inert) else {}
        lacking = [name for name in NEEDED if name not in fields]
        if lacking:
            found = buffer.path if isinstance(buffer, Inert) else type(buffer).__name__
            raise UsageError(f"{where} holds a {found}, which is not a replay buffer: it has no {', '.join(lacking)}")
        declared = Spaces(*(_space(fields[name], where, _Size()) for name in ("observation_space", "action_space")))
        super().__init__(f"sb3:{where}", declared)
        self._fields: dict[str, Any] = {
            "timeouts": None,
            "next_observations": None,
            "handle_timeout_termination": "timeouts" in fields,
            **fields,
        }
        self._num_rows, self._num_columns = self._check_arrays()
        self._order = self._rows_by_age()
        if self._fields["next_observations"] is None:
            self.note("the buffer was made with optimize_memory_usage, so final observations are missing")
        self._dones = dones
        if self._says_timeouts and dones is not None:
            raise UsageError(f"{where} records which episodes timed out; leave out the option dones={dones}")
        if not self._says_timeouts and dones is None:
            self.warn(
                "the buffer was made with handle_timeout_termination = False, so its dones do not say whether an "
                f"episode terminated or timed out: all count as truncated; write sb3:{where}?dones=terminated if they "
                "are terminations, as in CleanRL's scripts, or ?dones=truncated"
            )

    @property
    def _says_timeouts(self) -> bool:
        return bool(self._fields["handle_timeout_termination"]) and self._fields["timeouts"] is not None

    def _check_arrays(self) -> tuple[int, int]:
        """Returns the numbers of rows and columns of all arrays.

        Raises:
          UsageError: a field is not an array, or arrays differ in their numbers of rows or columns.
        """
        for name in ARRAYS:
            check_nest(self._fields[name], f"{self.name}: {name}")
        named = [leaf for name in ARRAYS for leaf in nest.named_leaves(self._fields[name], name)]
        for label, values in named:
            if not isinstance(values, np.ndarray):
                raise UsageError(f"{self.name}: {label} is a {type(values).__name__}, but an array is expected")
            flat.check_rows(values, f"{self.name}: {label}")
        expected = self._fields["rewards"].shape[:2]
        for label, values in named:
            if values.ndim < 2 or values.shape[:2] != expected:
                raise UsageError(
                    f"{self.name}: {label} has shape {list(values.shape)}, but rewards has {list(expected)}; all "
                    "arrays must have equal numbers of rows and environments"
                )
        return expected

    def _rows_by_age(self) -> np.ndarray:
        """Returns the indices of written rows, the oldest first."""
        pos, is_full = self._fields["pos"], self._fields["full"]
        if not isinstance(pos, (int, np.integer)) or not 0 <= pos <= self._num_rows:
            raise UsageError(
                f"{self.name}: pos is {shown(pos)}, but an index of a row below {self._num_rows:,} is expected"
            )
        if not isinstance(is_full, (bool, np.bool_)):
            raise UsageError(f"{self.name}: full is {shown(is_full)}, but a bool is expected")
        if not is_full:
            return np.arange(pos)
        order = np.arange(pos, pos + self._num_rows) % self._num_rows
        # The newest row's next observation was stored in place of the oldest row's observation.
        return order[1:] if self._fields["next_observations"] is None else order

    def episodes(self) -> Iterator[Episode | Unreadable]:
        for column in range(self._num_columns):
            table = self._column(column)
            for sentence in flat.warnings(table, "handle_timeout_termination = True when it is recorded"):
                self.warn(sentence)
            ends, num_unmarked = flat.cut(table)
            num_unmarked -= len(ends) > 0 and not flat.marked(table)[-1]  # the last episode was unfinished
            if num_unmarked:
                self.note(
                    f"column {column} has {num_unmarked} episodes that end without a flag: they count as truncated"
                )
            for episode in flat.episodes(table, ends):
                yield episode._replace(id=f"{column}.{episode.id}")

    def _column(self, column: int) -> flat.TransitionTable:
        fields, declared = self._fields, self.spaces
        assert declared.observation is not None and declared.action is not None

        def rows(stored: Any) -> np.ndarray:
            return stored[self._order, column]

        dones = flat.flags(rows(fields["dones"]), f"{self.name}: dones")
        terminated: np.ndarray = np.zeros(len(dones), bool)
        truncated: np.ndarray | None = dones
        if self._says_timeouts:
            timeouts = flat.flags(rows(fields["timeouts"]), f"{self.name}: timeouts")
            terminated, truncated = dones & ~timeouts, dones & timeouts
        elif self._dones == "terminated":
            terminated, truncated = dones, None  # an episode that timed out has no flag

        def of(space: spaces.Space, column: Any) -> Nest:
            return specs.map_space(lambda leaf, part: rows(part).reshape(-1, *leaf.shape), space, column)

        observations, actions = of(declared.observation, fields["observations"]), of(declared.action, fields["actions"])
        if isinstance(declared.action, spaces.Box):  # Stable-Baselines3 stores actions in [-1, 1], as alfish does
            flat_actions = actions.reshape(len(actions), math.prod(declared.action.shape))
            stretched = specs.ActionUnits(declared.action).to_environment(flat_actions)
            actions = stretched.astype(declared.action.dtype)
        following = fields["next_observations"]
        table = flat.TransitionTable(
            observations,
            actions,
            rows(fields["rewards"]),
            terminated,
            truncated,
            None if following is None else of(declared.observation, following),
        )
        flat.check_shapes(table, self.name)
        return table


class _Size:
    """Counts the parts of a space and the numbers in their bounds. A part that occurs many times counts each time."""

    def __init__(self) -> None:
        self._parts = self._numbers = 0

    def add(self, where: str, numbers: int = 0) -> None:
        """Counts a part; if `numbers` is positive, counts the numbers in the part's bounds instead.

        Raises:
          UsageError: there are too many parts or numbers; the message names `where`.
        """
        self._parts, self._numbers = self._parts + (not numbers), self._numbers + numbers
        if self._parts > MAX_PARTS or self._numbers > MAX_SIZE:
            raise UsageError(
                f"{where} describes a space of more than {MAX_PARTS} parts or {MAX_SIZE:,} numbers; write it again"
            )


def _space(said: Any, where: str, size: _Size) -> spaces.Space:
    """Returns the space that an inert object describes; `size` counts its parts and numbers."""
    kind, of = (said.kind, said.attributes) if isinstance(said, Inert) else (type(said).__name__, {})
    size.add(where)
    try:
        if kind == "Box":
            size.add(where, np.size(of["low"]))
            low, high = (_numbers(of[end]) for end in ("low", "high"))
            return spaces.Box(low, high, low.shape, low.dtype.type)
        if kind == "Discrete":
            return spaces.Discrete(int(of["n"]), start=int(of.get("start", 0)))
        if kind == "MultiDiscrete":
            size.add(where, np.size(of["nvec"]))
            return spaces.MultiDiscrete(_numbers(of["nvec"]), start=_numbers(of["start"]) if "start" in of else None)
        if kind == "MultiBinary":
            count = of["n"]
            return spaces.MultiBinary([int(n) for n in count] if isinstance(count, SEQUENCES) else int(count))
        if kind == "Dict":
            return spaces.Dict({key: _space(part, where, size) for key, part in of["spaces"].items()})
        if kind == "Tuple":
            return spaces.Tuple([_space(part, where, size) for part in of["spaces"]])
    except UsageError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise UsageError(f"{where} describes a {kind} space that cannot be read ({shown(str(error))})") from error
    raise UsageError(f"{where} has a {kind} instead of a space")


def _numbers(values: Any) -> np.ndarray:
    """Returns a copy of an array of numbers."""
    if not isinstance(values, np.ndarray) or values.dtype.kind not in flat.NUMBERS:
        raise TypeError("its bounds are not arrays of numbers")
    return values.copy()
