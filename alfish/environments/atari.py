"""Wrappers of Atari games: preprocessing, FIRE for games that wait for it, and one episode per life.

Observations are single frames; the transform `FrameStack` stacks frames. The order of wrappers, innermost first, is
`preprocess_atari`, `FireOnReset`, and, in training only, `EpisodicLife`.

Source: Mnih et al., 2015, Methods; for sticky actions, Machado et al., 2018.
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
    """Preprocesses a game: an observation is the pixel-wise maximum of the last two of 4 frames, 84 x 84 in grey.

    Args:
      env: `ALE/...-v5` environment made with `frameskip=1`.
      frame_skip: number of emulator frames per action; the scores of these frames are added up.
      screen_size: height and width of a frame.
      noop_max: largest number of idle frames at the start of an episode; the number is drawn uniformly from 1 to
        `noop_max`. 0 means no idle frames.
      keep_channel: whether frames are [1, height, width], as in EnvPool, instead of [height, width].
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
    """Presses FIRE after each reset and each lost life. Games without the action FIRE do not change.

    Some games wait for FIRE before they serve the ball, so a policy that has not learned to press FIRE would wait
    forever. Use this wrapper in `make_environment.wrappers`, which also applies to evaluation, and inside
    `EpisodicLife`.

    A press is an additional step of `env`, of `frame_skip` frames if `env` is preprocessed by `preprocess_atari`. After
    a lost life, the press is part of the step that lost the life, and the press's reward is added to that step's
    reward. After a reset, the press's reward is added to the first step's reward. Sticky actions suppress a press with
    probability `repeat_action_probability ** frame_skip`: 1 in 256 for 0.25 and 4.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        meanings = env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
        self._fire = meanings.index("FIRE") if "FIRE" in meanings else None
        self._lives = _Lives(env)
        self._reward = 0.0  # reward of the press after a reset, added to the first step's reward

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        observation, info = self._start(seed, options)
        if self._fire is None:
            return observation, info
        observation, self._reward, terminated, truncated, info = self.step(self._fire)
        # If the press ends the game, a new game starts without a press.
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
    """Ends the episode at each lost life; the next episode continues the same game until the game is over.

    In contrast, gymnasium's `terminal_on_life_loss` restarts the game, so later lives are never played. This wrapper is
    for training only; evaluation plays full games. An episode that continues a game starts from the last observation of
    the previous episode, so no frame and no reward is lost between the two episodes.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self._lives = _Lives(env)
        self._game_over = True  # no game has started
        self._start: tuple[Any, dict] = None, {}  # first observation of the next episode of the same game

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
    """Detects lost lives by the emulator's number of lives."""

    def __init__(self, env: gymnasium.Env):
        self._ale: Any = env.unwrapped.ale  # type: ignore[attr-defined]
        self._left = 0

    def restart(self) -> None:
        """Starts counting in a new game."""
        self._left = self._ale.lives()

    def lost_one(self) -> bool:
        """Returns whether a life was lost since the last call; False for the last life, because the game then ends."""
        before, self._left = self._left, self._ale.lives()
        # The last life is not counted here, because some games report 0 lives for a few frames before they end.
        return 0 < self._left < before
