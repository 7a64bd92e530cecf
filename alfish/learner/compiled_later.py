"""Plain updates while another process compiles them, and compiled ones from a certain update on."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from alfish.batches import Minibatches
from alfish.compiler.background import NotSendable
from alfish.compiler.inductor import NotCompilable
from alfish.learner.compiled_updates import CompiledUpdates, steady
from alfish.learner.updates import Updates, UpdateStats
from alfish.nest import Nest


class CompiledLater:
    """Makes plain updates, and requests the graph of each from another process when its layout is first seen.

    Args:
      plain: updates until then.
      compiled: updates from then on.
      first: number of the update from which on they are compiled. A run that continues later compiles at once.
      pays_in_foreground: whether to compile without another process where the update cannot be sent to one.
      log: is called with a line when compilation begins, and when it is in use.
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
        self._requests = True  # False: another process cannot compile it
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
        """Waits until the other process has compiled everything.

        Args:
          updates: number of updates so far.
        """
        if not self._compiled.is_ready:
            self._log(f"Waiting at update {updates:,} for the compiled update of {self._name}")
            began = time.perf_counter()
            self._compiled.wait()
            self._waited = time.perf_counter() - began

    def finished(self, updates: int) -> CompiledUpdates:
        """Returns the compiled updates; see `wait`.

        Raises:
          NotCompilable, TorchChanged: plain updates must be used.
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
