"""Handles SIGTERM, SIGUSR1 and Ctrl-C as requests to stop, and interrupts long waits.

A signal sets `StopSignals.number`. Loops of alfish read this attribute, or call `check`. Code outside alfish may wait
forever, in Python or in C; `breakable` is set while such code runs. In such code, `Interrupted` is raised
`GRACE_SECONDS` after a signal. While `breakable` is not set, nothing is raised, so updates and checkpoints always
complete. C code that keeps the interpreter's lock cannot be interrupted.
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

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
GRACE_SECONDS = 1.5  # seconds until a wait is interrupted, from the signal or, if the wait began later, from its start
STUCK_SECONDS = 1.0  # further seconds until another thread takes over if the main thread runs no Python code
LOOK_SECONDS = 0.05


def exit_status(number: int) -> int:
    """Returns the exit status of a process that a signal has stopped.

    Schedulers send SIGUSR1 before they withdraw a machine. The status for SIGUSR1 is EX_TEMPFAIL, 75, which means that
    the same command should run again. For any other signal, the status is 128 + the signal's number.
    """
    return os.EX_TEMPFAIL if number == signal.SIGUSR1 else 128 + number


class Interrupted(BaseException):
    """Raised in a wait after a signal. Not an Exception, so that environments do not handle it as an error."""


class StopSignals:
    """Context manager that receives SIGTERM, SIGUSR1 and SIGINT; a second SIGINT raises KeyboardInterrupt.

    Outside the main thread the context does nothing.

    Args:
      rescue: function that saves the last complete state. If the main thread is in C code that does not return, another
        thread calls this function and ends the process with `exit_status`.

    Attributes:
      received: number of the first signal received; None before a signal.
      number: number of the signal that ends the run; None if no signal does. Equal to `received` unless `is_shared`.
      is_shared: whether other processes must agree to end the run; `number` is set when they agree.
      breakable: whether the main thread may be interrupted at any point. A loop sets this attribute directly if calls
        of `breaking` would be too slow.
    """

    def __init__(self, rescue: Callable[[], None]):
        self._rescue = rescue
        self.received: int | None = None
        self.number: int | None = None
        self.is_shared = False
        self.breakable = False
        self._began: float | None = None  # monotonic time when the wait began, or was last interrupted
        self._raises = False  # whether the next call of the handler comes from the watching thread
        self._rescues = False  # whether the watching thread has taken over
        self._before: dict[int, Any] = {}

    @property
    def name(self) -> str:
        """Name of the first signal received, such as 'SIGTERM'; '' if there was none."""
        return signal.Signals(first).name if (first := self.number or self.received) else ""

    def check(self) -> None:
        """Raises Interrupted if a signal was received."""
        if self.received is not None:
            raise Interrupted

    @contextlib.contextmanager
    def breaking(self) -> Iterator[None]:
        """Sets `breakable` within the context."""
        before, self.breakable, self._began = self.breakable, True, None
        try:
            yield
        finally:
            self.breakable = before

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        self.received = self.number = self._began = None
        self._main = threading.get_ident()
        self._ended = threading.Event()
        # Python's signal handler in C writes to this pipe, even while the main thread is in C code and cannot run
        # `_handle`.
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
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread as well
            os.write(self._arrive, b"\0")  # not a signal's number
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
        while self._rescues:  # the watching thread ends the process
            time.sleep(LOOK_SECONDS)
        if raises:
            if self.breakable:
                raise Interrupted
        elif self.received is None:
            self.received = number
            if not self.is_shared:
                self.number = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """Interrupts waits of the main thread after a signal."""
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
            elif now - began > GRACE_SECONDS:  # interrupts again if an environment has caught Interrupted
                self._began, self._raises = now, True
                signal.pthread_kill(self._main, number)

    def _take_over(self, number: int) -> None:
        """Calls `rescue` and ends the process, unless the main thread has returned to Python."""
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
            os._exit(exit_status(number))


_ENTERED: list[StopSignals] = []


def _forget() -> None:
    """Restores the handlers in a forked child: SIGTERM and SIGUSR1 end it, SIGINT is ignored."""
    for signals in _ENTERED:
        signals._restore()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _ENTERED.clear()


os.register_at_fork(after_in_child=_forget)
