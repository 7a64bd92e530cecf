"""Rendering to arrays on machines without a display, and pictures that are drawn in numpy."""

import ctypes.util
import os
import sys
from typing import Any

import gymnasium
import numpy as np

from alfish.errors import UsageError, first_line

# MuJoCo's backends that need no display, in the order of preference, with their libraries.
BACKENDS = {"egl": "EGL", "osmesa": "OSMesa"}

Point = Any  # x and y, in units of the drawing
Color = tuple[int, int, int]  # red, green, blue


def prepare() -> None:
    """Sets rendering backends of pygame and MuJoCo that need no display; call it before MuJoCo is imported.

    Environment variables that the user has set do not change.
    """
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame renders to arrays, and needs no screen
    has_display = "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    if "MUJOCO_GL" in os.environ or has_display or sys.platform != "linux":
        return
    found = [backend for backend, library in BACKENDS.items() if ctypes.util.find_library(library)]
    if found:
        os.environ["MUJOCO_GL"] = found[0]


def follow(env: gymnasium.Env) -> None:
    """Selects the tracking camera of a MuJoCo environment that has one, unless the user has chosen a camera."""
    renderer = getattr(env.unwrapped, "mujoco_renderer", None)
    asked = {"camera_name", "camera_id"} & set(env.spec.kwargs if env.spec else ())
    if renderer is None or asked:
        return
    import mujoco

    camera = mujoco.mj_name2id(renderer.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
    if camera != -1:
        renderer.camera_id = camera


def failure(env: gymnasium.Env, error: Exception) -> UsageError | None:
    """Returns the error to raise for a failed rendering by MuJoCo; None if the environment does not use MuJoCo."""
    if not hasattr(env.unwrapped, "mujoco_renderer"):
        return None
    backend = os.environ.get("MUJOCO_GL")
    how = f"with MUJOCO_GL={backend}" if backend else "without a display"
    return UsageError(
        f"MuJoCo cannot render {how} ({first_line(error)}); install EGL or OSMesa (apt-get install libegl1, or "
        "libosmesa6) and leave MUJOCO_GL unset"
    )


class Frame:
    """A picture with a height of 400 pixels, initially white.

    Args:
      width, height: ranges (least, largest) of the shown x and y.

    Attributes:
      pixels: the picture, `[H, W, 3]` uint8.
    """

    def __init__(self, width: tuple[float, float], height: tuple[float, float]):
        scale = 400 / (height[1] - height[0])
        columns = round(scale * (width[1] - width[0]) / 2) * 2  # video encoders need an even width
        self._x = np.linspace(*width, columns)[None, :]
        self._y = np.linspace(height[1], height[0], 400)[:, None]
        self.pixels = np.full((400, columns, 3), 255, np.uint8)

    def line(self, start: Point, end: Point, width: float, color: Color = (0, 0, 0)) -> None:
        """Draws a line with round ends; a line from a point to itself is a disc."""
        direction = end[0] - start[0], end[1] - start[1]
        length = direction[0] ** 2 + direction[1] ** 2
        x, y = self._x - start[0], self._y - start[1]
        along = np.clip((x * direction[0] + y * direction[1]) / (length or 1.0), 0, 1)
        distance = (x - along * direction[0]) ** 2 + (y - along * direction[1]) ** 2
        self.pixels[distance <= (width / 2) ** 2] = color

    @staticmethod
    def of_board(board: Any) -> np.ndarray:
        """Returns a picture of a board, `[rows, columns]` in [0, 1], with squares of 32 pixels; 1 is black."""
        squares = np.asarray(255 * (1 - board), np.uint8)
        return np.repeat(np.kron(squares, np.ones((32, 32), np.uint8))[..., None], 3, -1)
