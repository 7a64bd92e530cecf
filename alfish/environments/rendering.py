"""Rendering to arrays on machines without a display."""

import ctypes.util
import os
import sys

import gymnasium

from alfish.errors import UsageError, first_line

# MuJoCo's backends that need no display, each with its library, in the order of preference.
BACKENDS = {"egl": "EGL", "osmesa": "OSMesa"}


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
    """Returns the error to raise for a failed rendering; None if the error comes from the environment's own code."""
    if not hasattr(env.unwrapped, "mujoco_renderer"):
        return None
    backend = os.environ.get("MUJOCO_GL")
    how = f"with MUJOCO_GL={backend}" if backend else "without a display"
    return UsageError(
        f"MuJoCo cannot render {how} ({first_line(error)}); install EGL or OSMesa (apt-get install libegl1, or "
        "libosmesa6) and leave MUJOCO_GL unset"
    )
