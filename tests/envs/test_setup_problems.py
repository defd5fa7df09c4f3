"""Set-ups that fail in practice: `train` and `doctor` name them, with the line of the user's code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces as gs
from typer.testing import CliRunner

from env_zoo import Walk
from resume_cases import tiny
from rl_training.cli.main import app
from rl_training.envs.probe import find_problems
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.run.workflows import TrainResult, train
from rl_training.tools import doctor

GOOD = """
import gymnasium as gym
import numpy as np

class Mine(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t > 9, False, {}
"""
RESET, STEP = 9, 14  # lines


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor, "SECONDS", 0.01)
    sys.modules.pop("mine", None)
    yield
    sys.modules.pop("mine", None)


def write(old: str = "", new: str = "") -> None:
    assert old in GOOD
    Path("mine.py").write_text(GOOD.replace(old, new))


def run(**fields: Any) -> TrainResult:
    return train(tiny("ppo", Path("runs"), env_id="mine:Mine", eval_episodes=1, **fields), console=True)


WRONG = {
    "reset without info": (
        "return np.zeros(2, np.float32), {}\n\n", "return np.zeros(2, np.float32)\n\n",
        f"mine:Mine: reset (mine.py, line {RESET}) returned only an observation; it must return (observation, info).",
    ),
    "reset without seed": (
        "*, seed=None, options=None", "",
        f"mine:Mine: reset (mine.py, line {RESET}) takes no seed; write reset(self, *, seed=None, options=None).",
    ),
    "reset that raises": (
        "self.t = 0", "self.t = 1 / 0",
        "the environment mine:Mine fails in reset: division by zero (mine.py, line 11).",
    ),
    "shape": (
        "return np.zeros(2, np.float32), {}", "return np.zeros(3, np.float32), {}",
        f"returned an observation of shape (3,) (mine.py, line {RESET}); its observation space says (2,).",
    ),
    "four values": (
        "self.t > 9, False, {}", "self.t > 9, {}",
        f"mine:Mine returned 4 values from step (mine.py, line {STEP}), but it must return observation, reward, "
        "terminated, truncated and info; fix",
    ),
    "several rewards": (
        "float32), 1.0, self.t", "float32), np.ones(2), self.t",
        f"mine:Mine returned several numbers as a reward from step (mine.py, line {STEP}), but it must be one",
    ),
    "step that raises": (
        "self.t += 1", "self.t += 1 / 0", "raised ZeroDivisionError: division by zero (mine.py, line 15); fix",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_ends_a_run_is_one_sentence_with_the_line(name: str) -> None:
    old, new, said = WRONG[name]
    write(old, new)
    with pytest.raises((UserError, EnvironmentFailure)) as failed:
        run()
    assert said in str(failed.value)


def test_a_failure_in_a_process_has_its_line_too() -> None:
    write("self.t += 1", "self.t += 1 / 0")
    with pytest.raises(EnvironmentFailure, match=r"division by zero \(mine.py, line 15\)"):
        run(vectorization="async")


def test_several_rewards_of_a_process_are_named_too() -> None:
    write("float32), 1.0, self.t", "float32), np.ones(2), self.t")
    said = rf"returned several numbers as a reward from step \(mine.py, line {STEP}\), but it must be one"
    with pytest.raises(EnvironmentFailure, match=said):
        run(vectorization="async")


@pytest.mark.parametrize(
    ("mask", "said"), [("[1, 0, 1]", "has 3 entries; its action space needs 2."), ("[0, 0]", "forbids every action;")]
)
def test_a_first_mask_that_is_wrong_leaves_no_folder(mask: str, said: str) -> None:
    write("float32), {}", f"float32), {{'action_mask': {mask}}}")
    with pytest.raises(UserError, match=said):
        run()
    assert not Path("runs").exists()


def test_a_reset_without_options_is_named_and_ends_only_a_run_that_gives_them(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write("*, seed=None, options=None", "seed=None")
    said = f"reset (mine.py, line {RESET}) takes no options"
    run()
    assert f"warning: {said}, so that wrappers and time limits fail; write reset(self, *," in capfd.readouterr().err
    with pytest.raises(UserError) as failed:
        run(env_kwargs={"max_episode_steps": 5})
    assert str(failed.value) == f"mine:Mine: {said}; write reset(self, *, seed=None, options=None)."
    shown = CliRunner().invoke(app, ["doctor", "--env", "mine:Mine"]).stdout
    assert f"! reset {' ' * 10} {said}" in shown
    assert "reset: Write reset(self, *, seed=None, options=None)." in shown
    assert "TypeError" not in shown


def problems(env: gym.Env[Any, Any], info: Any = None) -> dict[str, str]:
    return {found.name: found.sentence() for found in find_problems(env, info or {})}


def seeing(space: gs.Space[Any]) -> gym.Env[Any, Any]:
    env = Walk()
    env.observation_space = space
    return env


IMAGE, FLOATS = gs.Box(0, 255, (64, 64, 3), np.uint8), gs.Box(0.0, 1.0, (3, 64, 48), np.float32)


@pytest.mark.parametrize(
    ("space", "name", "said"),
    [
        (FLOATS, "float image", "[3, 64, 48] of float32 looks like an image, but a vector is read; return uint8"),
        (gs.Tuple([gs.Discrete(2), gs.Dict({"eye": FLOATS})]), "float image",
         "the part '1.eye' [3, 64, 48] of float32 looks like an image, but a vector is read; return uint8"),
    ],
)  # fmt: skip
def test_an_image_that_no_convolution_reads_is_named(space: gs.Space[Any], name: str, said: str) -> None:
    assert said in problems(seeing(space))[name]


@pytest.mark.parametrize(
    "space",
    [
        IMAGE, gs.Box(-1, 1, (17,)), gs.Box(0, 1, (7, 7, 3)), gs.Box(0.0, 1.0, (64, 64)), gs.Box(0.0, 1.0, (5, 60, 7)),
        gs.Dict({"board": gs.Box(0, 1, (3, 3), np.uint8), "speed": gs.Box(-1, 1, (2,))}),
        gs.Dict({"camera": IMAGE, "speed": gs.Box(-1, 1, (2,))}),
    ],
)  # fmt: skip
def test_what_is_read_as_it_should_be_is_not_named(space: gs.Space[Any]) -> None:
    assert problems(seeing(space)) == {}


class Offers(Walk):
    """Has masks as Stable-Baselines3's contrib package reads them."""

    def action_masks(self) -> Any:
        return np.ones(2, bool)


def test_masks_that_are_not_read_are_named() -> None:
    line = Offers.action_masks.__code__.co_firstlineno
    said = problems(gym.wrappers.TimeLimit(Offers(), 5))["action masks"]
    assert f"Offers.action_masks() ({Path(__file__)}, line {line}) is not read; put the mask into info" in said
    assert "info['action_masks'] is not read" in problems(Walk(), {"action_masks": [1, 0]})["action masks"]
    assert problems(Offers(), {"action_mask": [1, 1]}) == {}
    assert problems(Walk()) == {}


def test_raw_atari_frames_are_named_with_the_preprocessing_to_paste() -> None:
    ale_py = pytest.importorskip("ale_py")
    gym.register_envs(ale_py)
    env = gym.make("ALE/Breakout-v5")
    assert "wrappers: {atari: {}}" in problems(env)["Atari frames"]
    env.close()
    env = gym.wrappers.AtariPreprocessing(gym.make("ALE/Breakout-v5", frameskip=1))
    assert problems(env) == {}
    env.close()


def test_train_warns_and_doctor_says_what_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    write("    def step", "    def action_masks(self):\n        return [1, 1]\n\n    def step")
    run()
    said = f"Mine.action_masks() (mine.py, line {STEP}) is not read"
    assert f"warning: {said}; put the mask into info['action_mask']" in capfd.readouterr().err
    result = CliRunner().invoke(app, ["doctor", "--env", "mine:Mine"])
    assert result.exit_code == 0, result.output
    assert said in result.stdout
    assert "action masks: Put the mask into info['action_mask']" in result.stdout


def test_doctor_names_the_line_of_a_step_that_returns_four_values() -> None:
    write("self.t > 9, False, {}", "self.t > 9, {}")
    result = CliRunner().invoke(app, ["doctor", "--env", "mine:Mine"])
    assert result.exit_code == 1
    assert "returned 4 values from step" in result.stdout
    assert f"Fix this first (mine.py, line {STEP})" in result.stdout


@pytest.mark.parametrize(
    ("old", "new", "said", "fix"),
    [
        ("np.float32), 1.0", "np.float64), 1.0", ": they are float64", "of the space's dtype, float32"),
        ("np.zeros(2, np.float32), 1.0", "np.array([0, -3], np.float32), 1.0",
         ": the value -3 at [1] lies outside [-1, 1]", "Widen the bounds of the space, or clip"),
        ("1.0, self.t", "float(self.t) if self.t < 3 else np.nan, self.t", "reward 1..2, but nan at step 3",
         "Return finite rewards only"),
    ],
)  # fmt: skip
def test_doctor_says_what_is_wrong_with_a_value(old: str, new: str, said: str, fix: str) -> None:
    write(old, new)
    shown = CliRunner().invoke(app, ["doctor", "--env", "mine:Mine"]).stdout
    assert said in shown
    assert fix in shown


def test_doctor_names_a_replay_that_does_not_fit() -> None:
    words = ["doctor", "--env", "CartPole-v1", "--algo", "dqn", "--set", "buffer_capacity=1e12"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1, result.output
    assert "✗ memory" in result.stdout


def test_a_policy_of_a_callable_is_evaluated_and_resumed_from_the_command_line() -> None:
    write()
    import mine  # type: ignore[import-not-found]

    config = {"algo": "ppo", "total_timesteps": 64, "num_envs": 1, "algo_kwargs": {"num_steps": 32}}
    trained = train(config, env=lambda: mine.Mine())
    path = str(trained.checkpoint_path)
    for words in (["eval", "--num-episodes", "2"], ["resume", "--total-timesteps", "96"]):
        result = CliRunner().invoke(app, [words[0], "--checkpoint", path, *words[1:], "--env", "mine:Mine"])
        assert result.exit_code == 0, result.output
    alone = CliRunner().invoke(app, ["eval", "--checkpoint", path])
    assert alone.exit_code == 2
    assert "--env" in alone.stderr
