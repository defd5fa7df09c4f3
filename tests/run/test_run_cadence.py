"""What a run does when: rows, evaluations, checkpoints, schedules, budgets, stops, and the guard against NaN."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from on_gpu import OnGPU
from resume_cases import StopAt, assert_same, rows_of, tiny
from rl_training.algorithms.a2c import A2C
from rl_training.algorithms.base import UpdateResult
from rl_training.algorithms.dqn import DQN
from rl_training.config.train_config import load_config
from rl_training.data import PrioritizedReplayBuffer
from rl_training.errors import EnvironmentFailure, TrainingFailure, UserError
from rl_training.record.checkpoints import load_checkpoint
from rl_training.run import loop as cadence_module
from rl_training.run.evaluation import Evaluator
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import evaluate_checkpoint, resume_training, train


def steps_of(rows: list[dict[str, Any]], kind: str) -> list[int]:
    return [row["step"] for row in rows if row["kind"] == kind]


# ---- settings that do nothing ----------------------------------------------------------------------------------------


def test_a_run_that_will_learn_nothing_says_so(tmp_path: Path) -> None:
    said = "^learning_starts is 128, but the run ends after 128 steps: it learns nothing$"
    with pytest.warns(UserWarning, match=said):
        result = train(tiny("dqn", tmp_path, kwargs={"learning_starts": 128}, eval_episodes=0), console=False)
    assert result.metrics["updates"] == 0


@pytest.mark.filterwarnings("error:learning_starts")
def test_a_run_that_learns_from_prior_data_alone_learns(tmp_path: Path) -> None:
    late = {"learning_starts": 128, "offline_pretrain_updates": 2}
    assert train(tiny("rlpd", tmp_path, kwargs=late, eval_episodes=0), console=False).metrics["updates"] == 2


def test_workers_where_there_are_none_are_named(tmp_path: Path) -> None:
    said = "^num_workers has no effect: execution_backend is 'local_sync', which has no workers$"
    with pytest.warns(UserWarning, match=said):
        train(tiny("a2c", tmp_path, num_envs=2, num_workers=2, eval_episodes=0), console=False)


@pytest.mark.filterwarnings("error")
def test_settings_that_do_something_are_not_named(tmp_path: Path) -> None:
    train(tiny("dqn", tmp_path, eval_episodes=0), console=False)


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_a_row_every_log_interval_updates_and_one_at_the_end(tmp_path: Path) -> None:
    result = train(tiny("a2c", tmp_path, log_interval=5, eval_episodes=0), console=False)  # 16 updates of 8 steps
    rows = rows_of(result.run_dir)
    assert [row["updates"] for row in rows] == [5, 10, 15, 16]
    assert [row.get("last", False) for row in rows] == [False, False, False, True]


def test_an_end_that_is_due_anyway_is_one_row(tmp_path: Path) -> None:
    result = train(tiny("a2c", tmp_path, log_interval=8, eval_episodes=0), console=False)
    assert [(row["updates"], "last" in row) for row in rows_of(result.run_dir)] == [(8, False), (16, False)]


def test_rows_hold_counters_losses_and_episode_statistics(tmp_path: Path) -> None:
    last = rows_of(train(tiny("ppo", tmp_path), console=False).run_dir)[-2]
    assert last["updates"] == 16
    assert {"episode_return_mean", "episode_length_mean", "loss", "policy_loss", "value_loss"} <= set(last)


def test_the_first_checkpoint_does_not_count_in_the_rate(tmp_path: Path) -> None:
    rates: list[float] = []

    class Rates(Callback):
        def on_update(self, run: Run) -> None:
            rates.append(run.clock.steps_per_second())

    result = train(tiny("a2c", tmp_path, eval_episodes=0), console=False, callbacks=[Rates()])
    assert max(rates) < 1e6  # a negative time was once taken for the shortest possible
    assert result.metrics["global_step"] / result.metrics["train_seconds"] < 1e6


def test_what_cannot_be_called_is_no_callback(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="callbacks has the function print; give an object of a class"):
        train(tiny("a2c", tmp_path), callbacks=[print])  # type: ignore[list-item]
    with pytest.raises(UserError, match="3 is not a callback; it needs one of the methods on_start, on_step"):
        train(tiny("a2c", tmp_path), callbacks=[3])  # type: ignore[list-item]
    with pytest.raises(UserError, match=r"has the class StopAt; give an object of it, which StopAt\(\) makes"):
        train(tiny("a2c", tmp_path), callbacks=[StopAt])  # type: ignore[list-item]
    assert not list(tmp_path.iterdir())
    assert train(tiny("a2c", tmp_path), callbacks=StopAt(8), console=False).metrics["stop_reason"] == "callback"


# ---- evaluations -----------------------------------------------------------------------------------------------------


def test_an_evaluation_every_eval_interval_steps_and_one_at_the_end(tmp_path: Path) -> None:
    result = train(tiny("a2c", tmp_path, kwargs={"eval_interval": 50}), console=False)
    assert steps_of(rows_of(result.run_dir), "eval") == [56, 104, 128]
    due = train(tiny("a2c", tmp_path, kwargs={"eval_interval": 64}), console=False)
    assert steps_of(rows_of(due.run_dir), "eval") == [64, 128]


def test_a_run_of_which_nothing_is_said_evaluates_ten_times_and_of_few_episodes_but_for_the_last(
    tmp_path: Path,
) -> None:
    config = tiny("a2c", tmp_path, eval_episodes=7, total_timesteps=320, kwargs={"eval_interval": None})
    whole = train(config, console=False)
    rows = [row for row in rows_of(whole.run_dir) if row["kind"] == "eval"]
    assert [row["step"] for row in rows] == list(range(32, 321, 32))
    assert [len(row["eval_returns"]) for row in rows] == [5] * 9 + [7]
    assert whole.metrics["eval_episodes"] == 7
    at_end = train(tiny("a2c", tmp_path, eval_episodes=7, total_timesteps=320), console=False)
    assert_same(*(load_checkpoint(run.checkpoint_path)["algorithm"] for run in (whole, at_end)))
    stopped = train(config, callbacks=[StopAt(96)], console=False)  # where an evaluation was due as well
    assert (stopped.metrics["global_step"], stopped.metrics["eval_episodes"]) == (96, 7)
    resumed = resume_training(stopped.checkpoint_path, console=False)
    again = [row for row in rows_of(resumed.run_dir) if row["kind"] == "eval"]
    assert [row["eval_returns"] for row in again] == [row["eval_returns"] for row in rows]


def test_no_evaluation_without_episodes(tmp_path: Path) -> None:
    result = train(tiny("a2c", tmp_path, eval_episodes=0, kwargs={"eval_interval": 16}), console=False)
    assert steps_of(rows_of(result.run_dir), "eval") == []
    assert "eval_return_mean" not in result.metrics
    assert not (result.run_dir / "checkpoints" / "best.ckpt").exists()


def test_best_is_the_checkpoint_of_the_best_evaluation(tmp_path: Path) -> None:
    result = train(tiny("ppo", tmp_path, kwargs={"eval_interval": 16, "learning_rate": 0.05}), console=False)
    rows = [row for row in rows_of(result.run_dir) if row["kind"] == "eval"]
    best = max(rows, key=lambda row: row["eval_return_mean"])  # the first of equals
    path = result.run_dir / "checkpoints" / "best.ckpt"
    assert load_checkpoint(path)["run"]["step"] == best["step"]
    assert evaluate_checkpoint(path)["eval_returns"] == best["eval_returns"]


def test_what_was_learned_is_kept_when_an_evaluation_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt  # as the second Ctrl-C in an episode that never ends

    monkeypatch.setattr(Evaluator, "evaluate", fail)
    with pytest.raises(KeyboardInterrupt):
        train(tiny("a2c", tmp_path), console=False)
    (path,) = tmp_path.glob("*/checkpoints/latest.ckpt")
    assert load_checkpoint(path)["run"]["step"] == 128


def test_early_stopping_waits_for_its_patience(tmp_path: Path) -> None:
    rule = {"metric": "eval_return_mean", "threshold": 1.0, "patience": 3}
    result = train(tiny("a2c", tmp_path, kwargs={"eval_interval": 16, "early_stopping": rule}), console=False)
    assert result.metrics["stop_reason"] == "early_stopping"
    assert result.metrics["global_step"] == 48
    assert steps_of(rows_of(result.run_dir), "eval") == [16, 32, 48]


def test_early_stopping_without_evaluations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="eval_interval is 0; early_stopping looks at evaluations"):
        train(tiny("a2c", tmp_path, kwargs={"eval_interval": 0, "early_stopping": {"threshold": 1.0}}), console=False)
    kwargs = {"eval_interval": 16, "early_stopping": {"threshold": 1.0}}
    with pytest.raises(UserError, match=r"^eval_episodes is 0; early_stopping looks at evaluations"):
        train(tiny("a2c", tmp_path, eval_episodes=0, kwargs=kwargs), console=False)
    assert list(tmp_path.iterdir()) == []


def test_early_stopping_counts_across_a_resume_and_not_the_evaluation_of_a_stop(tmp_path: Path) -> None:
    rule = {"metric": "eval_return_mean", "threshold": 1.0, "patience": 3}
    config = tiny("a2c", tmp_path, kwargs={"eval_interval": 16, "early_stopping": rule})
    halfway = train(config, callbacks=[StopAt(40)], console=False)
    assert halfway.metrics["stop_reason"] == "callback"
    result = resume_training(halfway.checkpoint_path, console=False)
    assert (result.metrics["stop_reason"], result.metrics["global_step"]) == ("early_stopping", 48)


def test_early_stopping_may_watch_any_metric_and_warns_of_one_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = {"metric": "updates", "threshold": 6}
    result = train(tiny("a2c", tmp_path, kwargs={"eval_interval": 16, "early_stopping": rule}), console=False)
    assert (result.metrics["stop_reason"], result.metrics["updates"]) == ("early_stopping", 6)
    rule = {"metric": "eval_retrun_mean", "threshold": 6}
    train(tiny("a2c", tmp_path, kwargs={"eval_interval": 64, "early_stopping": rule}), console=True)
    assert "which is not a metric here; did you mean 'eval_return_mean'?" in capsys.readouterr().err


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def names_of(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "checkpoints").iterdir()}


def test_a_checkpoint_every_interval_of_steps_and_the_newest_are_kept(tmp_path: Path) -> None:
    config = tiny("a2c", tmp_path, checkpoint_interval=24, checkpoint_keep=2)
    result = train(config, console=False)
    assert names_of(result.run_dir) == {"latest.ckpt", "best.ckpt", "step_120.ckpt", "step_128.ckpt"}
    assert load_checkpoint(result.checkpoint_path)["run"]["step"] == 128


def test_no_step_checkpoints_are_kept_when_none_are_wanted(tmp_path: Path) -> None:
    result = train(tiny("a2c", tmp_path, checkpoint_interval=24, checkpoint_keep=0), console=False)
    assert names_of(result.run_dir) == {"latest.ckpt", "best.ckpt"}


def test_without_an_interval_the_clock_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    original = Run.save_checkpoint

    def record(run: Run, **options: Any) -> None:
        saved.append(run.step)
        original(run, **options)

    monkeypatch.setattr(Run, "save_checkpoint", record)
    monkeypatch.setattr(cadence_module, "time", Clock())  # every look at it takes a second
    monkeypatch.setattr(cadence_module, "CHECKPOINT_SECONDS", 10.0)
    monkeypatch.setattr(cadence_module, "MOST_SAVING", 1)
    result = train(tiny("a2c", tmp_path, eval_episodes=0, total_timesteps=256, log_interval=100), console=False)
    assert names_of(result.run_dir) == {"latest.ckpt"}
    assert saved[0] == 0
    assert saved[-1] == 256
    assert saved == sorted(saved)
    assert 3 < len(saved) < 32


class Clock:
    """`time` for a run: each call is a second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


