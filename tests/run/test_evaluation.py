"""Evaluation ends, whatever the environment does, and the progress line says that it goes on."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from env_zoo import Constant
from resume_cases import assert_same_run, stop_and_resume, tiny
from rl_training.envs.factory import episode_limit, make_env, read_recipe
from rl_training.record import logger as logging
from rl_training.run import evaluation
from rl_training.run import loop as clock_module
from rl_training.run.loop import RecentSpeeds
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import TrainResult, evaluate_checkpoint, resume_training, train

ENDLESS = 10**9


def endless(limit: int | None = None) -> Any:
    env: Any = Constant(length=ENDLESS)
    return env if limit is None else gym.wrappers.TimeLimit(env, limit)


def run(tmp_path: Path, env: Any = endless, **fields: Any) -> TrainResult:
    return train(tiny("a2c", tmp_path, env_id="endless", **fields), env=env, console=True)


def test_an_episode_that_never_ends_is_cut_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluation, "MOST_STEPS", 30)
    result = run(tmp_path, kwargs={"eval_interval": 64})
    assert result.metrics["eval_length_mean"] == result.metrics["eval_return_mean"] == 30
    said = "evaluation episodes that did not end within 30 steps and were cut there: 2 of 2 (eval_max_steps sets"
    assert capfd.readouterr().err.count(f"warning: {said}") == 1  # once, though two evaluations
    with pytest.warns(UserWarning, match="cut there: 2 of 2"):
        evaluate_checkpoint(result.checkpoint_path, env=endless)


@pytest.mark.filterwarnings("ignore:evaluation episodes")
@pytest.mark.parametrize(
    ("own", "given", "length"),
    [(40, None, 40), (None, 50, 50), (40, 50, 40), (40, 20, 20)],
)
def test_the_environments_limit_or_the_given_one_ends_an_episode(
    own: int | None, given: int | None, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(evaluation, "MOST_STEPS", 30)
    result = run(tmp_path, lambda: endless(own), eval_max_steps=given)
    assert result.metrics["eval_length_mean"] == length
    assert ("were cut there" in capfd.readouterr().err) == (length != own)
    again = evaluate_checkpoint(result.checkpoint_path, env=lambda: endless(own), num_episodes=1)
    assert again["eval_lengths"] == [length]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_run_evaluates_with_the_most_likely_actions_or_with_sampled_ones(deterministic: bool, tmp_path: Path) -> None:
    """Through a resume too."""
    fields = {"env_id": "Pendulum-v1", "eval_episodes": 2, "eval_deterministic": deterministic}
    config = tiny("a2c", tmp_path, kwargs={"eval_interval": 48}, **fields)
    result = stop_and_resume(config, 64)
    assert_same_run(train(config, console=False), result)
    again = {
        how: evaluate_checkpoint(result.checkpoint_path, num_episodes=2, deterministic=how)["eval_return_mean"]
        for how in (True, False)
    }
    assert result.metrics["eval_return_mean"] == again[deterministic] != again[not deterministic]


def test_the_limit_of_an_episode_is_that_of_any_wrapper() -> None:
    assert episode_limit(endless()) is None
    assert episode_limit(gym.wrappers.TimeLimit(gym.wrappers.FlattenObservation(endless(7)), 9)) == 7
    assert episode_limit(make_env(read_recipe("CartPole-v1", {}))) == 500
    assert episode_limit(make_env(read_recipe("env_zoo:Walk", {"max_episode_steps": 3}))) == 3


def test_the_limit_of_an_emulator_counts() -> None:
    pytest.importorskip("ale_py")
    env = make_env(read_recipe("ALE/Breakout-v5", {}))
    assert episode_limit(env) == 108_000
    env.close()


def test_the_progress_line_says_evaluating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging, "_PLAIN_SECONDS", 0.0)
    run(tmp_path, lambda: endless(40))
    lines = [line.split("  ") for line in capfd.readouterr().err.splitlines() if "/128" in line]
    kinds = ["evaluating" in line for line in lines]
    assert kinds[:-1] == sorted(kinds[:-1])  # training, then the evaluation at the end
    assert not kinds[-1]  # the last line is that of the last step
    assert {True, False} <= set(kinds)
    rates = {line[3] for line, kind in zip(lines, kinds, strict=True) if kind}
    assert len(rates) == 1  # an evaluation is no time of training


def test_speeds_follow_the_last_half_minute() -> None:
    speeds = RecentSpeeds(50.0, 1000, 0)
    assert speeds.update(60.0, 1100, 0) == [10.0, 0.0]
    assert speeds.update(70.0, 1300, 40) == [15.0, 2.0]  # since they began
    for second in range(71, 140):
        last = speeds.update(float(second), 1300 + 100 * (second - 70), 40)
    assert last == [100.0, 0.0]
    assert RecentSpeeds(0.0, 0).update(0.0, 0) == [0.0]


class Slow(CartPoleEnv):
    """A step takes one second of a clock that only it moves."""

    now = 0.0

    def step(self, action: Any) -> Any:
        Slow.now += 1.0
        return super().step(action)


def paces(path: Path, monkeypatch: pytest.MonkeyPatch, algo: str, **changes: Any) -> list[tuple[int, float, float]]:
    """Step, speed and seconds left after every turn, where a step takes one second and an update nine."""
    seen: list[tuple[int, float, float]] = []
    Slow.now = 0.0
    count = Run.count_update

    def count_slowly(run: Run, result: Any) -> None:
        Slow.now += 9.0
        count(run, result)

    class Watch(Callback):
        def on_update(self, run: Run) -> None:
            seen.append((run.step, *run.cadence.pace()))

    config = tiny(algo, path, eval_episodes=0, num_envs=1, total_timesteps=200, **changes)
    with monkeypatch.context() as patch:
        patch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: Slow.now))
        patch.setattr(Run, "count_update", count_slowly)
        train(config, env=Slow, callbacks=[Watch()], console=False)
    return seen


def test_the_speed_of_random_steps_says_nothing_of_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TD3 once showed 5,053 steps/s and three minutes left where learning was to take two hours."""
    every_step = {"learning_starts": 100, "train_frequency": 1, "gradient_updates_per_step": 1}
    seen = paces(tmp_path, monkeypatch, "dqn", kwargs=every_step)
    fills = [(speed, left) for step, speed, left in seen if step < 100]
    assert set(fills) == {(1.0, math.inf)}
    learns = [(step, speed, left) for step, speed, left in seen if step > 101]  # the first update is not timed
    assert learns == [pytest.approx((step, 0.1, 10 * (200 - step))) for step in range(102, 201)]


