"""Replaces games that fail with new games."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from alfish.environments.sequential import close
from alfish.errors.user_code import calling


class Replacements:
    """Replaces games that fail with new games, and passes the progress of training to all games.

    Args:
      make: function that makes a game; None means that the error of a game is raised.
      example: one of the games.
      num_games: number of games, G.
      name: name of the game in messages.

    Attributes:
      report: function that receives the number and the error of a game that failed; None means that errors are raised.
      failed: games that failed in this step, `[G]` bool.
      have_curriculum: whether the games have a method `set_progress`.
    """

    def __init__(self, make: Callable[[], Any] | None, example: Any, num_games: int, name: str):
        self._make, self._name, self._progress = make, name, 0.0
        self.report: Callable[[int, BaseException], None] | None = None
        self.failed = np.zeros(num_games, bool)
        self.have_curriculum = callable(getattr(example, "set_progress", None))

    def tolerate_errors(self, report: Callable[[int, BaseException], None]) -> None:
        """See `Games.tolerate_errors`."""
        if self._make is not None:
            self.report = report

    def set_progress(self, progress: float, games: list[Any]) -> None:
        """Passes the progress of training to games."""
        self._progress = progress
        if self.have_curriculum:
            with calling(f"{self._name}.set_progress"):
                for game in games:
                    game.set_progress(progress)

    def replaced(self, game: Any) -> Any:
        """Closes a game; returns a new game at the current progress of training."""
        assert self._make is not None
        with contextlib.suppress(Exception):  # closing a broken game may fail
            close(game)
        made = self._make()
        self.set_progress(self._progress, [made])
        return made