def test_a_checkpoint_is_there_before_the_first_step(tmp_path: Path) -> None:
    class Look(Callback):
        def on_start(self, run: Run) -> None:
            assert load_checkpoint(run.checkpoints.latest)["run"]["step"] == 0

    train(tiny("a2c", tmp_path), callbacks=[Look()], console=False)


# ---- budgets ---------------------------------------------------------------------------------------------------------


def test_max_updates_counts_across_resumes(tmp_path: Path) -> None:
    config = tiny("a2c", tmp_path, kwargs={"max_updates": 10})
    halfway = train(config, callbacks=[StopAt(32)], console=False)
    assert halfway.metrics["updates"] == 4
    result = resume_training(halfway.checkpoint_path, console=False)
    assert (result.metrics["updates"], result.metrics["stop_reason"]) == (10, "max_updates")
    again = resume_training(result.checkpoint_path, console=False)
    assert again.metrics["updates"] == 10


def test_max_seconds_ends_a_run_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cadence_module, "time", Clock())
    result = train(tiny("a2c", tmp_path, max_seconds=60.0, total_timesteps=100_000, eval_episodes=0), console=False)
    assert result.metrics["stop_reason"] == "max_seconds"
    assert 0 < result.metrics["updates"] < 60


def test_max_seconds_counts_training_across_resumes_and_evaluations_take_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(cadence_module, "time", clock)

    original = Evaluator.evaluate

    def evaluate(evaluator: Evaluator, *arguments: Any, **options: Any) -> Any:
        clock.now += 1000.0
        return original(evaluator, *arguments, **options)

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    config = tiny("a2c", tmp_path, max_seconds=60.0, total_timesteps=400, kwargs={"eval_interval": 16})
    halfway = train(config, callbacks=[StopAt(24)], console=False)
    assert halfway.metrics["stop_reason"] == "callback"
    assert 0 < halfway.metrics["train_seconds"] < 50
    result = resume_training(halfway.checkpoint_path, console=False)
    assert result.metrics["stop_reason"] == "max_seconds"
    assert 60 <= result.metrics["train_seconds"] < 70
    assert result.metrics["updates"] > halfway.metrics["updates"]


