"""Atari games: the usual preprocessing, and episodes of one life that do not restart the game.

Mnih et al., 2015, Methods; Machado et al., 2018, for sticky actions. Frames are single: `FrameStack` stacks them.
"""

from typing import Any

import gin
import gymnasium
import numpy as np

from alfish.errors import UsageError


@gin.configurable(module="alfish.environments")
def preprocess_atari(env: gymnasium.Env, frame_skip: int = 4, screen_size: int = 84, noop_max: int = 30):
    """84 x 84 grey frames, the larger of the last two of each 4; up to 30 idle steps at the start. A wrapper.

    Args:
      env: an `ALE/...-v5` environment made with `frameskip=1`.
      frame_skip: emulator frames an action; the score is summed over them.
      screen_size: height and width of a frame.
      noop_max: idle frames at the start, drawn uniformly from 0 to this.
    """
    try:
        return gymnasium.wrappers.AtariPreprocessing(
            env, noop_max=noop_max, frame_skip=frame_skip, screen_size=screen_size, terminal_on_life_loss=False
        )
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise UsageError("Atari games need the extra 'atari': pip install 'alfish[atari]'") from error


@gin.configurable(module="alfish.environments")
class FireOnReset(gymnasium.Wrapper):
    """Presses FIRE after a reset, in games that wait for it."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        meanings = env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
        self._fire = meanings.index("FIRE") if "FIRE" in meanings else None

    def reset(self, **arguments: Any) -> tuple[Any, dict]:
        observation, info = self.env.reset(**arguments)
        if self._fire is None:
            return observation, info
        observation, _, terminated, truncated, info = self.env.step(self._fire)
        return self.env.reset() if terminated or truncated else (observation, info)


@gin.configurable(module="alfish.environments")
class EpisodicLife(gymnasium.Wrapper):
    """Ends the episode with each lost life, and goes on with the same game; only a finished game starts a new one.

    gymnasium's `terminal_on_life_loss` restarts the game, so that what follows the first life is never seen. For
    training only: evaluation plays full games.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self._lives, self._game_over = 0, True

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._game_over = terminated or truncated
        lives = self.env.unwrapped.ale.lives()  # type: ignore[attr-defined]
        # Some games show no life for a few frames before the end.
        lost = 0 < lives < self._lives
        self._lives = lives
        return observation, float(np.asarray(reward)), terminated or lost, truncated, info

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        if self._game_over or seed is not None:
            observation, info = self.env.reset(seed=seed, options=options)
        else:
            observation, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                observation, info = self.env.reset(options=options)
        self._game_over = False
        self._lives = self.env.unwrapped.ale.lives()  # type: ignore[attr-defined]
        return observation, info
