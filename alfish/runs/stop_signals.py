"""SIGTERM and Ctrl-C as a request to stop that no wait delays for long.

A signal sets `StopSignals.number`. A loop of alfish's own reads it, or calls `check`. Code of others may wait for ever,
in Python or in C, so it runs while `breakable` is set: it gets `GRACE_SECONDS` to come to an end, then `Interrupted` is
raised inside it. Where `breakable` is not set (updates, writing checkpoints), nothing is raised: what is under way
there ends as a whole. C code that keeps the interpreter's lock cannot be ended.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE_SECONDS = 1.5  # from a signal, or from the beginning of a wait after it, until the wait is broken off
STUCK_SECONDS = 1.0  # from then on, until a main thread that runs no Python is given up
LOOK_SECONDS = 0.05


class Interrupted(BaseException):
    """A signal asked to stop during a wait. No Exception, so that an environment does not take it for an error."""


class StopSignals:
    """Receives SIGTERM and SIGINT while it is entered; a second SIGINT raises KeyboardInterrupt.

    Entered outside the main thread it receives nothing, and nothing changes.

    Args:
      rescue: saves what is whole. Called in another thread where the main thread is in C code that does not return;
        the process then exits with 128 + the signal's number.

    Attributes:
      number: the first signal received; None: none was.
      breakable: whether the main thread may be interrupted wherever it is. Loops that cannot afford the calls of
        `breaking` set it themselves.
    """

    def __init__(self, rescue: Callable[[], None]):
        self._rescue = rescue
        self.number: int | None = None
        self.breakable = False
        self._began: float | None = None  # of a wait after a signal, or of the last attempt to break it off
        self._raises = False  # the next handler's call comes from the watching thread
        self._rescues = False  # the watching thread has taken over
        self._before: dict[int, Any] = {}

    @property
    def name(self) -> str:
        """Name of the first signal received, such as SIGTERM; '' where there was none."""
        return signal.Signals(self.number).name if self.number is not None else ""

    def check(self) -> None:
        """Raises Interrupted if a signal was received."""
        if self.number is not None:
            raise Interrupted

    @contextlib.contextmanager
    def breaking(self) -> Iterator[None]:
        """Sets `breakable` for the block."""
        before, self.breakable, self._began = self.breakable, True, None
        try:
            yield
        finally:
            self.breakable = before

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        self.number, self._began, self._main = None, None, threading.get_ident()
        self._ended = threading.Event()
        # Written in C when a signal arrives, also while the main thread is in C code and cannot run `_handle`.
        self._arrivals, self._arrive = os.pipe()
        os.set_blocking(self._arrive, False)
        self._descriptor_before = signal.set_wakeup_fd(self._arrive, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._watcher = threading.Thread(target=self._watch, name="stop signals", daemon=True)
        self._watcher.start()
        _ENTERED.append(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        if not self._before:
            return
        _ENTERED.remove(self)
        self._restore()
        self._ended.set()
        with contextlib.suppress(BlockingIOError):  # it has enough to read, and ends too
            os.write(self._arrive, b"\0")  # no signal's number
        self._watcher.join()
        os.close(self._arrivals)
        os.close(self._arrive)

    def _restore(self) -> None:
        signal.set_wakeup_fd(self._descriptor_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, frame: Any) -> None:
        raises, self._raises = self._raises, False
        while self._rescues:  # the other thread ends the process
            time.sleep(LOOK_SECONDS)
        if raises:
            if self.breakable:
                raise Interrupted
        elif self.number is None:
            self.number = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """Breaks off the main thread's waits once a signal has arrived."""
        number = 0
        while number not in SIGNALS:
            (number,) = os.read(self._arrivals, 1)
            if self._ended.is_set():
                return
        while not self._ended.wait(LOOK_SECONDS):
            now, began = time.monotonic(), self._began
            if not self.breakable or began is None:
                self._began = now if self.breakable else None
            elif self._raises:
                if now - began > STUCK_SECONDS:
                    self._take_over(number)
            elif now - began > GRACE_SECONDS:  # a second time where an environment has swallowed Interrupted
                self._began, self._raises = now, True
                signal.pthread_kill(self._main, number)

    def _take_over(self, number: int) -> None:
        """Ends the process, unless the main thread has returned to Python in the meantime."""
        self._rescues = True
        if not self._raises:
            self._rescues = False
            return
        try:
            self._rescue()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(128 + number)


_ENTERED: list[StopSignals] = []


def _forget() -> None:
    """In a forked child, which does not answer for its parent: SIGTERM ends it, SIGINT is ignored."""
    for signals in _ENTERED:
        signals._restore()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _ENTERED.clear()


os.register_at_fork(after_in_child=_forget)