def test_a_run_whose_seconds_are_spent_goes_on_with_more_of_them_or_without_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cadence_module, "time", Clock())
    spent = train(tiny("a2c", tmp_path, max_seconds=30.0, total_timesteps=400, eval_episodes=0), console=False)

    def resume(**changes: Any) -> Any:
        metrics = resume_training(spent.checkpoint_path, output_dir=tmp_path, changes=changes, console=False).metrics
        return metrics["stop_reason"], metrics["updates"]

    updates = spent.metrics["updates"]
    assert resume() == ("max_seconds", updates)
    reason, more = resume(max_seconds=60.0)
    assert reason == "max_seconds"
    assert updates < more < 3 * updates
    assert resume(max_seconds=None) == ("total_timesteps", 50)
    with pytest.raises(UserError, match=r"^max_seconds is 10, but .* has trained for 3\d\.0 seconds already"):
        resume(max_seconds=10.0)


def test_the_budget_is_met_and_said(tmp_path: Path) -> None:
    result = train(tiny("a2c", tmp_path, num_envs=4, vectorization="sync", total_timesteps=100), console=False)
    assert result.metrics["stop_reason"] == "total_timesteps"
    assert result.metrics["global_step"] == 128  # whole rollouts of 32


# ---- schedules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_schedule_reaches_its_end_with_the_budget_and_is_a_metric(tmp_path: Path, kind: str) -> None:
    schedule = {"type": kind, "start": 0.02, "end": 0.001}
    result = train(tiny("ppo", tmp_path, kwargs={"ent_coef_schedule": schedule}), console=False)
    assert result.metrics["ent_coef"] == 0.001
    values = [row["ent_coef"] for row in rows_of(result.run_dir) if row["kind"] == "train"]
    assert values == sorted(values, reverse=True)
    assert values[-1] == 0.001
    assert 0.001 < values[0] < 0.02
    assert result.policy.algorithm.ent_coef > 0.001  # the last update's own value, from where the last rollout began


