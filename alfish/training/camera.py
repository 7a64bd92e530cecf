"""Frames of environments that step in this process."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from alfish.environments import Environment, VectorEnvironment, rendering
from alfish.environments.games import Games
from alfish.environments.games.zoo import ZooGames
from alfish.environments.members import single_environments
from alfish.errors import UsageError
from alfish.errors.user_code import calling, refuse


class Camera:
    """Renders environments built with the render mode 'rgb_array'. In MuJoCo the tracking camera is used.

    Args:
      environment: environments or games of an evaluation.
      setting: name of the setting that requests the film, for messages, such as `--video`.

    Attributes:
      fps: number of frames per second of time in the environment.

    Raises:
      UsageError: the environment computes in tensors, or does not render arrays.
    """

    def __init__(self, environment: Environment | Games, setting: str):
        self._name = environment.name
        if isinstance(environment, ZooGames):
            self._env, self._singles = environment.games[0], environment.games
        elif isinstance(environment, VectorEnvironment):
            self._env, self._singles = environment.env, single_environments(environment.env)
            for single in self._singles:
                rendering.follow(single)
        else:
            raise UsageError(f"{setting} can film environments of gymnasium and PettingZoo, but not {environment.name}")
        members: Sequence[Any] = self._singles if self._singles else [self._env]
        if any(getattr(member, "render_mode", None) != "rgb_array" for member in members):
            raise UsageError(
                f"{setting} needs frames, but {environment.name} renders none with render_mode='rgb_array'; give its "
                "class an argument render_mode, an attribute of that name, and a method render"
            )
        self.fps = float(self._env.metadata.get("render_fps") or 30)
        self._size: tuple[int, ...] | None = None

    def frames(self, lanes: Sequence[int]) -> list[np.ndarray]:
        """Returns the present frames of the environments `lanes`, each `[H, W, 3]` uint8, always of the same size.

        Raises:
          UsageError: an environment does not return such a frame.
        """
        if not self._singles:
            with calling(f"{self._name}.render"):
                rendered: Any = self._env.render()
            return self._of_lanes(rendered, lanes)
        return [self._checked(self._render(self._singles[lane])) for lane in lanes]

    def _of_lanes(self, rendered: Any, lanes: Sequence[int]) -> list[np.ndarray]:
        """Returns frames from the output of a vector class, a sequence or an array `[B, H, W, 3]`."""
        count = None if rendered is None else len(rendered)
        if count not in (None, 0, self._env.num_envs):
            raise UsageError(
                f"{self._name}.render returned {count} frames for {self._env.num_envs} environments; it must return "
                "one for each, as a list or an array [B, height, width, 3]"
            )
        return [self._checked(rendered[lane] if count else None) for lane in lanes]

    def _render(self, env: Any) -> Any:
        try:
            return env.render()
        except Exception as error:
            if (failure := rendering.failure(env, error)) is not None:
                raise failure from error
            refuse(error, f"{self._name}.render")
            raise

    def _checked(self, frame: Any) -> np.ndarray:
        if frame is None:
            raise UsageError("the environment renders no frames with render_mode='rgb_array'")
        array = np.asarray(frame)
        shape = array.shape[:2]
        is_image = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4))
        if not is_image or array.dtype != np.uint8 or min(shape) < 2 or shape != (self._size or shape):
            asked = "an array [height, width, 3] of uint8, at least 2 x 2, always of the same size"
            raise UsageError(
                f"the environment renders {array.dtype} of shape {list(array.shape)} with render_mode='rgb_array'; it "
                f"must be {asked}"
            )
        self._size = shape
        colours = array[:, :, None] if array.ndim == 2 else array[:, :, :3]
        return np.broadcast_to(colours, (*shape, 3))
