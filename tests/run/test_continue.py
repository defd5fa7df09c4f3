"""`train --name X --continue`: resumes what is there, starts what is not, and ends at once if it is done."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from resume_cases import StopAt, assert_same_run, rows_of, tiny
from rl_training.cli.main import app
from rl_training.config.train_config import TrainConfig
from rl_training.errors import UserError
from rl_training.record.checkpoints import load_checkpoint
from rl_training.run import workflows
from rl_training.run.folder import locked
from rl_training.run.run import Run
from rl_training.run.workflows import TrainResult, resume_training, train


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def named(output_dir: str = "runs", **fields: Any) -> TrainConfig:
    return tiny("a2c", Path(output_dir), **{"name": "x", "num_envs": 2, "vectorization": "sync", **fields})


def go_on(config: TrainConfig) -> TrainResult:
    return train(config, continues=True, console=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_not_there_is_started_and_what_is_stopped_is_resumed_exactly() -> None:
    whole = train(named(output_dir="whole"), console=False)
    stopped = train(named(), continues=True, callbacks=[StopAt(64)], console=False)
    assert (stopped.run_dir, stopped.metrics["global_step"]) == (Path("runs/x"), 64)
    assert_same_run(whole, go_on(named()))
    assert [path.name for path in Path("runs").iterdir()] == ["x"]


def test_a_run_that_is_done_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    done = train(named(), console=False)
    before = contents(Path("runs"))
    monkeypatch.setattr(workflows, "open_session", None)  # nothing is built
    monkeypatch.setattr(workflows, "resume_training", None)
    again = go_on(named())
    assert contents(Path("runs")) == before
    assert (again.run_dir, again.checkpoint_path.resolve()) == (Path("runs/x"), done.checkpoint_path.resolve())
    kept = {name: value for name, value in done.metrics.items() if name in again.metrics}
    assert kept == again.metrics
    assert {"global_step", "eval_return_mean", "train_seconds", "stop_reason", "loss"} <= kept.keys()
    obs = [0.0, 0.1, 0.0, -0.1]
    assert again.policy.predict(obs) == done.policy.predict(obs)


def test_a_larger_budget_continues_a_run_that_is_done() -> None:
    train(named(), console=False)
    longer = named(total_timesteps=256)
    assert go_on(longer).metrics["global_step"] == 256
    before = contents(Path("runs"))
    for config in (longer, named()):  # done now, also for the command that started it
        assert go_on(config).metrics["global_step"] == 256
    assert contents(Path("runs")) == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kwargs": {"learning_rate": 0.5}}, r"started with algo_kwargs.learning_rate 0.0007 \(not 0.5\); give"),
        ({"kwargs": {"max_grad_norm": None}}, r"started with algo_kwargs.max_grad_norm 0.5 \(not None\)"),
        ({"seed": 9}, r"^runs/x was started with seed 3 \(not 9\); .*another --name, or .* resume --force\.$"),
        ({"env_id": "CartPole-v0"}, r"started with env_id 'CartPole-v1' \(not 'CartPole-v0'\)"),
        ({"num_envs": 4}, r"started with num_envs 2 \(not 4\)"),
        ({"total_timesteps": 32}, r"total_timesteps is 32, but .* is at step 64 already"),
    ],
)
def test_another_config_is_refused_in_one_sentence(change: dict[str, Any], said: str) -> None:
    train(named(kwargs={"max_grad_norm": 0.5}), callbacks=[StopAt(64)], console=False)
    before = contents(Path("runs"))
    kwargs = {"max_grad_norm": 0.5, **change.pop("kwargs", {})}
    with pytest.raises(UserError, match=said):
        go_on(named(kwargs=kwargs, **change))
    assert contents(Path("runs")) == before


def test_another_algorithm_is_refused() -> None:
    train(named(), callbacks=[StopAt(64)], console=False)
    with pytest.raises(UserError, match=r"started with algo 'a2c' \(not 'ppo'\)"):
        go_on(tiny("ppo", Path("runs"), name="x"))


def test_settings_that_do_not_affect_learning_may_change() -> None:
    train(named(), callbacks=[StopAt(64)], console=False)
    assert go_on(named(loggers=[])).metrics["global_step"] == 128


def test_after_damage_the_checkpoint_that_the_error_names_can_be_copied() -> None:
    config = named(checkpoint_interval=32, eval_episodes=0)
    whole = train(config.model_copy(update={"output_dir": "whole"}), console=False)
    run = train(config, callbacks=[StopAt(64)], console=False).run_dir
    latest, older = run / "checkpoints/latest.ckpt", run / "checkpoints/step_32.ckpt"
    latest.write_bytes(latest.read_bytes()[:-9])
    (run / "checkpoints/step_64.ckpt").unlink()
    with pytest.raises(UserError, match=r"is damaged .*; the newest other one there is step_32\.ckpt, which res"):
        go_on(config)
    shutil.copy(older, latest)
    assert_same_run(go_on(config), whole)


def test_the_run_is_the_one_in_output_dir() -> None:
    train(named(), callbacks=[StopAt(64)], console=False)
    assert go_on(named(output_dir="elsewhere")).run_dir == Path("elsewhere/x")
    Path("elsewhere").rename("moved")
    assert go_on(named(output_dir="moved")).metrics["stop_reason"] == "total_timesteps"
    assert load_checkpoint("runs/x/checkpoints/latest.ckpt")["run"]["step"] == 64


@pytest.mark.filterwarnings("ignore:step 0 could not be saved")
def test_a_run_that_crashed_before_its_first_checkpoint_starts_again_in_its_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def crash(*_: Any, **__: Any) -> None:
        raise MemoryError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(Run, "save_checkpoint", crash)
        with pytest.raises(MemoryError):
            train(named(), console=False)
    assert not list(Path("runs").rglob("*.ckpt"))
    result = go_on(named(seed=4))  # nothing was learned, so it may be another config
    assert (result.run_dir, result.metrics["global_step"]) == (Path("runs/x"), 128)
    assert rows_of(result.run_dir)[0]["step"] > 0
    assert yaml.safe_load(Path("runs/x/asked.yaml").read_text())["seed"] == 4


@pytest.mark.parametrize("file", ["thesis.tex", "checkpoints/best.ckpt"])
def test_a_folder_with_something_else_is_not_taken_for_a_run(file: str) -> None:
    path = Path("runs/x", file)
    path.parent.mkdir(parents=True)
    path.write_text("years of work")
    with pytest.raises(UserError, match=rf"runs/x has no checkpoints/latest.ckpt, but it holds {file}, so no new run"):
        go_on(named())
    assert contents(Path("runs")) == {str(path): b"years of work"}


def test_a_folder_in_use_is_refused() -> None:
    run_dir = train(named(), callbacks=[StopAt(64)], console=False).run_dir
    with locked(run_dir), pytest.raises(UserError, match="runs/x is in use"):
        go_on(named())


def test_a_run_that_another_process_made_in_the_meantime_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    original = workflows.open_session

    def slowly(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        train(named(output_dir=str(here / "runs")), console=False)
        return original(*arguments, **options)

    here = Path.cwd()
    monkeypatch.setattr(workflows, "open_session", slowly)
    with pytest.raises(UserError, match=r"another process has started .*runs/x in the meantime; repeat the command"):
        go_on(named(output_dir=str(here / "runs")))
    assert load_checkpoint(here / "runs/x/checkpoints/latest.ckpt")["run"]["step"] == 128


def test_a_run_without_the_config_that_it_was_asked_for_is_left_to_resume() -> None:
    run_dir = train(named(), callbacks=[StopAt(64)], console=False).run_dir
    (run_dir / "asked.yaml").unlink()
    with pytest.raises(UserError, match=r"has no asked.yaml.*; rl-training resume --checkpoint runs/x continues"):
        go_on(named())


def test_a_run_that_was_resumed_by_hand_continues_too() -> None:
    stopped = train(named(), callbacks=[StopAt(64)], console=False)
    resume_training(stopped.checkpoint_path, total_timesteps=192, callbacks=[StopAt(96)], console=False)
    assert go_on(named()).metrics["global_step"] == 192


def test_the_same_name_again_says_that_it_is_a_new_run(capsys: pytest.CaptureFixture[str]) -> None:
    train(named(), console=False)
    again = train(named(), console=True)
    assert again.run_dir == Path("runs/x-1")
    said = "runs/x exists, so this run is runs/x-1; to continue x, use train --continue"
    assert said in capsys.readouterr().err
    assert said in json.loads((again.run_dir / "manifest.json").read_text())["messages"]


# ---- the command -----------------------------------------------------------------------------------------------------

WORDS = ["train", "--algo", "a2c", "--env", "CartPole-v1", "--num-envs", "1", "--eval-episodes", "1", "--continue",
         "--set", "num_steps=8"]  # fmt: skip


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, [*WORDS, *words])


def test_the_command_starts_then_ends_at_once_then_continues_with_a_larger_budget() -> None:
    first = invoke("--name", "x", "--total-timesteps", "64")
    assert first.exit_code == 0, first.output
    before = contents(Path("runs"))
    second = invoke("--name", "x", "--total-timesteps", "64")
    assert second.exit_code == 0, second.output
    assert "runs/x is done already; there is nothing to train" in second.stderr
    assert "64 in " in second.stdout
    assert contents(Path("runs")) == before
    third = invoke("--name", "x", "--total-timesteps", "96")
    assert third.exit_code == 0, third.output
    assert load_checkpoint("runs/x/checkpoints/latest.ckpt")["run"]["step"] == 96
    other = invoke("--name", "x", "--total-timesteps", "96", "--seed", "5")
    assert (other.exit_code, other.stderr.count("\n")) == (2, 1)
    assert "runs/x was started with seed 0 (not 5)" in other.stderr


def test_without_a_name_there_is_nothing_to_continue() -> None:
    result = invoke("--total-timesteps", "64")
    assert (result.exit_code, Path("runs").exists()) == (2, False)
    assert "--continue needs the name of the run; give --name" in result.stderr


def test_every_seed_has_its_own_run(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Run.tick
    stops = [12]

    def tick(run: Run) -> None:
        original(run)
        stops[0] -= 1
        if stops[0] == 0:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Run, "tick", tick)
    words = ["--name", "x", "--seeds", "1,2,3", "--total-timesteps", "64"]
    steps: list[dict[str, int]] = []
    codes = []
    for _ in range(2):
        codes.append(invoke(*words).exit_code)
        latest = sorted(Path("runs").glob("*/checkpoints/latest.ckpt"))
        steps.append({path.parts[1]: load_checkpoint(path)["run"]["step"] for path in latest})
    assert codes == [143, 0]
    assert steps == [{"x-s1": 64, "x-s2": 32}, {"x-s1": 64, "x-s2": 64, "x-s3": 64}]


@pytest.mark.slow
def test_parallel_seeds_continue() -> None:
    words = ["--name", "x", "--seeds", "1,2", "--jobs", "2", "--total-timesteps"]
    for budget in ("64", "96", "96"):
        result = invoke(*words, budget)
        assert result.exit_code == 0, result.output
        latest = sorted(Path("runs").glob("*/checkpoints/latest.ckpt"))
        assert [load_checkpoint(path)["run"]["step"] for path in latest] == [int(budget)] * 2
    assert invoke(*words, "96", "--set", "learning_rate=0.5").exit_code == 2