def test_a_constant_schedule_stays(tmp_path: Path) -> None:
    schedule = {"type": "constant", "start": 0.02}
    result = train(tiny("ppo", tmp_path, kwargs={"learning_rate_schedule": schedule}), console=False)
    assert {row["learning_rate"] for row in rows_of(result.run_dir) if row["kind"] == "train"} == {0.02}


def test_a_schedule_sets_the_learner(tmp_path: Path) -> None:
    seen: list[float] = []

    class Look(Callback):
        def on_update(self, run: Run) -> None:
            seen.append(run.session.algorithm.learning_rate)

    schedule = {"type": "linear", "start": 0.16, "end": 0.0}
    train(tiny("a2c", tmp_path, kwargs={"learning_rate_schedule": schedule}), callbacks=[Look()], console=False)
    assert seen == pytest.approx([0.16 * (1 - i / 16) for i in range(16)])


# ---- callbacks -------------------------------------------------------------------------------------------------------


def test_callbacks_hear_everything_and_may_stop(tmp_path: Path) -> None:
    heard: list[str] = []

    class Listen(Callback):
        def on_start(self, run: Run) -> None:
            heard.append("start")

        def on_update(self, run: Run) -> bool:
            heard.append(f"update {run.updates}")
            return run.updates < 3

        def on_evaluation(self, run: Run, metrics: dict[str, Any]) -> None:
            heard.append(f"evaluation {metrics['eval_episodes']}")

        def on_end(self, run: Run) -> None:
            heard.append("end")

    result = train(tiny("a2c", tmp_path), callbacks=[Listen()], console=False)
    assert heard == ["start", "update 1", "update 2", "update 3", "evaluation 2", "end"]
    assert result.metrics["stop_reason"] == "callback"


