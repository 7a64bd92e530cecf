"""Rendering without a display: what is chosen, which camera films, and one sentence where nothing can render."""

import ctypes.util
import os
import sys

import gymnasium
import pytest
from toys import OneState

from alfish.environments import rendering


@pytest.mark.parametrize(
    "libraries, before, chosen",
    [
        (["EGL", "OSMesa"], {}, "egl"),
        (["OSMesa"], {}, "osmesa"),
        ([], {}, None),
        (["EGL"], {"MUJOCO_GL": "glfw"}, "glfw"),
        (["EGL"], {"DISPLAY": ":0"}, None),
    ],
)
def test_what_renders_without_a_display_is_what_is_installed(monkeypatch, libraries, before, chosen):
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: name if name in libraries else None)
    monkeypatch.setattr(sys, "platform", "linux")
    environ = dict(before)
    monkeypatch.setattr(os, "environ", environ)
    rendering.prepare()
    assert environ.get("MUJOCO_GL") == chosen and environ["SDL_VIDEODRIVER"] == "dummy"


def test_a_mujoco_environment_is_filmed_by_its_tracking_camera():
    mujoco = pytest.importorskip("mujoco")

    def camera_of(env_id, **kwargs):
        env = gymnasium.make(env_id, render_mode="rgb_array", **kwargs)
        rendering.follow(env)
        renderer = env.unwrapped.mujoco_renderer
        env.close()
        name = mujoco.mj_id2name(renderer.model, mujoco.mjtObj.mjOBJ_CAMERA, max(renderer.camera_id, 0))
        return renderer.camera_id, name

    assert camera_of("HalfCheetah-v5") == (0, "track")
    assert camera_of("HalfCheetah-v5", camera_id=-1)[0] == -1  # the user's own choice
    assert camera_of("InvertedPendulum-v5")[0] == -1  # which has none
    rendering.follow(OneState())  # no MuJoCo


def test_only_what_mujoco_raises_is_reported_in_one_sentence(monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    env, error = OneState(), RuntimeError("no OpenGL context\nand more")
    assert rendering.failure(env, error) is None
    env.mujoco_renderer = None
    assert str(rendering.failure(env, error)) == (
        "MuJoCo cannot render without a display (no OpenGL context); install EGL or OSMesa (apt-get install libegl1, "
        "or libosmesa6) and leave MUJOCO_GL unset"
    )
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    assert "MuJoCo cannot render with MUJOCO_GL=osmesa (" in str(rendering.failure(env, error))
