"""What callbacks can do: log, look at every step, evaluate elsewhere; and the recipes of the guide, run as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv

from rl_training import DQN, PPO
from rl_training.envs.stepper import Step
from rl_training.errors import UserError
from rl_training.play import read_success
from rl_training.record.checkpoints import load_checkpoint, save_checkpoint
from rl_training.record.metrics_file import read_metrics
from rl_training.run.evaluation import EvaluationResult
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import resume_training

GUIDE = (Path(__file__).parents[2] / "docs" / "callbacks.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"^## ([^\n]+)\n(?:(?!## |```)[^\n]*\n)*```python\n(.*?)^```", GUIDE, re.M | re.S)
SMALL: dict[str, Any] = {"num_envs": 2, "num_steps": 32, "minibatch_size": 32, "eval_episodes": 1, "loggers": (),
                         "vectorization": "sync"}  # fmt: skip


@pytest.mark.parametrize("code", [pytest.param(code, id=title) for title, code in RECIPES])
def test_a_recipe_of_the_guide_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "InvertedDoublePendulum" in code:
        pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)
    registered = dict(gym.registry)
    try:
        exec(re.sub(r"\b[24]_000\b", "320", code), {})
    finally:
        gym.registry.clear()
        gym.registry.update(registered)


def test_the_guide_has_ten_recipes() -> None:
    assert len(RECIPES) == 10


class Ends(CartPoleEnv):
    """Its episodes take 4 steps (of which the info says whether they were few) and succeed in turn."""

    count = 0

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)

    def step(self, action: Any) -> Any:
        obs, reward, *_ = super().step(action)
        self.count += 1
        return obs, reward, self.count % 4 == 0, False, {"is_success": self.count % 8 == 0, "count": self.count}


class Unknown(Ends):
    def step(self, action: Any) -> Any:
        return (*super().step(action)[:4], {})


def test_a_logged_number_is_in_rows_result_metrics_and_the_resumed_run(tmp_path: Path) -> None:
    class Logs(Callback):
        seen: list[float] = []

        def on_update(self, run: Run) -> None:
            self.seen.append(run.metrics.get("my/number", -1.0))
            run.log("my/number", torch.tensor(run.updates))

        def on_end(self, run: Run) -> bool | None:
            run.log("late", np.float32(0.5))

    result = PPO("CartPole-v1", output_dir=tmp_path, **SMALL).learn(192, callbacks=Logs())
    assert Logs.seen == [-1.0, 1.0, 2.0]
    assert (result.metrics["my/number"], result.metrics["late"]) == (3.0, 0.5)
    rows = [row for row in read_metrics(result.run_dir / "metrics.jsonl") if row["kind"] == "train"]
    assert [row.get("my/number") for row in rows] == [None, 1.0, 2.0, 3.0]
    assert (rows[-1]["late"], rows[-1]["last"]) == (0.5, True)
    again = resume_training(result.checkpoint_path, total_timesteps=256, console=False)
    assert again.metrics["my/number"] == 3.0


@pytest.mark.parametrize(("name", "value", "says"), [
    ("loss", 1.0, "every run has that"), ("step", 1.0, "every run has that"),
    ("eval_return_mean", 1.0, "every run has that"), ("mine", "a", "got a str"), ("mine", [1, 2], "got a list"),
])  # fmt: skip
def test_what_cannot_be_logged_is_refused(name: str, value: Any, says: str, tmp_path: Path) -> None:
    class Logs(Callback):
        def on_update(self, run: Run) -> None:
            run.log(name, value)

    with pytest.raises(UserError, match=says):
        PPO("CartPole-v1", output_dir=tmp_path, **SMALL).learn(192, callbacks=Logs())


def test_setting_a_metric_says_what_to_write_instead(tmp_path: Path) -> None:
    class Sets(Callback):
        def on_update(self, run: Run) -> None:
            run.metrics["mine"] = 1.0

    with pytest.raises(UserError, match=r"run\.log\(name, value\)"):
        PPO("CartPole-v1", output_dir=tmp_path, **SMALL).learn(192, callbacks=Sets())


def test_on_step_sees_every_step_once_with_the_last_info_of_an_episode(tmp_path: Path) -> None:
    class Looks(Callback):
        counts: list[list[int]] = []
        ends: list[bool] = []

        def on_step(self, run: Run, step: Step, infos: list[Any]) -> None:
            self.counts.append([info["count"] for info in infos])
            self.ends += step.terminated.tolist()

    PPO(Ends, output_dir=tmp_path, **SMALL).learn(192, callbacks=Looks())
    assert Looks.counts == [[n, n] for n in range(1, 97)]
    assert Looks.ends == [n % 4 == 0 for n in range(1, 97) for _ in range(2)]


def test_on_step_ends_the_run_after_the_turn_and_cannot_save_in_it(tmp_path: Path) -> None:
    class Stops(Callback):
        def on_step(self, run: Run, step: Step, infos: list[Any]) -> bool:
            return False

    class Saves(Callback):
        def on_step(self, run: Run, step: Step, infos: list[Any]) -> None:
            run.save_checkpoint()

    metrics = PPO(Ends, output_dir=tmp_path, **SMALL).learn(192, callbacks=Stops()).metrics
    assert (metrics["global_step"], metrics["stop_reason"]) == (64, "callback")
    with pytest.raises(UserError, match="in on_update"):
        PPO(Ends, output_dir=tmp_path, **SMALL).learn(192, callbacks=Saves())


WORKER = {"execution_backend": "local_async", "num_workers": 1}


@pytest.mark.parametrize("where", [{"vectorization": "native"}, pytest.param(WORKER, marks=pytest.mark.slow)])
def test_on_step_is_refused_where_environments_are_elsewhere(where: dict[str, Any], tmp_path: Path) -> None:
    class Looks(Callback):
        def on_step(self, run: Run, step: Step, infos: list[Any]) -> None:
            raise AssertionError

    with pytest.raises(UserError, match=r"vectorization='sync'"):
        PPO("CartPole-v1", output_dir=tmp_path, **(SMALL | where)).learn(192, callbacks=Looks())


@pytest.mark.parametrize("where", [{}, WORKER, pytest.param({"vectorization": "async"}, marks=pytest.mark.slow)])
def test_successes_are_counted_wherever_environments_are(where: dict[str, Any], tmp_path: Path) -> None:
    result = PPO(Ends, output_dir=tmp_path, **(SMALL | where)).learn(192)
    assert result.metrics["success_rate"] == 0.5
    assert result.metrics["eval_success_rate"] == 0.0  # its only episode is the first one
    assert [row["success_rate"] for row in read_metrics(result.run_dir / "metrics.jsonl") if row["kind"] == "train"]


def test_a_resume_knows_the_successes_before_it(tmp_path: Path) -> None:
    result = PPO(Unknown, output_dir=tmp_path, **SMALL).learn(64)
    tree = load_checkpoint(result.checkpoint_path)
    tree["run"]["successes"] = [True, True, False, True]
    path = save_checkpoint(tmp_path / "told.ckpt", tree)
    again = resume_training(path, total_timesteps=128, console=False, env=Unknown, output_dir=tmp_path)
    assert again.metrics["success_rate"] == 0.75
    del tree["run"]["successes"], tree["run"]["logged"]  # as an earlier version wrote it
    path = save_checkpoint(tmp_path / "older.ckpt", tree)
    again = resume_training(path, total_timesteps=128, console=False, env=Unknown, output_dir=tmp_path)
    assert "success_rate" not in again.metrics


def test_an_environment_that_does_not_tell_has_no_success_rate(tmp_path: Path) -> None:
    metrics = DQN(Unknown, output_dir=tmp_path, learning_starts=64, eval_episodes=1, loggers=()).learn(128).metrics
    assert not [name for name in metrics if "success" in name]


@pytest.mark.parametrize(("info", "success"), [
    ({"is_success": np.float32(1.0)}, True), ({"is_success": np.bool_(False)}, False), ({"is_success": None}, None),
    ({}, None), (None, None),
])  # fmt: skip
def test_success_is_read_from_an_info(info: Any, success: bool | None) -> None:
    assert read_success(info) is success


def test_only_episodes_that_tell_count_in_an_evaluation() -> None:
    known = EvaluationResult([1.0, 2.0, 3.0], [1, 1, 1], successes=(True, False)).metrics()
    assert known["eval_success_rate"] == 0.5
    assert "eval_success_rate" not in EvaluationResult([1.0], [1]).metrics()


def test_an_evaluation_elsewhere_changes_nothing_in_training(tmp_path: Path) -> None:
    class Plays(Callback):
        found: list[dict[str, Any]] = []

        def on_update(self, run: Run) -> None:
            self.found.append(run.evaluate_in(Ends, 3, deterministic=False))
            assert run.predict(np.zeros(4)) in (0, 1)

    plain, watched = (
        PPO("CartPole-v1", output_dir=tmp_path, **SMALL).learn(192, callbacks=callbacks)
        for callbacks in ([], [Plays()])
    )
    assert [(one["eval_length_mean"], one["eval_episodes"]) for one in Plays.found] == [(4.0, 3)] * 3
    first, second = (
        [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
        for result in (plain, watched)
    )
    for one, other in zip(first, second, strict=True):
        assert {**one, "time": 0, "steps_per_second": 0} == {**other, "time": 0, "steps_per_second": 0}


def test_an_evaluation_elsewhere_needs_the_same_spaces(tmp_path: Path) -> None:
    class Plays(Callback):
        def on_update(self, run: Run) -> None:
            run.evaluate_in("Acrobot-v1")

    with pytest.raises(UserError, match="Acrobot-v1 now has"):
        PPO("CartPole-v1", output_dir=tmp_path, **SMALL).learn(192, callbacks=Plays())