def test_an_evaluation_that_stops_the_run_is_not_repeated(tmp_path: Path) -> None:
    class StopGood(Callback):
        def on_evaluation(self, run: Run, metrics: dict[str, Any]) -> bool:
            return metrics["eval_return_mean"] < 0

    result = train(tiny("a2c", tmp_path, kwargs={"eval_interval": 16}), callbacks=[StopGood()], console=False)
    assert steps_of(rows_of(result.run_dir), "eval") == [16]


def test_an_exception_in_a_callback_ends_the_run_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    class Break(Callback):
        def on_update(self, run: Run) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(tiny("a2c", tmp_path), callbacks=[Break()], console=False)
    (path,) = tmp_path.glob("*/checkpoints/latest.ckpt")
    assert resume_training(path, console=False).metrics["global_step"] == 128


# ---- NaN -------------------------------------------------------------------------------------------------------------


def break_learner(
    monkeypatch: pytest.MonkeyPatch, at_update: int, value: float, *, in_loss: bool, part: str = "critic"
) -> None:
    original = A2C.learn

    def learn(self: A2C, batch: Any) -> UpdateResult:
        result = original(self, batch)
        if self.num_updates + 1 == at_update:
            if in_loss:
                result.metrics["loss"] = torch.tensor(value)
            else:
                with torch.no_grad():
                    getattr(self.policy, part)[0].weight[1, 2] = value
        return result

    monkeypatch.setattr(A2C, "learn", learn)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_weight_stops_the_run_by_name_and_the_last_good_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    break_learner(monkeypatch, 9, value, in_loss=False)
    with pytest.raises(TrainingFailure, match=r"the tensor 'policy.critic.0.weight' is not finite at step") as failure:
        train(tiny("a2c", tmp_path, checkpoint_interval=8), console=False)
    (path,) = tmp_path.glob("*/checkpoints/latest.ckpt")
    assert str(path) in str(failure.value)
    assert load_checkpoint(path)["run"]["updates"] == 8
    monkeypatch.undo()
    assert resume_training(path, console=False).metrics["global_step"] == 128


def test_a_bad_loss_stops_the_run_at_that_update_though_it_is_not_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_learner(monkeypatch, 5, math.nan, in_loss=True)
    with pytest.raises(TrainingFailure, match=r"the metric 'loss' is not finite at step 40 \(update 5\)"):
        train(tiny("a2c", tmp_path, log_interval=1000), console=False)
    rows = [json.loads(line) for path in tmp_path.glob("*/metrics.jsonl") for line in path.read_text().splitlines()]
    assert rows == []


def test_a_bad_weight_at_the_very_end_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_learner(monkeypatch, 16, math.nan, in_loss=False)
    with pytest.raises(TrainingFailure, match=r"policy\.critic\.0\.weight"):
        train(tiny("a2c", tmp_path, eval_episodes=0), console=False)
    (path,) = tmp_path.glob("*/checkpoints/latest.ckpt")
    assert load_checkpoint(path)["run"]["updates"] == 0


