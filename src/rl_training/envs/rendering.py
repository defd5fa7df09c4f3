"""Drawing without a screen, and MuJoCo's warnings, each of them once."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes.util import find_library
from importlib.util import find_spec
from typing import Any

from rl_training.errors import EnvironmentFailure, UserError

DRAWERS = {"egl": "EGL", "osmesa": "OSMesa"}  # how MuJoCo draws without a screen -> the library that it needs
UNFIXABLE = "settotalmass"  # a word in the warnings about Gymnasium's own robots
_DRAWING = re.compile(r"OpenGL|EGL|OSMesa|GLFW|glGetError|opengl_context|mjr_make", re.I)
_heard: set[str] | None = None  # warnings of MuJoCo without their numbers; None before we listen


def has_display() -> bool:
    """Whether a window can be opened."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


@contextmanager
def without_screen() -> Iterator[None]:
    """Make renderers draw into memory, unless the user's environment variables say otherwise."""
    wanted = {"SDL_VIDEODRIVER": "dummy"}
    if not has_display():
        found = [name for name, library in DRAWERS.items() if find_library(library)]
        wanted["MUJOCO_GL"] = found[0] if found else "egl"
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def drawn_by() -> str:
    """How MuJoCo draws here, in words; empty where it has a screen or is not used."""
    way = os.environ.get("MUJOCO_GL", "")
    if "mujoco" not in sys.modules or has_display() or not way:
        return ""
    return f"{DRAWERS.get(way, way)} (MUJOCO_GL={way}), because there is no display"


@contextmanager
def drawing_explained() -> Iterator[None]:
    """Turn MuJoCo's many errors about OpenGL into one sentence with what helps."""
    try:
        yield
    except (EnvironmentFailure, UserError, ImportError, RuntimeError, AttributeError) as error:
        used = any("mujoco" in name.split(".") for name in sys.modules)  # its own import may be what failed
        if not used or not _DRAWING.search(str(error)):
            raise
        way = os.environ.get("MUJOCO_GL", "")
        other = next(name for name in DRAWERS if name != way)
        told = f"MuJoCo cannot draw with MUJOCO_GL={way or 'glfw'}"
        install = "apt install libegl1 or libosmesa6"
        raise UserError(f"{told}; set MUJOCO_GL={other}, or install a library ({install}).") from error


def follow_robot(spec: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an environment that is drawn; of Gymnasium's robots, with the camera that follows them.

    Since 1.4, Gymnasium's default is a camera that stands still, and the robot walks out of the picture.
    """
    is_robot = str(getattr(spec, "entry_point", "")).startswith("gymnasium.envs.mujoco")
    if not is_robot or {"camera_name", "camera_id", "default_camera_config"} & kwargs.keys():
        return kwargs
    return {**kwargs, "camera_name": "track"}  # where there is no such camera, the default one is used


def hear_mujoco(spec: Any = "mujoco") -> None:
    """Print each of MuJoCo's warnings once in a process, instead of every time and into a file MUJOCO_LOG.TXT.

    Called before an environment of this Gymnasium spec is made; does nothing if it is none of MuJoCo. A handler of the
    user's own stays.
    """
    global _heard
    used = "mujoco" in sys.modules or "mujoco" in str(getattr(spec, "entry_point", spec))
    if _heard is not None or not used or find_spec("mujoco") is None:
        return
    _heard = set()
    import mujoco

    if mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(_tell)


def _tell(message: str) -> None:
    kind = re.sub(r"[-\d.]+", "", message)
    if _heard is not None and kind not in _heard and UNFIXABLE not in message:
        _heard.add(kind)
        print(f"MuJoCo: {message}", file=sys.stderr)