def test_the_time_left_is_that_of_the_first_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = {"num_steps": 10}  # 19 seconds each
    assert paces(tmp_path, monkeypatch, "a2c", kwargs=rollouts)[0] == pytest.approx((10, 10 / 19, 361))
    assert paces(tmp_path, monkeypatch, "a2c", kwargs=rollouts, max_seconds=100)[0] == pytest.approx((10, 10 / 19, 81))
    few = rollouts | {"max_updates": 4}
    assert paces(tmp_path, monkeypatch, "a2c", kwargs=few)[0] == pytest.approx((10, 10 / 19, 57))


def test_a_budget_that_is_used_up_leaves_no_time(tmp_path: Path) -> None:
    left: list[float] = []

    class Watch(Callback):
        def on_start(self, run: Run) -> None:
            left.append(run.cadence.pace()[1])

    result = train(tiny("a2c", tmp_path, eval_episodes=0), callbacks=[Watch()], console=False)
    resume_training(result.checkpoint_path, callbacks=[Watch()], console=False)
    assert left == [math.inf, 0.0]


def test_a_line_of_random_steps_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(logging, "_PLAIN_SECONDS", 0.0)
    train(tiny("dqn", tmp_path, eval_episodes=0), console=True)
    lines = [line for line in capfd.readouterr().err.splitlines() if "/128" in line]
    assert not [line for line in lines if "  0 steps/s" in line]
    fills = ["  not learning yet  " in line and "eta -:--:--" in line for line in lines]
    assert {True, False} == set(fills)
    assert fills == sorted(fills, reverse=True)