def test_an_environment_is_not_blamed_for_the_actions_of_a_bad_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU is not asked for every loss, and then a step of the environment is the first to fail."""
    break_learner(monkeypatch, 9, math.nan, in_loss=False, part="actor")
    with pytest.raises(TrainingFailure, match=r"the tensor 'policy.actor.0.weight' is not finite at step 72") as found:
        train(tiny("a2c", tmp_path, env_id="Pendulum-v1", log_interval=1000), console=False)
    assert isinstance(found.value.__cause__, EnvironmentFailure)


def test_a_bad_loss_of_prioritized_replay_is_told_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DQN, "targets", lambda self, rows: torch.full_like(rows["rewards"], math.inf))
    with pytest.raises(TrainingFailure, match=r"the metric 'loss' is not finite at step .* \(update 1\)"):
        train(tiny("prioritized_dqn", tmp_path), console=False)


@pytest.mark.parametrize("checkpoint_interval", [0, 4])
def test_errors_that_a_gpu_tells_late_end_the_run_as_a_bad_loss_does(
    checkpoint_interval: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads them: the next step, or a checkpoint before it. The slopes of a Huber loss stay finite."""
    update, make, targets = PrioritizedReplayBuffer.update_priorities, Run.__init__, DQN.targets

    def make_run(self: Run, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self._checks_every_update = False  # as on a GPU

    def update_late(self: PrioritizedReplayBuffer, indices: Any, errors: Any) -> None:
        update(self, indices, errors.as_subclass(OnGPU))

    def break_once(self: DQN, rows: Any) -> torch.Tensor:
        return targets(self, rows) + (math.inf if self.num_updates == 2 else 0.0)

    monkeypatch.setattr(Run, "__init__", make_run)
    monkeypatch.setattr(PrioritizedReplayBuffer, "update_priorities", update_late)
    monkeypatch.setattr(DQN, "targets", break_once)
    config = tiny("prioritized_dqn", tmp_path, log_interval=1000, checkpoint_interval=checkpoint_interval)
    with pytest.raises(TrainingFailure, match=r"the metric 'loss' is not finite at step 28 \(update 3\)") as found:
        train(config, console=False)
    assert "priorities must be finite" in str(found.value.__cause__)
    assert load_checkpoint(next(tmp_path.rglob("latest.ckpt")))["run"]["updates"] == (2 if checkpoint_interval else 0)


# ---- the folder ------------------------------------------------------------------------------------------------------


def test_a_run_leaves_config_manifest_metrics_events_and_checkpoints(tmp_path: Path) -> None:
    result = train(tiny("ppo", tmp_path, tags=["a"], benchmark={"note": 1}), console=False)
    names = {path.name.split(".tfevents")[0] for path in result.run_dir.iterdir()}
    assert names == {"config.yaml", "manifest.json", "metrics.jsonl", "events.out", "checkpoints", "end.json"}
    manifest = json.loads((result.run_dir / "manifest.json").read_text())
    assert {"rl_training", "torch", "gymnasium", "numpy", "python", "platform", "git", "command"} <= set(manifest)
    assert manifest["seed"] == 3


def test_the_manifest_keeps_what_the_start_says_and_warnings_reach_everybody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny("gail", tmp_path, eval_episodes=0)  # CartPole's episodes end early
    with pytest.warns(UserWarning, match="^survival bias: episodes can end early"):
        silent = train(config, console=False)
    assert capsys.readouterr().err == ""
    told = train(config, console=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"gail on CartPole-v1: {told.run_dir.name} (device cpu, ")
    assert lines[1].startswith("warning: survival bias: episodes can end early")
    for result in (silent, told):
        messages = json.loads((result.run_dir / "manifest.json").read_text())["messages"]
        assert messages == [lines[0].replace(told.run_dir.name, result.run_dir.name), lines[1]]


def test_the_manifest_keeps_what_a_resume_says(tmp_path: Path) -> None:
    halfway = train(tiny("dqn", tmp_path, replay_in_checkpoint=False), callbacks=[StopAt(40)], console=False)
    with pytest.warns(UserWarning, match="^the checkpoint has no replay buffer"):
        result = resume_training(halfway.checkpoint_path, total_timesteps=160, console=False)
    _, budget, warning = json.loads((result.run_dir / "manifest.json").read_text())["messages"]
    assert budget.startswith("the budget is now 160 steps")
    assert warning.startswith("warning: the checkpoint has no replay buffer")


def test_config_yaml_is_the_resolved_config_and_reads_back_the_same(tmp_path: Path) -> None:
    schedule = {"type": "cosine", "start": 1e-3, "end": 1e-7}
    config = tiny("ppo", tmp_path, num_envs=2, max_seconds=1e4, kwargs={"learning_rate_schedule": schedule})
    result = train(config, console=False)
    written = load_config(result.run_dir / "config.yaml")
    assert written == load_config(load_checkpoint(result.checkpoint_path)["config"])
    assert (written.device, written.threads, written.vectorization, written.accelerate) == ("cpu", 1, "native", "none")
    assert written.algo_kwargs["gamma"] == 0.99  # a default, spelled out
    assert train(written, console=False).metrics["loss"] == result.metrics["loss"]


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda *_: "20260101-000000")
    assert len({train(tiny("a2c", tmp_path), console=False).run_dir for _ in range(3)}) == 3


@pytest.mark.parametrize("name", ["file/below", "nul\0byte", "x" * 300])
def test_an_output_dir_that_cannot_be_made_is_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"output_dir is .*, where no folder can be made: .*\.$"):
        train(tiny("a2c", tmp_path / name), console=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_an_output_dir_that_is_a_file_is_named_as_such(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can be made: a file is in its place; name a folder"):
        train(tiny("a2c", tmp_path / name), console=False)
