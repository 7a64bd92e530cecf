"""Connect four, for two sides that take turns; see self_play.py, whose wrapper plays for one of them."""

from typing import Annotated, Any

import gin
import gymnasium
import numpy as np
from gymnasium import spaces

from alfish.parameters import Range, checked

COLUMNS, ROWS = 7, 6
_STRIDE = ROWS + 1  # bits of a column; the highest one stays empty, so that no line crosses an edge


@gin.configurable
@checked
class ConnectFour(gymnasium.Env):
    """The side to move drops a stone into a column; four stones of a side in a line win, a full board is a draw.

    Observations are the stones `[2 * 6 * 7]`, those of the side to move first, so one policy plays for both sides. The
    reward is for the side that has moved: 1 for a win. A choice of a full column means the next open one to its right,
    cyclically: every choice is a legal move, and no mask is needed.

    Args:
      num_random_moves: moves at random with which a game begins, so that games differ. Nobody can win in 6 moves.
    """

    observation_space = spaces.Box(0, 1, (2 * ROWS * COLUMNS,), np.float32)
    action_space = spaces.Discrete(COLUMNS)

    def __init__(self, num_random_moves: Annotated[int, Range(0, 6)] = 0):
        self._num_random_moves = num_random_moves

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._stones = np.zeros((2, ROWS, COLUMNS), np.float32)
        self._bits, self._heights, self._side = [0, 0], [0] * COLUMNS, 0
        for column in self.np_random.integers(COLUMNS, size=self._num_random_moves).tolist():
            self._move(column)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        wins = self._move(int(action))
        return self._observation(), float(wins), wins or min(self._heights) == ROWS, False, {}

    def _move(self, column: int) -> bool:
        """Drops a stone of the side to move, whose opponent is then to move. Returns True if it wins."""
        while self._heights[column] == ROWS:
            column = (column + 1) % COLUMNS
        row, side = self._heights[column], self._side
        self._heights[column] += 1
        self._stones[side, row, column] = 1
        self._bits[side] |= 1 << (column * _STRIDE + row)
        self._side = 1 - side
        return _has_four(self._bits[side])

    def _observation(self) -> np.ndarray:
        return self._stones[[self._side, 1 - self._side]].reshape(-1)


def _has_four(bits: int) -> bool:
    """Returns True if four bits lie in a line: vertical, horizontal or diagonal."""
    for shift in (1, _STRIDE, _STRIDE - 1, _STRIDE + 1):
        pairs = bits & (bits >> shift)
        if pairs & (pairs >> 2 * shift):
            return True
    return False
