"""The worker process: steps environments, acts with a copy of the policy, and writes segments into shared memory.

A server process forks the worker. The worker ends at the latest when the trainer closes its end of a pipe, the
lifeline.
"""

import contextlib
import faulthandler
import itertools
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from alfish import nest
from alfish.algorithms.acting import ModeSwitch
from alfish.compiler.numpy_program import quiet
from alfish.data import TimeStep
from alfish.errors import RunError, UsageError, first_line
from alfish.errors.user_code import CodeError, in_words, refuse_default_dtype
from alfish.nest import Nest
from alfish.parameters.parts import build, parameter_names
from alfish.processes.channel import Channel, from_bytes
from alfish.processes.messages import (
    EnvironmentCall,
    EnvironmentFailed,
    EnvironmentReplaced,
    Failed,
    FromWorker,
    Grant,
    Refused,
    Seconds,
    Segment,
    Setup,
    Started,
)
from alfish.processes.shared_memory import DUMP_SIGNAL, Heartbeat, SharedMemory
from alfish.runs.process_settings import flush_subnormals
from alfish.runs.random_state import apart, seed_all
from alfish.unrollers.nonfinite import nonfinite_action, nonfinite_rows
from alfish.unrollers.sync import SyncUnroller
from alfish.unrollers.workers.environment_maker import EnvironmentMaker
from alfish.unrollers.workers.shared_tensors import SharedWeights
from alfish.unrollers.workers.slots import PolicyRows, Slots

GRACE_SECONDS = 5.0  # seconds for closing environments after the trainer has ended


class EnvironmentFailure(Exception):
    """An environment raised, and the worker cannot replace it."""


class PolicyFailure(Exception):
    """The policy's action is not finite."""


class Stopped(Exception):
    """The trainer has asked the worker to stop."""


