"""Lock on the settings of the whole process: gin's configuration, and the global random generators."""

import contextlib
import threading
from collections.abc import Iterator

from alfish.errors import UsageError

POLL_SECONDS = 0.05

_lock = threading.RLock()
_is_long = False  # whether the lock is held by a thread that will not release it soon


@contextlib.contextmanager
def held(brief: bool = False) -> Iterator[None]:
    """Locks the settings for this thread within the context. Contexts may be nested.

    Args:
      brief: whether the context ends soon. Other threads then wait; otherwise they raise UsageError.

    Raises:
      UsageError: another thread holds the settings, in a context that is not brief.
    """
    global _is_long
    _acquire()
    before, _is_long = _is_long, _is_long or not brief
    try:
        yield
    finally:
        _is_long = before
        _lock.release()


def check() -> None:
    """Raises UsageError if another thread holds the settings; if it holds them briefly, waits instead."""
    _acquire()
    _lock.release()


def _acquire() -> None:
    # A holder sets the flag while it has the lock, so a waiting thread must read the flag repeatedly.
    while not _lock.acquire(timeout=0 if _is_long else POLL_SECONDS):
        if _is_long:
            raise UsageError(
                "another thread of this process trains or has a run open, but a process has only one configuration and "
                "one set of random generators; wait until it has finished, or train in several processes, as `alfish "
                "sweep` does"
            )
