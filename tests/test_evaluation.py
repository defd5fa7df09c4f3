"""Evaluation ends, whatever the environment does, and the progress line says that it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from env_zoo import Constant
from resume_cases import assert_same_run, stop_and_resume, tiny
from rl_training.envs.factory import episode_limit, make_env
from rl_training.envs.recipe import read_recipe
from rl_training.experiment import logging
from rl_training.runtime import evaluation
from rl_training.runtime.progress import RecentSpeed
from rl_training.runtime.workflows import TrainResult, evaluate_checkpoint, train

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
    assert kinds == sorted(kinds)  # training, then the evaluation at the end
    assert {True, False} <= set(kinds)
    rates = {line[3] for line, kind in zip(lines, kinds, strict=True) if kind}
    assert len(rates) == 1  # an evaluation is no time of training


def test_speed_follows_the_last_half_minute() -> None:
    speed = RecentSpeed(1000, 50.0)
    assert speed.update(1100, 60.0) == 10.0
    assert speed.update(1300, 70.0) == 15.0  # since it began
    for second in range(71, 140):
        last = speed.update(1300 + 100 * (second - 70), float(second))
    assert last == 100.0
    assert RecentSpeed(0, 0.0).update(0, 0.0) == 0.0
