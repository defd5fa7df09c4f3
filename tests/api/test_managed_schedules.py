"""Callbacks, schedules and metrics by their public names; schedules that are functions, and what files keep of them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import rl_training
from resume_cases import StopAt, assert_same_run, tiny
from rl_training import A2C, DQN, PPO
from rl_training.config.params import read_params
from rl_training.errors import UserError
from rl_training.record.checkpoints import load_checkpoint
from rl_training.record.metrics_file import read_metrics
from rl_training.run.workflows import resume_training
from rl_training.runtime.ppo_trainer import PPOParams


def half(progress: float) -> float:
    return 1e-3 * (1.0 - 0.5 * progress)


def make(tmp_path: Path, algo: type = A2C, schedule: Any = half, **fields: Any) -> Any:
    kwargs = {"learning_rate_schedule": schedule}
    return algo(tiny(algo.algo, tmp_path, kwargs=kwargs, env_id="env_zoo:Walk", **fields))  # type: ignore[attr-defined]


def test_callback_schedule_and_result_are_public(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Watch(rl_training.Callback):
        def on_update(self, run: Any) -> bool:
            seen.append(run.metrics)
            return run.step < 64

    result = make(tmp_path, schedule=rl_training.Schedule(start=1e-3, end=0.0)).learn(callbacks=[Watch()])
    assert isinstance(result, rl_training.TrainResult)
    assert result.metrics["stop_reason"] == "callback"
    assert {"loss", "updates", "learning_rate", "episode_return_mean"} <= set(seen[-1])
    assert {type(value) for row in seen for value in row.values()} <= {float, int}
    assert {type(value) for value in result.metrics.values()} <= {float, int, str}
    assert seen[-1]["learning_rate"] == pytest.approx(1e-3 * (1 - 56 / 128), rel=0.2)


@pytest.mark.parametrize("algo", [A2C, DQN])
def test_a_schedule_may_be_a_function_of_the_progress(algo: type, tmp_path: Path) -> None:
    result = make(tmp_path, algo).learn()
    assert result.metrics["learning_rate"] == 5e-4
    rows = [row for row in read_metrics(result.run_dir / "metrics.jsonl") if row["kind"] == "train"]
    assert all(row["learning_rate"] == half(min(1.0, row["step"] / 128)) for row in rows)


def test_a_function_acts_as_the_same_line_written_down_does(tmp_path: Path) -> None:
    one, other = (make(tmp_path, schedule=way).learn() for way in (half, {"start": 1e-3, "end": 5e-4}))
    first, second = (load_checkpoint(run.checkpoint_path)["algorithm"] for run in (one, other))
    assert all(np.allclose(first[name], second[name]) for name in first if "policy" in name)


def test_a_file_holds_its_name_and_ends_and_learn_gives_it_again(tmp_path: Path) -> None:
    managed = make(tmp_path)
    stopped = managed.learn(callbacks=[StopAt(64)])
    stored = yaml.safe_load((stopped.run_dir / "config.yaml").read_text())["algo_kwargs"]["learning_rate_schedule"]
    assert stored == {"type": "function", "start": 1e-3, "end": 5e-4, "begin": 0.0, "fraction": 1.0, "name": "half"}
    assert managed.hyperparameters["learning_rate_schedule"] == stored
    again = managed.learn(progress=False)
    assert_same_run(again, make(tmp_path).learn())  # exactly as without the stop


def test_without_its_function_a_run_does_not_go_on_but_predicts(tmp_path: Path) -> None:
    path = make(tmp_path).learn(callbacks=[StopAt(64)]).checkpoint_path
    loaded = A2C.load(path)
    assert loaded.evaluate(1)["eval_episodes"] == 1
    said = r"learning_rate_schedule is the function 'half', which no file stores; give it again, as in resume\(changes="
    for go_on in (loaded.learn, lambda: resume_training(path), lambda: A2C(path.parents[1] / "config.yaml").learn()):
        with pytest.raises(UserError, match=said):
            go_on()
    changes = {"algo_kwargs": {"learning_rate_schedule": half}}
    resumed = loaded.resume(changes=changes)  # the same name and ends: nothing that would need force
    assert_same_run(resumed, make(tmp_path).learn())
    with pytest.raises(UserError, match=r"resuming would change algo_kwargs.learning_rate_schedule .* needs --force"):
        resume_training(path, changes={"algo_kwargs": {"learning_rate_schedule": lambda progress: 1e-3}})


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (lambda progress: -1.0, "learning_rate is -1.0; it should be greater than or equal to 0"),
        (lambda progress: "fast", "start is 'fast'; it should be a number"),
        (lambda progress: float("nan"), "start is nan; it should be a finite number"),
    ],
)
def test_a_function_out_of_bounds_is_refused_at_once(way: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        PPO("X-v0", learning_rate_schedule=way)


def test_a_function_that_breaks_on_the_way_says_where(tmp_path: Path) -> None:
    managed = make(tmp_path, schedule=lambda progress: float("inf") if 0.4 < progress < 0.9 else 1e-3)
    with pytest.raises(UserError, match=r"the schedule '<lambda>' returned inf at 0.4\d+ of the budget"):
        managed.learn()


def test_a_function_in_place_of_a_number_gets_one_sentence() -> None:
    said = "clip_coef is a function; give it as clip_coef_schedule, a function of the progress from 0 to 1"
    with pytest.raises(UserError, match=said):
        PPO("X-v0", clip_coef=lambda left: 0.2 * left)


def test_hyper_parameters_with_a_function_can_be_pickled_to_workers() -> None:
    params = read_params(PPOParams, {"gamma_schedule": lambda progress: 0.9})
    assert pickle.loads(pickle.dumps(params)).schedules["gamma"].start == 0.9


def test_workers_learn_with_a_function(tmp_path: Path) -> None:
    fields = {"execution_backend": "local_async", "num_envs": 2, "num_workers": 1}
    managed = A2C(tiny("a2c", tmp_path, kwargs={"learning_rate_schedule": half}, env_id="CartPole-v1", **fields))
    assert managed.learn(32).metrics["learning_rate"] == 5e-4
