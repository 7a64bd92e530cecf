"""The unroller whose environments and policies run in worker processes, while the trainer trains.

A worker fills segments: `unroll_length` rows of its environments, acted on with one version of the weights, in memory
that it shares with the trainer. The trainer grants slots and consumes what is ready, so that the number of slots
bounds both memory and how old rows can be. Slots change hands by messages alone: free, granted, told of, in use.
"""

import itertools
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import gin
import numpy as np
import torch

from alfish import nest, specs
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.checkpoint import rng_state, set_rng_state
from alfish.data import Experience, StepType, TimeStep
from alfish.environments import Environment
from alfish.errors import RunError, UsageError
from alfish.nest import Nest
from alfish.transforms import Transforms
from alfish.unrollers.messages import Died, EnvironmentReplaced, Fill, FromWorker, Seconds, Segment, Setup, Started
from alfish.unrollers.remote import EnvironmentMaker, to_bytes
from alfish.unrollers.shared import Block, WeightBoard, state_tensors
from alfish.unrollers.sync import refuse_on_policy
from alfish.unrollers.unroller import Arrivals, Unroller
from alfish.unrollers.workers import LOOK_SECONDS, Worker, Workers

MODES = ("lockstep", "free")
OFF_POLICY_LENGTH = 8  # rows of a segment, where nothing asks for more
WARN_SECONDS = 30.0  # of waiting without a word


