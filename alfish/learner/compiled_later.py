"""Decides whether to compile updates; updates run as plain Python until another process has compiled them.

The decision (`Learner.compile = 'auto'`) and the number of the first compiled update depend on the configuration only,
not on a clock, the cache or the machine. So the same configuration gives the same bits on every machine. The decision
and this number are computed from the times below, which were measured on one core of a server processor of 2024
(`python -m benchmarks.growth`). On other machines these times are estimates.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from alfish.compiler.background import NotSendable
from alfish.compiler.inductor import NotCompilable
from alfish.learner.batches import Minibatches
from alfish.learner.compiled_updates import CompiledUpdates, steady
from alfish.learner.updates import Updates, UpdateStats
from alfish.nest import Nest

# Seconds of an update: a constant, plus a number that is multiplied by rows * parameters (`work` below).
PLAIN_SECONDS, PLAIN_SECONDS_OF_ONE = 0.8e-3, 0.18e-9
COMPILED_SECONDS, COMPILED_SECONDS_OF_ONE = 0.1e-3, 0.09e-9
# Seconds that a compiling process on a second core takes to provide a graph: without the graph in the cache, and with
# the graph in the cache.
COMPILATION_SECONDS, CACHED_SECONDS = 12.0, 5.0


def first_compiled_update(work: float) -> int:
    """Returns the number of plain updates that take as long as another process needs to provide a cached graph.

    If the cache lacks the graph, the run waits at that update until compilation has ended. A switch at a later update
    would save little time, because compiled updates soon make up for the wait. And repeated runs, which find the graph
    in the cache, would run plain updates for longer than necessary.

    Args:
      work: number of rows of an update, times the number of parameters.
    """
    return math.ceil(CACHED_SECONDS / (PLAIN_SECONDS + work * PLAIN_SECONDS_OF_ONE))


def saved_seconds(num_updates: float, work: float) -> float:
    """Returns the seconds that `num_updates` compiled updates save in comparison with plain updates."""
    return num_updates * (PLAIN_SECONDS - COMPILED_SECONDS + work * (PLAIN_SECONDS_OF_ONE - COMPILED_SECONDS_OF_ONE))


def pays_beside(num_updates: float, work: float) -> bool:
    """Returns True if compiling in another process does not lengthen the run, even if the cache lacks the graph.

    Args:
      num_updates: number of updates of the whole run.
      work: number of rows of an update, times the number of parameters.
    """
    remaining = num_updates - first_compiled_update(work)
    return saved_seconds(remaining, work) >= COMPILATION_SECONDS - CACHED_SECONDS


def pays_in_foreground(num_updates: float, work: float) -> bool:
    """Returns True if compiled updates save at least twice the time that training waits for a compilation."""
    return saved_seconds(num_updates, work) >= 2 * COMPILATION_SECONDS


class CompiledLater:
    """Makes plain updates, and requests a graph from another process for each new layout of batches.

    Args:
      plain: plain updates, used before the switch.
      compiled: compiled updates, used after the switch.
      first: number of updates after which the learner switches; a run that is resumed after them compiles at once.
      pays_in_foreground: whether to compile in this process if the update cannot be sent to another process.
      log: function that is called with a message when compilation begins, and when the graph is first used.
    """

    def __init__(
        self,
        plain: Updates,
        compiled: CompiledUpdates,
        first: int,
        pays_in_foreground: bool,
        log: Callable[[str], Any] = logging.info,
    ):
        self._plain, self._compiled, self.first = plain, compiled, first
        self._pays_in_foreground, self._log = pays_in_foreground, log
        self._requests = True  # False if another process cannot compile the update
        self._has_begun, self._waited = False, 0.0
        self._failure = ""
        self._name = type(plain.algorithm).__name__

    def __call__(
        self, chunk: Minibatches, index: Nest, learning_rate: Mapping[str, float], summarize: bool
    ) -> UpdateStats | None:
        """Makes a plain update; see `Updates`."""
        if self._requests:
            chunk, index = steady(chunk, index)
            self._request(chunk, index)
        return self._plain(chunk, index, learning_rate, summarize)

    def forget_batch(self) -> None:
        """Releases the last chunk's rows; see `CompiledUpdates`."""
        self._compiled.forget_batch()

    def wait(self, updates: int) -> None:
        """Waits until the other process has compiled all requested graphs.

        Args:
          updates: number of updates so far.
        """
        if not self._compiled.is_ready:
            self._log(f"Waiting at update {updates:,} for the compiled update of {self._name}")
            began = time.perf_counter()
            self._compiled.wait()
            self._waited = time.perf_counter() - began

    def finished(self, updates: int) -> CompiledUpdates:
        """Returns the compiled updates, with the graphs from the other process; call `wait` first.

        Raises:
          NotCompilable, TorchChanged: the update cannot be compiled; use plain updates.
        """
        if self._failure:
            raise NotCompilable(self._failure)
        if self._has_begun:
            began = time.perf_counter()
            seconds = self._compiled.finish_requests()
            self._log(
                f"Using the compiled update of {self._name} from update {updates + 1:,} on: compiled in {seconds:.1f} "
                f"s, loaded in {time.perf_counter() - began:.1f} s, waited {self._waited:.1f} s"
            )
        self._compiled.close()
        return self._compiled

    @property
    def has_failed(self) -> bool:
        """True if the update cannot be compiled, so that `finished` raises NotCompilable."""
        return bool(self._failure)

    def close(self) -> None:
        """Ends the other process."""
        self._compiled.close()

    def _request(self, chunk: Minibatches, index: Nest) -> None:
        try:
            self._compiled.request(chunk, index)
        except NotSendable as error:
            self._requests = False
            if self._pays_in_foreground:
                self._log(
                    f"The update of {self._name} is compiled after update {self.first:,} while training waits, because "
                    f"it cannot be sent to another process: {error}"
                )
            else:
                self._failure = (
                    f"it cannot be sent to another process, and the run is too short to wait for it: {error}"
                )
        except NotCompilable as error:
            self._requests, self._failure = False, str(error)
        else:
            if not self._has_begun:
                self._has_begun = True
                self._log(
                    f"Compiling the update of {self._name} beside training; it is used after update {self.first:,}"
                )
