"""Drawing without a screen, and what MuJoCo prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest

from rl_training.envs import rendering
from rl_training.envs.rendering import drawing_explained, drawn_by, follow_robot, without_screen
from rl_training.errors import EnvironmentFailure, UserError

VARIABLES = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "MUJOCO_GL")
ROBOT = """
import gymnasium as gym
from rl_training.envs.factory import make_env, read_recipe
for _ in range(3):
    make_env(read_recipe("HalfCheetah-v5", {}, None)).close()
import mujoco
from rl_training.envs.rendering import _tell
for time in (0.1, 0.2):
    _tell(f"Nan, Inf or huge value in QACC at DOF 0. The simulation is unstable. Time = {time}.")
"""


@pytest.fixture(autouse=True)
def _a_machine_without_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setitem(sys.modules, "mujoco", os)  # as if it was imported


@pytest.mark.parametrize(("found", "way"), [(("EGL", "OSMesa"), "egl"), (("OSMesa",), "osmesa"), ((), "egl")])
def test_a_library_that_is_there_draws(found: tuple[str, ...], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "find_library", lambda name: name if name in found else None)
    with without_screen():
        assert (os.environ["SDL_VIDEODRIVER"], os.environ["MUJOCO_GL"]) == ("dummy", way)
        assert drawn_by().endswith(f"(MUJOCO_GL={way}), because there is no display")
    assert not {"SDL_VIDEODRIVER", "MUJOCO_GL"} & set(os.environ)


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    with without_screen():
        assert os.environ["MUJOCO_GL"] == "osmesa"
    assert os.environ["MUJOCO_GL"] == "osmesa"


def test_with_a_display_nothing_is_chosen_for_mujoco(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPLAY", ":0")
    with without_screen():
        assert "MUJOCO_GL" not in os.environ
        assert drawn_by() == ""


@pytest.mark.parametrize(
    "error",
    [
        EnvironmentFailure("Hopper-v5 raised FatalError: an OpenGL platform library has not been loaded."),
        UserError("Hopper-v5 cannot be made: 'NoneType' object has no attribute 'glGetError'."),
        ImportError("Cannot initialize a EGL device display."),
    ],
)
def test_every_failure_to_draw_is_one_sentence_with_what_helps(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    sentence = r"cannot draw with MUJOCO_GL=osmesa; set MUJOCO_GL=egl, or install"
    with pytest.raises(UserError, match=sentence), drawing_explained():
        raise error


def test_other_failures_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentFailure, match="the leg"), drawing_explained():
        raise EnvironmentFailure("Hopper-v5 raised ValueError: the leg.")
    for name in [name for name in sys.modules if "mujoco" in name]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError), drawing_explained():
        raise ImportError("EGL")


def test_the_camera_follows_a_robot_unless_the_user_chose_one() -> None:
    robot, other = (gym.registry[name] for name in ("Hopper-v5", "CartPole-v1"))
    assert follow_robot(robot, {"width": 64}) == {"width": 64, "camera_name": "track"}
    for chosen in ({"camera_id": 0}, {"camera_name": "top"}, {"default_camera_config": {}}):
        assert follow_robot(robot, chosen) == chosen
    assert follow_robot(other, {}) == follow_robot(None, {}) == {}


def test_mujoco_prints_each_warning_once_and_none_about_gymnasiums_robots(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    done = subprocess.run([sys.executable, "-c", ROBOT], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "MuJoCo: Nan, Inf or huge value in QACC at DOF 0. The simulation is unstable. Time = 0.1."
    ]
    assert list(tmp_path.iterdir()) == []  # no MUJOCO_LOG.TXT
