"""Atari games: preprocessing, FIRE for games that wait for it, and episodes of one life in a game that goes on.

Mnih et al., 2015, Methods; Machado et al., 2018, for sticky actions. Frames are single: `FrameStack` stacks them. From
inside outwards: `preprocess_atari`, `FireOnReset`, and in training `EpisodicLife`.
"""

from typing import Any

import gin
import gymnasium
import numpy as np

from alfish.errors import UsageError
from alfish.parameters import NonNegativeInt, PositiveInt, checked


@gin.configurable(module="alfish.environments")
@checked
def preprocess_atari(
    env: gymnasium.Env,
    frame_skip: PositiveInt = 4,
    screen_size: PositiveInt = 84,
    noop_max: NonNegativeInt = 30,
    keep_channel: bool = False,
):
    """84 x 84 grey frames, the larger of the last two of each 4; 1 to 30 idle frames at the start. A wrapper.

    Args:
      env: an `ALE/...-v5` environment made with `frameskip=1`.
      frame_skip: emulator frames an action; the score is summed over them.
      screen_size: height and width of a frame.
      noop_max: idle frames at the start, drawn uniformly from 1 to this; 0: none.
      keep_channel: frames are [1, height, width], as EnvPool's are, in place of [height, width].
    """
    try:
        env = gymnasium.wrappers.AtariPreprocessing(
            env, noop_max=noop_max, frame_skip=frame_skip, screen_size=screen_size, terminal_on_life_loss=False
        )
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise UsageError("Atari games need the extra 'atari': pip install 'alfish[atari]'") from error
    return gymnasium.wrappers.ReshapeObservation(env, (1, screen_size, screen_size)) if keep_channel else env


@gin.configurable(module="alfish.environments")
@checked
class FireOnReset(gymnasium.Wrapper):
    """Presses FIRE after each reset and each lost life; a game whose actions have no FIRE is left alone.

    Some games serve no ball before it. A policy that never had to press it would wait for ever, so this belongs in
    `make_environment.wrappers`, which evaluation has too, and inside `EpisodicLife`.

    The press is one more step of `env`, so outside `preprocess_atari` it lasts `frame_skip` frames. After a lost life
    it is part of the step that lost it. Its reward is added to that step's, or after a reset to the first step's.
    Sticky actions swallow it with chance `repeat_action_probability ** frame_skip`: 1 press in 256 at 0.25 and 4.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        meanings = env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
        self._fire = meanings.index("FIRE") if "FIRE" in meanings else None
        self._lives = _Lives(env)
        self._reward = 0.0  # of the press after a reset, until a step takes it along

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        observation, info = self._start(seed, options)
        if self._fire is None:
            return observation, info
        observation, self._reward, terminated, truncated, info = self.step(self._fire)
        # A game that the press ends starts again, without it.
        return self._start(None, options) if terminated or truncated else (observation, info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        total, self._reward = self._reward + float(np.asarray(reward)), 0.0
        while self._lives.lost_one() and self._fire is not None and not (terminated or truncated):
            observation, reward, terminated, truncated, info = self.env.step(self._fire)
            total += float(np.asarray(reward))
        return observation, total, terminated, truncated, info

    def _start(self, seed: int | None, options: dict | None) -> tuple[Any, dict]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._lives.restart()
        self._reward = 0.0
        return observation, info


@gin.configurable(module="alfish.environments")
@checked
class EpisodicLife(gymnasium.Wrapper):
    """Ends the episode with each lost life, and goes on with the same game; only a finished game starts a new one.

    gymnasium's `terminal_on_life_loss` restarts the game, so that what follows the first life is never seen. For
    training only: evaluation plays full games. An episode of a game that goes on starts from the observation that the
    one before ended with, so no frame and no reward is lost between them.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self._lives = _Lives(env)
        self._game_over = True  # or not begun
        self._start: tuple[Any, dict] = None, {}  # of the next episode, while the game goes on

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._game_over = terminated or truncated
        self._start = observation, info
        return observation, float(np.asarray(reward)), terminated or self._lives.lost_one(), truncated, info

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        if self._game_over or seed is not None:
            self._start = self.env.reset(seed=seed, options=options)
            self._lives.restart()
        observation, info = self._start
        return observation, dict(info)


class _Lives:
    """Notices each lost life of an environment's game."""

    def __init__(self, env: gymnasium.Env):
        self._ale: Any = env.unwrapped.ale  # type: ignore[attr-defined]
        self._left = 0

    def restart(self) -> None:
        """A new game has begun."""
        self._left = self._ale.lives()

    def lost_one(self) -> bool:
        """Whether there are fewer lives than when this was last asked, and still some: a game tells its end itself."""
        before, self._left = self._left, self._ale.lives()
        # Some games show no life for a few frames before the end.
        return 0 < self._left < before