@gin.configurable(module="alfish.unrollers")
class AsyncUnroller(Unroller):
    """Args:
    environment, algorithm, transforms: see `Unroller`; the environment is closed, workers build their own.
    num_workers: processes.
    envs_per_worker: environments of each; None: as many as the environment factory makes by itself.
    mode: 'free': workers go on as long as there are slots; 'lockstep': each fills one segment while the trainer trains
      on the one before, so that the same seed gives the same run.
    slots: segments of each worker, on-policy the one in training included: where workers are equally fast, rows are at
      most `slots - 1` iterations old.
    unroll_length: rows of a segment; None: Trainer.unroll_length, off-policy at least 8.
    segments_per_unroll: on-policy, how many segments an iteration trains on; None: as many as there are workers.
    max_unroll_length: off-policy, rows of each environment that one unroll takes over at most; None: all there are.
    max_policy_lag: on-policy, older segments (in iterations) are not trained on, and counted; None: all are.
    parameter_update_period: iterations between two publications of the weights.
    worker_step_interval: seconds from one vector step of a worker to the next, at least; for real time.
    stagger: the first episode of environment i of n is broken off after `stagger * i / n` vector steps, so that
      environments whose episodes are equally long do not end all at once; 0: none is.
    max_env_errors: an environment that raises, or returns what is not finite or not of its space, is built anew, and
      its episode ends with the row before; one more than so many ends the run. Environments that are not stepped one by
      one end their worker instead, which is started again. None: the first error does.
    numpy_after, overwrite_policy_output: see `SyncUnroller`.
    workers: takes the number of workers; see `Workers` for time limits, restarts and processor cores.
    """

    drains = True

    def __init__(
        self,
        environment: Environment,
        algorithm: RLAlgorithm,
        transforms: Transforms,
        num_workers: int = 1,
        envs_per_worker: int | None = None,
        mode: str = "free",
        slots: int = 2,
        unroll_length: int | None = None,
        segments_per_unroll: int | None = None,
        max_unroll_length: int | None = None,
        max_policy_lag: int | None = None,
        parameter_update_period: int = 1,
        worker_step_interval: float = 0.0,
        stagger: int = 0,
        max_env_errors: int | None = 100,
        numpy_after: int | None = 0,
        overwrite_policy_output: bool = False,
        workers: Callable[[int], Workers] = Workers,
    ):
        super().__init__(environment, algorithm, transforms)
        name = type(algorithm).__name__
        if algorithm.on_policy and not algorithm.corrects_lag:
            raise UsageError(
                f"{name} is on-policy and does not correct for rows of an older policy, which AsyncUnroller brings; "
                "train with APPO, or bind Trainer.unroller = @SyncUnroller"
            )
        if overwrite_policy_output:
            refuse_on_policy(algorithm)
        if mode not in MODES:
            raise UsageError(f"AsyncUnroller.mode is {mode!r}; it is one of {MODES}")
        least = {"num_workers": 1, "envs_per_worker": 1, "slots": 2, "unroll_length": 1, "segments_per_unroll": 1}
        least |= {"max_unroll_length": 1, "parameter_update_period": 1, "stagger": 0, "max_policy_lag": 0}
        for argument, low in least.items():
            value = locals()[argument]
            if value is not None and value < low:
                raise UsageError(f"AsyncUnroller.{argument} is {value}; it must be at least {low}")
        self._lockstep, self._on_policy = mode == "lockstep", algorithm.on_policy
        if self._lockstep and segments_per_unroll not in (None, num_workers):
            raise UsageError("AsyncUnroller.segments_per_unroll is for mode 'free'; in lockstep each worker gives one")
        self._given_envs = envs_per_worker
        self._envs = envs_per_worker or environment.num_envs
        self._slots, self._length = slots, unroll_length
        self._per_unroll = segments_per_unroll or num_workers
        if self._on_policy and self._per_unroll > num_workers * slots:
            raise UsageError(
                f"AsyncUnroller.segments_per_unroll is {self._per_unroll}, and {num_workers} workers of {slots} slots "
                f"have {num_workers * slots} at most; raise AsyncUnroller.slots"
            )
        self._max_length, self._max_lag = max_unroll_length, max_policy_lag
        self._update_period, self._interval, self._stagger = parameter_update_period, worker_step_interval, stagger
        self._max_env_errors, self._numpy_after = max_env_errors, numpy_after
        self._overwrites = overwrite_policy_output
        self._num_workers, self._workers = num_workers, workers(num_workers)
        if self._workers.shrinks and self._lockstep:
            raise UsageError(
                "Workers.on_failure = 'shrink' takes AsyncUnroller.mode = 'free': lockstep waits for each worker"
            )
        self.num_envs = num_workers * self._envs
        self.num_columns = self._per_unroll * self._envs if self._on_policy else self.num_envs
        self._keeps_infos = True
        self._first_generation = 0
        self._running = self._closed = False
        self._free: list[list[int]] = [list(range(i * slots, (i + 1) * slots)) for i in range(num_workers)]
        self._ready: deque[Segment] = deque()
        self._in_use: list[Segment] = []
        self._next_sequence = [0] * num_workers  # `Segment.sequence` that is to come from each worker
        self._at_random = False
        self.num_env_errors = 0
        self._stats = _Stats()

    def bind(self, make_environment: Callable[..., Environment], unroll_length: float, seed: int) -> None:
        self._maker, self._seed = EnvironmentMaker(make_environment), seed
        if self._length is None:
            at_least = 1 if self._on_policy else OFF_POLICY_LENGTH
            self._length = max(at_least, math.ceil(unroll_length))
        self.unroll_length = unroll_length or self._length
        if self._on_policy and self._length != unroll_length:
            raise UsageError(
                f"AsyncUnroller.unroll_length is {self._length} and Trainer.unroll_length {unroll_length}; on-policy "
                "they are the same: bind Trainer.unroll_length alone"
            )

    @torch.no_grad()
    def unroll(self, length: int = 0, at_random: bool = False) -> Experience:
        """Takes over what workers have collected, and waits where there is not enough.

        On-policy, `segments_per_unroll` segments, in the order they came, side by side: `[T + 1, B]`. Off-policy, at
        least one and, up to `max_unroll_length` rows, all that are ready: a column for each environment, filled up with
        PAD rows where a worker has given less than another.

        Args:
          length: not read; a segment's length is a setting.
          at_random: segments granted from now on execute uniformly random actions.
        """
        if not self._running:
            self._start()
        self._at_random = at_random
        began = time.perf_counter()
        self._release(self._in_use)
        self._grant()
        self._wait_for_enough()
        self._stats.waited(time.perf_counter() - began)
        taken = self._take()
        self.arrivals = self._join_arrivals(taken)
        experience = self._join_columns(taken) if self._on_policy else self._join_rows(taken)
        self._mask_old(experience, taken)
        if self._on_policy:
            self._in_use = taken  # until the next unroll, so that no worker gets further ahead than it may
        else:
            self._release(taken)
        self._grant()
        return experience

    def publish(self) -> None:
        super().publish()
        if self._running and self.policy_version % self._update_period == 0:
            self._board.publish(self.policy_version)

    def ignore_infos(self) -> None:
        self._keeps_infos = False

    def stats(self) -> dict[str, float]:
        """Lags, waits, times, and what went wrong; times are shares of all that workers, or the trainer, did."""
        counts = {"restarts": self._workers.num_restarts, "env_errors": self.num_env_errors}
        return self._stats.take() | {name: float(value) for name, value in counts.items()}

    def state_dict(self) -> dict[str, Any]:
        """Rows under way are not kept: a resumed run begins new episodes, with new seeds."""
        return {"policy_version": self.policy_version, "generation": self._generation()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy_version = state["policy_version"]
        self._first_generation = state.get("generation", -1) + 1  # a `SyncUnroller` has none

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._workers.close()
        if not self._running:
            self.environment.close()

    # Starting.

    def _start(self) -> None:
        self._running = True
        self._workers.log = self.log
        assert self._length is not None
        ragged = self.environment.ragged
        self.environment.close()
        example, forms = self._layout(self._length + (1 if self._on_policy or ragged else 0))
        self._structure = nest.flatten(example)[1]
        most_arrivals = 2 * self._length + 3 if ragged else self._length + 1
        reward_shape = self._algorithm.reward_spec.shape
        forms += [
            ((most_arrivals, self._envs), torch.int32),
            ((most_arrivals, self._envs, *reward_shape), torch.float32),
        ]
        self._forms = forms
        self._block = Block(forms, self._slots * self._num_workers)
        self._board = WeightBoard(state_tensors(self._algorithm, self._transforms))
        self._board.publish(self.policy_version)
        self._modules = to_bytes((self._algorithm, self._transforms), f"{type(self._algorithm).__name__}")
        self._workers.start(self._setup, [*self._board.fds, self._block.memory.fd])

    def _layout(self, num_rows: int) -> tuple[Nest, list]:
        """An Experience of one row, as the policy makes it, and the shape and dtype of each leaf of a segment."""
        size, device = self._envs, self._algorithm.progress.device
        time_step = TimeStep(
            torch.full((size,), StepType.FIRST, dtype=torch.int32),
            torch.zeros(size, *self._algorithm.reward_spec.shape),
            torch.ones(size),
            specs.zeros(self.environment.observation_spec, (size,)),
            specs.zeros(self.environment.action_spec, (size,)),
            torch.zeros(size, dtype=torch.int32),
        )
        state, transform_state = self._algorithm.initial_state(size), self._transforms.initial_state(size)
        generators = rng_state()
        rows = nest.to((time_step, state, transform_state), device)
        seen, _ = self._transforms(rows[0], rows[2])
        step = self._algorithm.rollout_step(seen, rows[1])
        set_rng_state(generators)
        example = Experience(time_step, step.output, step.info, state, None, transform_state)

        def form(leaf: torch.Tensor, leading: tuple[int, ...]) -> tuple[tuple[int, ...], torch.dtype]:
            return (*leading, *leaf.shape), leaf.dtype

        forms = [form(leaf, (num_rows,)) for leaf in nest.leaves((example.time_step, example.action, example.info))]
        forms += [form(leaf, ()) for leaf in nest.leaves((example.state, example.transform_state))]
        return example, forms

    def _setup(self, worker: Worker, fds: dict[str, int], cpu: int | None) -> Setup:
        first = worker.index * self._envs
        columns = range(first, first + self._envs)
        generation = self._first_generation + worker.generation
        header, board = self._board.fds
        return Setup(
            worker_index=worker.index,
            make_environment=self._maker,
            num_envs=self._given_envs,
            # Neither the trainer's, nor that of another worker, or of an earlier generation.
            seed=int(
                np.random.SeedSequence(self._seed, spawn_key=(1, worker.index, generation)).generate_state(1)[0] >> 1
            ),
            first_env_id=first,
            starts=[0 if worker.generation else self._stagger * column // self.num_envs for column in columns],
            modules=self._modules,
            forms=self._forms,
            num_slots=self._slots * self._num_workers,
            fds=fds | {"board_header": header, "board": board, "slots": self._block.memory.fd},
            length=self._length or 0,
            step_interval=self._interval,
            numpy_after=self._numpy_after,
            overwrites=self._overwrites,
            keeps_infos=self._keeps_infos,
            tolerates_errors=self._max_env_errors is not None,
            cpu=cpu,
        )

    def _generation(self) -> int:
        return self._first_generation + max(worker.generation for worker in self._workers.all)

    # Slots.

    def _grant(self) -> None:
        """Gives workers what they may fill now: all free slots, in lockstep one each."""
        for worker in self._workers.all:
            free = self._free[worker.index]
            filling = (
                self._slots - len(free) - sum(s.worker_index == worker.index for s in (*self._ready, *self._in_use))
            )
            while worker.started and worker.alive and free and not (self._lockstep and filling):
                if self._lockstep and any(segment.worker_index == worker.index for segment in self._ready):
                    break
                slot = free.pop()
                publication = self._board.newest if self._lockstep else None
                try:
                    worker.channel.send(Fill(slot, self._at_random, publication))
                except OSError:  # it has died, and the next wait will say so
                    free.append(slot)
                    break
                filling += 1

    def _release(self, segments: list[Segment]) -> None:
        for segment in segments:
            self._free[segment.worker_index].append(segment.slot)
        self._in_use = []

    def _enough(self) -> bool:
        if self._lockstep:
            return len(self._ready) == self._num_workers
        return len(self._ready) >= (self._per_unroll if self._on_policy else 1)

    def _take(self) -> list[Segment]:
        if self._lockstep:
            return sorted(_popped(self._ready), key=lambda segment: segment.worker_index)
        if self._on_policy:
            return list(itertools.islice(_popped(self._ready), self._per_unroll))
        assert self._length is not None
        # A policy's memory is stored at row 0 of an experience, so there every segment is one of its own.
        most = 1 if self._algorithm.has_state else max(1, (self._max_length or sys.maxsize) // self._length)
        taken: list[Segment] = []
        left: list[Segment] = []
        counts = [0] * self._num_workers
        for segment in _popped(self._ready):
            counts[segment.worker_index] += 1
            (taken if counts[segment.worker_index] <= most else left).append(segment)
        self._ready.extend(left)
        return taken

    # Hearing workers.

    def _wait_for_enough(self) -> None:
        began = warned = time.monotonic()
        while not self._enough():
            for worker, message in self._workers.wait(LOOK_SECONDS):
                self._hear(worker, message)
            self._grant()
            if time.monotonic() - warned > WARN_SECONDS:
                warned = time.monotonic()
                self.log(f"Waiting for rows for {warned - began:.0f} s: {self._workers.activities()}")
        # What else has come is taken in, so that nothing is older than it needs to be.
        for worker, message in self._workers.wait(0):
            self._hear(worker, message)

    def _hear(self, worker: Worker, message: FromWorker) -> None:
        if isinstance(message, Segment):
            assert message.sequence == self._next_sequence[worker.index], "a segment was lost or doubled"
            self._next_sequence[worker.index] += 1
            self._stats.filled(message.seconds)
            self._ready.append(message)
        elif isinstance(message, EnvironmentReplaced):
            env_id, text = message
            self.num_env_errors += 1
            assert self._max_env_errors is not None
            if self.num_env_errors > self._max_env_errors:
                raise RunError(
                    f"environment {env_id} failed, error {self.num_env_errors} of environments in this run, more than "
                    f"AsyncUnroller.max_env_errors = {self._max_env_errors}:\n{text.rstrip()}"
                )
            self.log(f"environment {env_id} failed, and is built anew:\n{text.rstrip()}")
        elif isinstance(message, Started):
            if message.num_envs != self._envs:
                raise UsageError(
                    f"the environment factory made {message.num_envs} environments in a worker, and {self._envs} here; "
                    "it must always make the same number, or take the keyword num_envs (AsyncUnroller.envs_per_worker)"
                )
        elif isinstance(message, Died):
            own = range(worker.index * self._slots, (worker.index + 1) * self._slots)
            kept = {segment.slot for segment in (*self._ready, *self._in_use)}
            self._free[worker.index] = [slot for slot in own if slot not in kept]
            self._next_sequence[worker.index] = 0
            if self._on_policy and self._workers.num_left * self._slots < self._per_unroll:
                raise RunError(
                    f"{self._workers.num_left} workers of {self._slots} slots are left, and an iteration takes "
                    f"AsyncUnroller.segments_per_unroll = {self._per_unroll} segments; lower that, or raise "
                    "AsyncUnroller.slots"
                )

    # Putting rows together.

    def _experience(self, segment: Segment) -> Experience:
        leaves = self._block.copies[segment.slot][:-2]
        version = torch.full((self._envs,), segment.version, dtype=torch.int64)
        return nest.unflatten(self._structure, leaves)._replace(policy_version=version)

    def _join_columns(self, segments: list[Segment]) -> Experience:
        """Segments side by side."""
        parts = [self._experience(segment) for segment in segments]
        if len(parts) == 1:
            return parts[0]
        return _join(parts, rows_dim=1)

    def _join_rows(self, segments: list[Segment]) -> Experience:
        """A column for each environment: what each worker gave, one after the other."""
        by_worker = [[s for s in segments if s.worker_index == i] for i in range(self._num_workers)]
        columns = [
            _closed_up(_join([self._experience(s) for s in own], rows_dim=0)) if own else None for own in by_worker
        ]
        if len(columns) == 1 and columns[0] is not None:
            return columns[0]
        most = max(len(part.time_step.step_type) for part in columns if part is not None)
        template = next(part for part in columns if part is not None)
        return _join([_padded(part, most, template) for part in columns], rows_dim=1)

    def _join_arrivals(self, segments: list[Segment]) -> Arrivals:
        by_worker = [[s for s in segments if s.worker_index == i] for i in range(self._num_workers)]
        most = max(sum(segment.num_arrivals for segment in own) for own in by_worker)
        step_type = np.full((most, self.num_envs), StepType.PAD, np.int32)
        reward = np.zeros((most, self.num_envs, *self._algorithm.reward_spec.shape), np.float32)
        infos: list[tuple[int, dict[str, Any]]] = []
        for i, own in enumerate(by_worker):
            columns, at = slice(i * self._envs, (i + 1) * self._envs), 0
            for segment in own:
                count = segment.num_arrivals
                types, rewards = self._block.copies[segment.slot][-2:]
                step_type[at : at + count, columns] = types[:count]
                reward[at : at + count, columns] = rewards[:count]
                infos += [(at + t, _widened(info, columns, self.num_envs)) for t, info in segment.infos]
                at += count
        return Arrivals(step_type, reward, infos)

    def _mask_old(self, experience: Experience, segments: list[Segment]) -> None:
        lags = [self.policy_version - segment.version for segment in segments]
        masked = 0
        if self._max_lag is not None and self._on_policy:
            for i, lag in enumerate(lags):
                if lag > self._max_lag:
                    experience.time_step.step_type[:, i * self._envs : (i + 1) * self._envs] = StepType.PAD
                    masked += (self._length or 0) * self._envs
        self._stats.delivered(lags, masked)


class _Stats:
    """Gathers what summaries want."""

    def __init__(self) -> None:
        self._times = np.zeros(4)  # seconds of workers: waiting, environments, policy, copying
        self._lags: list[int] = []
        self._waited = 0.0
        self._masked = 0
        self._began = time.perf_counter()

    def filled(self, seconds: Seconds) -> None:
        self._times += seconds

    def waited(self, seconds: float) -> None:
        self._waited += seconds

    def delivered(self, lags: list[int], masked: int) -> None:
        self._lags += lags
        self._masked += masked

    def take(self) -> dict[str, float]:
        now = time.perf_counter()
        total = self._times.sum() or 1.0
        names = ("worker_wait_share", "worker_env_share", "worker_policy_share", "worker_copy_share")
        result = {name: float(seconds / total) for name, seconds in zip(names, self._times)}
        result["trainer_wait_share"] = self._waited / max(now - self._began, 1e-9)
        if self._lags:
            result |= {"lag_min": float(min(self._lags)), "lag_mean": float(np.mean(self._lags))}
            result["lag_max"] = float(max(self._lags))
        result["masked_rows"] = float(self._masked)
        self._times, self._lags, self._waited, self._masked, self._began = np.zeros(4), [], 0.0, 0, now
        return result


def _popped(segments: deque[Segment]) -> Iterator[Segment]:
    while segments:
        yield segments.popleft()


def _join(parts: list[Experience], rows_dim: int) -> Experience:
    """Joins rows `[T, B, ...]` side by side (1), or one after the other (0): then what is `[B, ...]` is the first's."""

    def split(part: Experience) -> tuple[Nest, Nest]:
        return (part.time_step, part.action, part.info), (part.state, part.policy_version, part.transform_state)

    rows, once = zip(*(split(part) for part in parts))
    time_step, action, info = nest.map(lambda *leaves: torch.cat(leaves, rows_dim), *rows)
    if rows_dim == 1:
        state, version, transform_state = nest.map(lambda *leaves: torch.cat(leaves), *once)
    else:
        state, version, transform_state = nest.map(torch.clone, once[0])
    return Experience(time_step, action, info, state, version, transform_state)


def _closed_up(part: Experience) -> Experience:
    """The same with all PAD rows at the ends of columns: segments of unequal columns have some at their own ends."""
    pad = part.time_step.step_type == StepType.PAD
    if not (pad[:-1] & ~pad[1:]).any():
        return part
    order = pad.to(torch.uint8).argsort(dim=0, stable=True)[: int((~pad).sum(0).max())]
    rows = (part.time_step, part.action, part.info)
    time_step, action, info = nest.map(lambda leaf: leaf[order, torch.arange(leaf.shape[1])], rows)
    return part._replace(time_step=time_step, action=action, info=info)


def _padded(part: Experience | None, num_rows: int, template: Experience) -> Experience:
    """The same with PAD rows at the end; of no rows at all, PAD rows alone."""
    if part is None:
        part = nest.map(torch.zeros_like, template)
        part = part._replace(policy_version=torch.full((len(part.time_step.env_id[0]),), -1))
        part.time_step.step_type.fill_(StepType.PAD)
    missing = num_rows - len(part.time_step.step_type)
    if missing <= 0:
        return part
    rows = (part.time_step, part.action, part.info)
    filler = nest.map(lambda leaf: leaf.new_zeros(missing, *leaf.shape[1:]), rows)
    filler[0].step_type.fill_(StepType.PAD)
    time_step, action, info = nest.map(lambda a, b: torch.cat([a, b]), rows, filler)
    return part._replace(time_step=time_step, action=action, info=info)


def _widened(info: dict[str, Any], columns: slice, num_envs: int) -> dict[str, Any]:
    """A vector info of some environments as one of all, with a mask for each key."""
    wide: dict[str, Any] = {}
    for key, value in info.items():
        if key.startswith("_"):
            continue
        mask = np.zeros(num_envs, bool)
        mask[columns] = info.get(f"_{key}", True)
        if isinstance(value, dict):
            wide[key] = _widened(value, columns, num_envs)
        elif isinstance(value, np.ndarray) and len(value) == columns.stop - columns.start:
            wide[key] = np.zeros((num_envs, *value.shape[1:]), value.dtype)
            wide[key][columns] = value
        else:
            continue
        wide[f"_{key}"] = mask
    return wide