class StepWatch:
    """Reports what a worker is doing, steps its environments, and adds up the seconds of their steps.

    Args:
      heartbeat: heartbeat that receives the current activity.
      step_interval: minimum seconds between the starts of two vector steps.
      tolerate: function called with the id of a failed environment, a sentence about the error, and the traceback; None
        means that a failure ends the worker.

    Attributes:
      heartbeat, tolerate: the constructor's arguments.
      num_steps: number of vector steps.
      env_seconds: seconds of vector steps since the owner last set this attribute to 0.
    """

    def __init__(self, heartbeat: Heartbeat, step_interval: float, tolerate: Callable[[int, str, str], None] | None):
        self.heartbeat, self._interval, self.tolerate = heartbeat, step_interval, tolerate
        self._next_step = 0.0
        self.num_steps, self.env_seconds = 0, 0.0

    def step(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function that makes a vector step; returns its result. Afterwards the activity is still STEPPING.

        Raises:
          Stopped: the trainer has asked the worker to stop.
          EnvironmentFailure: the function raised.
        """
        if self.heartbeat.stopped:
            raise Stopped
        if self._interval:
            time.sleep(max(0.0, self._next_step - time.monotonic()))
            self._next_step = time.monotonic() + self._interval
        self.heartbeat.set(Heartbeat.STEPPING)
        began = time.perf_counter()
        try:
            result = function(*arguments)
        except (Exception, SystemExit) as error:
            raise EnvironmentFailure from error
        self.env_seconds += time.perf_counter() - began
        self.num_steps += 1
        return result

    def report(self, env_id: int, error: BaseException, name: str) -> None:
        """Reports that an environment has failed and is replaced.

        Args:
          env_id: id of the environment among the environments of all workers.
          error: error of the environment.
          name: name of the environments.
        """
        assert self.tolerate is not None
        self.tolerate(env_id, str(in_words(error, f"{name}.step")), _trace(error))


class WorkerUnroller(SyncUnroller):
    """`SyncUnroller` that reports its activity, and replaces environments that fail.

    Args:
      watch: watch of the worker's steps.
      starts: vector steps after which the first episode of each environment is truncated; 0 means no truncation.
    """

    def __init__(self, *arguments: Any, watch: StepWatch, starts: list[int]):
        super().__init__(*arguments)
        self._watch, self._heartbeat, self._starts = watch, watch.heartbeat, np.array(starts)
        self._nonfinite_rows = quiet(nonfinite_rows)
        self._num_calls = 0  # number of the last call that was made, see `EnvironmentCall`
        if watch.tolerate is not None:
            self.environment.tolerate_errors(self._report)

    def collect(self, length: int, at_random: bool) -> list[PolicyRows]:
        """Returns the rows and the records of an unroll; see `SentPolicies.make_unroller`."""
        return [(self.unroll(length, at_random), self.records)]  # type: ignore[list-item]

    def _report(self, index: int, error: BaseException) -> None:
        self._watch.report(int(self.environment.env_id[index]), error, self.environment.name)

    def _reset(self) -> TimeStep:
        self._heartbeat.set(Heartbeat.RESETTING)
        try:
            time_step, _ = self._replace_nonfinite(super()._reset())
            return time_step
        finally:
            self._heartbeat.set(Heartbeat.ACTING)

    def make_calls(self, calls: Iterable[EnvironmentCall]) -> None:
        """Makes calls that are new to this worker. Before the first unroll, it then resets the environments again."""
        new = [made for made in calls if made.number > self._num_calls]
        for made in new:
            self.environment.call(made.name, *made.arguments)
            self._num_calls = made.number
        if new and self._unseen:  # a restarted worker has reset its environments before these calls
            self._restart_episodes()

    def advance(self, step: Any, transform_state: Nest) -> None:
        self._watch.step(super().advance, step, transform_state)
        self.time_step, replaced = self._replace_nonfinite(self.time_step)
        if replaced is not None:
            broken = self.environment.broken
            self.environment.broken = replaced if broken is None else replaced | broken
        if (self._starts == self._watch.num_steps).any():
            self.time_step = self.environment.break_off(self.time_step, self._starts == self._watch.num_steps)
        self._heartbeat.set(Heartbeat.ACTING)

    def _check(self, time_step: TimeStep, sign: float) -> None:
        """Ends the worker if rows are not finite; environments that can be replaced are checked at each step."""
        try:
            super()._check(time_step, sign)
        except RunError as error:
            raise EnvironmentFailure from error

    def _replace_nonfinite(self, time_step: TimeStep) -> tuple[TimeStep, np.ndarray | None]:
        """Replaces environments whose rows are not finite, repeatedly, until all rows are finite.

        Returns:
          The time step with FIRST rows of new environments, and a `[B]` bool mask of these environments, or None if no
          environment was replaced.
        """
        replaced: np.ndarray | None = None
        tolerate = self._watch.tolerate
        if tolerate is None or not self.environment.can_replace:
            return time_step, replaced
        while (bad := self._nonfinite_rows(time_step)) is not None:  # the trainer limits the number of errors
            for column in np.flatnonzero(bad):
                action = nonfinite_action(nest.at(nest.tensors(time_step.prev_action), int(column)))
                if action is not None:
                    raise PolicyFailure(
                        f"the policy's action in environment {int(self.environment.env_id[column])} is not finite: "
                        f"{action}; check rollout_step, and the parameters after the last update"
                    )
                row = time_step.reward, time_step.observation  # `str` abbreviates large arrays, such as images
                reward, observation = nest.map(lambda leaf, column=column: str(leaf[column]), row)
                text = f"it returned a value that is not finite: reward {reward}, observation {observation}"
                tolerate(int(self.environment.env_id[column]), text, text)
            time_step = self.environment.replace(time_step, bad)
            replaced = bad if replaced is None else replaced | bad
        return time_step, replaced


def main(setup: bytes, fds: dict[str, int]) -> None:
    """Runs a worker until the trainer closes the channel.

    Args:
      setup: bytes of a `Setup`, pickled by `to_bytes`.
      fds: file descriptors by name: the channel, the lifeline, and memories that the trainer shares.
    """
    threading.Thread(target=_die_with_trainer, args=(fds["lifeline"],), daemon=True).start()
    channel = Channel(socket.socket(fileno=fds["channel"]))
    with contextlib.ExitStack() as environments:  # closes environments after errors are sent, because closing may block
        try:
            work(from_bytes(setup), fds, channel, environments)
        except (EOFError, BrokenPipeError, ConnectionResetError, Stopped):
            pass  # the trainer has closed the channel
        except EnvironmentFailure as failure:
            error = failure.__cause__ or failure
            is_sentence = isinstance(error, (RunError, UsageError))
            sentence = str(error) if is_sentence else f"{type(error).__name__}: {first_line(error)}"
            _end(channel, EnvironmentFailed(sentence, _trace(error)))
        except (UsageError, PolicyFailure) as error:
            _end(channel, Refused(str(error)))
        except (Exception, SystemExit) as error:
            missing = (error.name or str(error)) if isinstance(error, ImportError) else ""
            sentence = str(error) if isinstance(error, CodeError) else ""
            _end(channel, Failed(sentence, _trace(error), missing))


def work(setup: Setup, fds: dict[str, int], channel: Channel, environments: contextlib.ExitStack) -> None:
    """Builds environments and the unroller, and fills slots until the trainer closes the channel.

    Args:
      setup, fds, channel: arguments and channel of the process, see `main`.
      environments: stack for callbacks that close the environments.
    """
    heartbeat = Heartbeat(SharedMemory(os.fstat(fds["heartbeats"]).st_size, fds["heartbeats"]), setup.worker_index)
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, os.fdopen(fds["stacks"], "w"), all_threads=True, chain=False)
    if setup.cpu is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {setup.cpu})
    flush_subnormals()  # like the trainer
    torch.set_num_threads(1)
    seed_all(setup.seed)
    plan, stepping = setup.plan, setup.plan.stepping
    policies, forms = from_bytes(plan.policies)
    for algorithm, _ in policies.networks():
        ModeSwitch(algorithm).switch(training=False)
    maker: EnvironmentMaker = from_bytes(plan.make_environment)
    make_environment = maker()
    arguments: dict[str, Any] = {} if stepping.num_envs is None else {"num_envs": stepping.num_envs}
    if "index" in parameter_names(make_environment):
        arguments["index"] = setup.first_env_id // setup.plan.envs_per_worker
    with apart():
        environment = build(make_environment, policies.kind, "Trainer.environment", seed=setup.seed, **arguments)
    environments.callback(_close, environment)
    refuse_default_dtype(f"the constructor of {environment.name}")

    def tolerate(env_id: int, sentence: str, trace: str) -> None:
        channel.send(EnvironmentReplaced(env_id, sentence, trace))

    watch = StepWatch(heartbeat, stepping.step_interval, tolerate if stepping.tolerates_errors else None)
    unroller = policies.make_unroller(environment, setup, watch)
    weights = SharedWeights(policies.tensors(), fds["weights_header"], fds["weights"])
    weights.read()  # includes progress, which a curriculum needs at the first reset
    unroller.make_calls(plan.calls)
    unroller.start()  # if the first reset fails, the trainer raises the error before it trains
    channel.send(Started(environment.num_envs))
    slots = Slots(forms, plan.num_slots, fd=fds["slots"])
    _fill_segments(setup, channel, watch, weights, slots, unroller)


def _fill_segments(
    setup: Setup, channel: Channel, watch: StepWatch, weights: SharedWeights, slots: Slots, unroller: Any
) -> None:
    heartbeat = watch.heartbeat
    for sequence in itertools.count():
        heartbeat.set(Heartbeat.IDLE)
        idle = time.perf_counter()
        grant: Grant = channel.receive()
        heartbeat.set(Heartbeat.ACTING)
        began = time.perf_counter()
        version = weights.read(grant.publication)
        watch.env_seconds = 0.0
        unroller.make_calls(grant.calls)
        policies: list[PolicyRows] = unroller.collect(setup.plan.length, grant.at_random)
        unrolled, env_seconds = time.perf_counter(), watch.env_seconds
        slots.write(grant.slot, policies)
        written = time.perf_counter()
        seconds = Seconds(began - idle, env_seconds, unrolled - began - env_seconds, written - unrolled)
        counts, infos = zip(*[(len(records.step_type), records.infos) for _, records in policies])
        segment = Segment(setup.worker_index, grant.slot, sequence, version, counts, infos, seconds)
        try:
            channel.send(segment)
        except (TypeError, AttributeError, pickle.PicklingError):  # infos cannot be pickled; nothing was sent
            sendable = [[(row, _sendable(info)) for row, info in own] for own in infos]
            channel.send(segment._replace(infos=sendable))


def _sendable(info: Any) -> Any:
    """Returns an info with None in place of objects that cannot be pickled."""
    if isinstance(info, dict):
        return {key: _sendable(value) for key, value in info.items()}
    if isinstance(info, np.ndarray) and info.dtype == object:
        parts = np.empty_like(info)
        for index, part in np.ndenumerate(info):
            parts[index] = _sendable(part)
        return parts
    try:
        pickle.dumps(info)
    except (TypeError, AttributeError, pickle.PicklingError):
        return None
    return info


def _close(environment: Any) -> None:
    with contextlib.suppress(Exception):  # the environment may already be broken
        environment.close()


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _end(channel: Channel, message: FromWorker) -> None:
    with contextlib.suppress(OSError):  # the trainer has ended
        channel.send(message)
    sys.exit(1)


def _die_with_trainer(lifeline: int) -> None:
    os.read(lifeline, 1)  # returns when the trainer has ended
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)  # includes processes that environments have started
