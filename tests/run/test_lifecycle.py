"""How runs end: by signals, by failures of any part, by a full disk; and two processes that want one folder."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rl_training
from env_zoo import Walk
from resume_cases import assert_same, assert_same_run, edit_checkpoint, rows_of, tiny
from rl_training import safe_files
from rl_training.algorithms.a2c import A2C
from rl_training.api import ManagedAlgorithm
from rl_training.config.train_config import TrainConfig
from rl_training.data.rings import EnvRings
from rl_training.envs.engines import SyncEngine
from rl_training.envs.factory import read_recipe
from rl_training.errors import EnvironmentFailure, Terminated, TrainingFailure, UserError
from rl_training.experiment.default_manager import DefaultExperimentManager
from rl_training.record import checkpoints as checkpointing
from rl_training.record.checkpoints import load_checkpoint
from rl_training.run import folder as run_folder
from rl_training.run import interruption, workflows
from rl_training.run.build import open_session
from rl_training.run.evaluation import Evaluator
from rl_training.run.interruption import Interruption
from rl_training.run.run import Callback, NotSaved, Run
from rl_training.run.workflows import TrainResult, evaluate_checkpoint, resume_training, train
from rl_training.runtime.a2c_trainer import train_a2c

NOT_EXACT = pytest.mark.filterwarnings("ignore:stopped in the middle of a turn", "ignore:it was saved in the middle")


class Hooked(Walk):
    """Calls what a test puts here, in the n-th step of any instance; -1: never."""

    hook: Callable[[], None] = staticmethod(lambda: None)
    at = steps = -1

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        Hooked.steps += 1
        if Hooked.steps == Hooked.at:
            Hooked.hook()
        return super().step(action)


@pytest.fixture
def hook_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Put a function into one step of all that are taken, evaluations' steps too."""

    def put(at: int, function: Callable[[], None]) -> None:
        monkeypatch.setattr(Hooked, "hook", staticmethod(function))
        monkeypatch.setattr(Hooked, "at", at)
        monkeypatch.setattr(Hooked, "steps", 0)

    return put


def hooked(tmp_path: Path, algo: str = "a2c", **fields: Any) -> TrainConfig:
    return tiny(algo, tmp_path, **{"env_id": "test_lifecycle:Hooked", "num_envs": 2, "eval_episodes": 0, **fields})


def latest_of(tmp_path: Path) -> Path:
    (path,) = tmp_path.glob("*/checkpoints/latest.ckpt")
    return path


def fail(kind: type[BaseException] = RuntimeError) -> Callable[..., Any]:
    def raise_it(*_: Any, **__: Any) -> None:
        raise kind("on purpose")

    return raise_it


def ask_to_stop() -> None:
    signal.raise_signal(signal.SIGTERM)


def stall() -> None:
    """Ask to stop, and never come back."""
    ask_to_stop()
    while True:
        signal.pause()


# ---- save first, then evaluate ---------------------------------------------------------------------------------------


def test_the_last_checkpoint_is_there_before_the_last_evaluation_and_knows_it_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    original = Evaluator.evaluate

    def evaluate(evaluator: Evaluator, *arguments: Any, **options: Any) -> Any:
        seen.append(load_checkpoint(latest_of(tmp_path))["run"]["step"])
        return original(evaluator, *arguments, **options)

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    result = train(tiny("a2c", tmp_path), console=False)
    assert seen == [128]
    state = load_checkpoint(result.checkpoint_path)["run"]
    assert state["last_evaluation"]["eval_return_mean"] == state["best_return"] == result.metrics["eval_return_mean"]


def test_a_last_evaluation_that_fails_loses_nothing_and_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(tiny("a2c", tmp_path / "whole"), console=False)
    monkeypatch.setattr(Evaluator, "evaluate", fail())
    with pytest.raises(RuntimeError, match="on purpose"):
        train(tiny("a2c", tmp_path / "failed"), console=True)
    latest = latest_of(tmp_path / "failed")
    assert f"step 128 is saved: rl-training resume --checkpoint {latest}" in capsys.readouterr().err
    monkeypatch.undo()
    resumed = resume_training(latest, console=False)
    assert_same(*(run.metrics["eval_return_mean"] for run in (whole, resumed)))


# ---- signals in an evaluation ----------------------------------------------------------------------------------------


def signal_in_evaluation(monkeypatch: pytest.MonkeyPatch, number: int, *, inside: bool) -> None:
    """Send a signal in the n-th evaluation: inside its environment, which then never comes back, or in the policy."""
    original, count = Evaluator.evaluate, [0]

    def evaluate(evaluator: Evaluator, *arguments: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] == number:
            if inside:
                monkeypatch.setattr("gymnasium.envs.classic_control.cartpole.CartPoleEnv.step", lambda *_: stall())
            else:
                act = "rl_training.run.learner.ActingSession.act"
                monkeypatch.setattr(act, lambda *_: (ask_to_stop(), np.zeros(2, dtype=int))[1])
        return original(evaluator, *arguments, **options)

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("checkpoint_interval", [0, 16])
def test_a_signal_ends_an_evaluation_at_once_and_the_resumed_run_makes_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool, checkpoint_interval: int
) -> None:
    fields: dict[str, Any] = {"checkpoint_interval": checkpoint_interval, "kwargs": {"eval_interval": 48}}
    whole = train(tiny("a2c", tmp_path / "whole", **fields), console=False)
    with monkeypatch.context() as patch:
        signal_in_evaluation(patch, 2, inside=inside)
        stopped = train(tiny("a2c", tmp_path / "stopped", **fields), console=False, raise_on_signal=False)
    assert (stopped.metrics["stop_reason"], stopped.metrics["global_step"]) == ("SIGTERM", 96)
    assert [row["step"] for row in rows_of(stopped.run_dir) if row["kind"] == "eval"] == [48]
    assert not load_checkpoint(stopped.checkpoint_path)["run"]["abandoned"]
    assert_same_run(whole, resume_training(stopped.checkpoint_path, console=False))


def test_an_evaluation_that_is_due_after_the_signal_is_left_to_the_resumed_run(
    tmp_path: Path, hook_at: Callable[[int, Callable[[], None]], None]
) -> None:
    config = hooked(tmp_path / "whole", eval_episodes=1, kwargs={"eval_interval": 48})
    whole = train(config, console=False)
    hook_at(40, ask_to_stop)  # in the turn from 32 to 48
    moved = config.model_copy(update={"output_dir": str(tmp_path / "stopped")})
    stopped = train(moved, console=False, raise_on_signal=False)
    assert (stopped.metrics["stop_reason"], stopped.metrics["global_step"]) == ("SIGTERM", 48)
    assert not [row for row in rows_of(stopped.run_dir) if row["kind"] == "eval"]
    assert_same_run(whole, resume_training(stopped.checkpoint_path, console=False))


def test_a_signal_in_the_last_evaluation_ends_the_run_with_everything_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_in_evaluation(monkeypatch, 1, inside=True)
    stopped = train(tiny("a2c", tmp_path), console=False, raise_on_signal=False)
    assert stopped.metrics["stop_reason"] == "SIGTERM"
    assert load_checkpoint(stopped.checkpoint_path)["run"]["step"] == 128


# ---- signals in a turn -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["a2c", "dqn"])
def test_a_signal_in_a_turn_lets_it_finish_and_resuming_is_exact(
    tmp_path: Path, hook_at: Callable[[int, Callable[[], None]], None], algo: str
) -> None:
    whole = train(hooked(tmp_path / "whole", algo), console=False)
    hook_at(25, ask_to_stop)
    stopped = train(hooked(tmp_path / "stopped", algo), console=False, raise_on_signal=False)
    assert stopped.metrics["stop_reason"] == "SIGTERM"
    assert 0 < stopped.metrics["global_step"] < 128
    assert_same_run(whole, resume_training(stopped.checkpoint_path, console=False))


@pytest.mark.parametrize("algo", ["a2c", "dqn", "dreamer", "gail"])
def test_a_turn_that_never_ends_is_abandoned_and_said_so_now_and_later(
    tmp_path: Path, hook_at: Callable[[int, Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch, algo: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(interruption, "STOP_SECONDS", 0.01)
    kwargs = {"expert_dataset_kind": "random"} if algo == "gail" else {}
    hook_at(10**9, stall)
    train(hooked(tmp_path / "whole", algo, kwargs=kwargs), console=False)
    hook_at(Hooked.steps - 20, stall)
    stopped = train(hooked(tmp_path / "stopped", algo, kwargs=kwargs), console=True, raise_on_signal=False)
    assert stopped.metrics["stop_reason"] == "SIGTERM"
    assert "a resume from here is not exact" in capsys.readouterr().err
    tree = load_checkpoint(stopped.checkpoint_path)
    assert tree["run"]["abandoned"]
    assert tree["source"]["stepper"] == {}
    assert 0 < tree["run"]["step"] < 128
    if algo == "dqn":  # the rows of the abandoned turn stay
        assert tree["source"]["replay"]["sizes"].sum() >= tree["run"]["step"]
    with pytest.warns(UserWarning, match="saved in the middle of a turn: episodes start over, so this resume is not"):
        result = resume_training(stopped.checkpoint_path, console=False)
    assert result.metrics["stop_reason"] == "total_timesteps"
    assert not load_checkpoint(result.checkpoint_path)["run"]["abandoned"]


@NOT_EXACT
def test_updates_that_take_too_long_are_abandoned_between_two_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interruption, "STOP_SECONDS", 0.01)
    runs: list[Run] = []
    original = A2C.learn

    class Look(Callback):
        def on_start(self, run: Run) -> None:
            runs.append(run)

    def learn(self: A2C, *arguments: Any, **options: Any) -> Any:
        if self.num_updates == 4:
            ask_to_stop()
            while runs[0].session.collector.stepper.interruption is None:  # the alarm must not end it here
                signal.pause()
        return original(self, *arguments, **options)

    monkeypatch.setattr(A2C, "learn", learn)
    stopped = train(tiny("a2c", tmp_path, eval_episodes=0), callbacks=[Look()], console=False, raise_on_signal=False)
    assert stopped.metrics["updates"] == 5  # the update itself was finished
    assert load_checkpoint(stopped.checkpoint_path)["run"]["abandoned"]


def test_an_alarm_of_the_users_own_is_left_alone_and_comes_back(
    tmp_path: Path, hook_at: Callable[[int, Callable[[], None]], None]
) -> None:
    def own(*_: Any) -> None:
        raise AssertionError

    def look() -> None:
        assert signal.getsignal(signal.SIGALRM) is own
        ask_to_stop()
        assert signal.getsignal(signal.SIGALRM) is not own

    before = signal.signal(signal.SIGALRM, own)
    try:
        hook_at(40, look)
        assert train(hooked(tmp_path), console=False, raise_on_signal=False).metrics["stop_reason"] == "SIGTERM"
        assert signal.getsignal(signal.SIGALRM) is own
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_second_signal_saves_nothing(
    tmp_path: Path, hook_at: Callable[[int, Callable[[], None]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def twice() -> None:
        ask_to_stop()
        ask_to_stop()

    hook_at(70, twice)
    with pytest.raises(Terminated):
        train(hooked(tmp_path, checkpoint_interval=32), console=True, raise_on_signal=False)
    assert load_checkpoint(latest_of(tmp_path))["run"]["step"] == 64
    assert json.loads((latest_of(tmp_path).parents[1] / "end.json").read_text())["stop_reason"] == "SIGTERM"
    assert "step 64 is saved" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@NOT_EXACT
def test_an_environment_that_the_signal_broke_is_an_abandoned_turn(
    tmp_path: Path, hook_at: Callable[[int, Callable[[], None]], None]
) -> None:
    """As a worker that heard a signal to the whole group and died."""

    def break_down() -> None:
        ask_to_stop()
        raise EOFError

    hook_at(70, break_down)
    with pytest.warns(UserWarning, match=r"^after the signal there was EnvironmentFailure: .* raised EOFError"):
        stopped = train(hooked(tmp_path), console=False, raise_on_signal=False)
    assert stopped.metrics["stop_reason"] == "SIGTERM"
    assert load_checkpoint(stopped.checkpoint_path)["run"]["step"] == 64


@NOT_EXACT
def test_environments_that_are_gone_when_the_run_saves_do_not_keep_it_from_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As workers that died in an evaluation: nobody can tell where their episodes were."""

    class Die(Callback):
        def on_update(self, run: Run) -> None:
            if run.step == 64:
                monkeypatch.setattr(SyncEngine, "state_dict", fail(ConnectionResetError))
                ask_to_stop()

    with pytest.warns(UserWarning, match="^on purpose"):
        stopped = train(hooked(tmp_path), callbacks=[Die()], console=False, raise_on_signal=False)
    state = load_checkpoint(stopped.checkpoint_path)["run"]
    assert (stopped.metrics["stop_reason"], state["step"], state["abandoned"]) == ("SIGTERM", 64, True)
    monkeypatch.undo()
    assert resume_training(stopped.checkpoint_path, console=False).metrics["stop_reason"] == "total_timesteps"


# ---- what a signal raises --------------------------------------------------------------------------------------------

RAISED = [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]


class SignalAt(Callback):
    """Sends the signal once, after the update that reaches this step."""

    def __init__(self, number: int, step: int) -> None:
        self.number, self.step = number, step

    def on_update(self, run: Run) -> None:
        if run.step == self.step:
            signal.raise_signal(self.number)


@pytest.mark.parametrize(("number", "kind"), RAISED)
def test_a_signal_ends_a_loop_over_seeds_and_the_model_has_what_it_learned(
    tmp_path: Path, number: int, kind: type[BaseException]
) -> None:
    config = hooked(tmp_path / "whole", seed=1)
    whole = train(config, console=False)
    models: list[ManagedAlgorithm] = []

    def train_seeds() -> None:
        for seed in (1, 2):
            again = config.model_copy(update={"seed": seed, "output_dir": str(tmp_path / "stopped")})
            models.append(rl_training.A2C(again))
            models[-1].learn(callbacks=SignalAt(number, 64), progress=False)

    with pytest.raises(kind) as raised:
        train_seeds()
    assert (type(raised.value), len(models)) == (kind, 1)
    latest = latest_of(tmp_path / "stopped")
    assert load_checkpoint(latest)["run"]["step"] == 64
    obs = np.zeros(models[0]._loaded().spaces.obs_shape, dtype=np.float32)
    assert_same(models[0].predict(obs), rl_training.A2C.load(latest).predict(obs))
    assert_same_run(whole, models[0].learn(progress=False))


def test_terminated_is_the_exit_of_a_script_that_sigterm_stopped() -> None:
    assert rl_training.Terminated is Terminated
    assert isinstance(Terminated(), SystemExit)
    assert Terminated().code == 143


@pytest.mark.parametrize(("number", "kind"), RAISED)
def test_every_way_to_train_raises_after_a_signal(tmp_path: Path, number: int, kind: type[BaseException]) -> None:
    config = hooked(tmp_path)
    stops: dict[str, Any] = {"callbacks": [SignalAt(number, 32)]}
    experiment = DefaultExperimentManager().setup(config)
    for run in (lambda: train_a2c(config, **stops), lambda: experiment.train(**stops)):
        with pytest.raises(kind):
            run()
    stopped = train(config, console=False, raise_on_signal=False, **stops)
    assert (stopped.stop_signal, stopped.metrics["global_step"]) == (number, 32)
    stops = {"callbacks": [SignalAt(number, 64)]}
    managed = rl_training.A2C.load(stopped.checkpoint_path)
    with pytest.raises(kind):
        managed.resume(console=False, **stops)
    with pytest.raises(kind):
        experiment.resume(managed._path("resume"), callbacks=[SignalAt(number, 96)], console=False)
    assert load_checkpoint(stopped.checkpoint_path)["run"]["step"] == 96


def test_learn_returns_after_a_signal_if_it_is_asked_to(tmp_path: Path) -> None:
    model = rl_training.A2C(hooked(tmp_path))
    calls = [model.learn(callbacks=SignalAt(signal.SIGTERM, step), progress=False, raise_on_signal=False)
             for step in (32, 64)]  # fmt: skip  # a new run, and one that continues
    assert [(call.metrics["stop_reason"], call.metrics["global_step"]) for call in calls] == [
        ("SIGTERM", 32), ("SIGTERM", 64)
    ]  # fmt: skip


def test_a_signal_in_the_last_turn_raises_although_the_run_is_done(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(hooked(tmp_path), callbacks=[SignalAt(signal.SIGINT, 128)], console=False)
    assert json.loads((latest_of(tmp_path).parents[1] / "end.json").read_text())["stop_reason"] == "total_timesteps"


# ---- failures --------------------------------------------------------------------------------------------------------


@NOT_EXACT
@pytest.mark.parametrize("algo", ["a2c", "dqn", "ppo", "dreamer"])
def test_an_environment_that_raises_loses_at_most_its_turn(
    tmp_path: Path, hook_at: Callable[[int, Callable[[], None]], None], capsys: pytest.CaptureFixture[str], algo: str
) -> None:
    hook_at(85, fail())
    with pytest.raises(EnvironmentFailure, match="raised RuntimeError: on purpose"):
        train(hooked(tmp_path, algo), console=True)
    latest = latest_of(tmp_path)
    state = load_checkpoint(latest)["run"]
    assert 80 <= state["step"] <= 90
    assert state["abandoned"]
    err = capsys.readouterr().err
    assert "a resume from here is not exact" in err
    command = f"rl-training resume --checkpoint {latest} --env test_lifecycle:Hooked\n"
    assert f"step {state['step']} is saved: {command}" in err
    assert resume_training(latest, console=False).metrics["stop_reason"] == "total_timesteps"


def test_a_failure_right_after_a_checkpoint_keeps_the_exact_one(
    tmp_path: Path, hook_at: Callable[[int, Callable[[], None]], None]
) -> None:
    config = hooked(tmp_path / "whole", checkpoint_interval=16)
    whole = train(config, console=False)
    hook_at(42, fail())
    with pytest.raises(EnvironmentFailure):
        train(config.model_copy(update={"output_dir": str(tmp_path / "failed")}), console=False)
    latest = latest_of(tmp_path / "failed")
    assert not load_checkpoint(latest)["run"]["abandoned"]
    assert_same_run(whole, resume_training(latest, console=False))


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt, MemoryError, SystemExit])
@pytest.mark.parametrize("event", ["on_update", "on_evaluation"])
def test_a_callback_that_raises_loses_nothing(tmp_path: Path, kind: type[BaseException], event: str) -> None:
    config = tiny("a2c", tmp_path / "whole", kwargs={"eval_interval": 24})
    whole = train(config, console=False)

    class Break(Callback):
        def on_update(self, run: Run) -> None:
            if event == "on_update" and run.step == 72:
                raise kind

        def on_evaluation(self, run: Run, metrics: dict[str, Any]) -> None:
            if event == "on_evaluation" and run.step == 72:
                raise kind

    with pytest.raises(kind):
        train(config.model_copy(update={"output_dir": str(tmp_path / "failed")}), callbacks=[Break()], console=False)
    latest = latest_of(tmp_path / "failed")
    assert load_checkpoint(latest)["run"]["step"] == 72
    assert_same_run(whole, resume_training(latest, console=False))


@NOT_EXACT
def test_an_update_that_runs_out_of_memory_keeps_what_was_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = A2C.learn

    def learn(self: A2C, *arguments: Any, **options: Any) -> Any:
        return (fail(MemoryError) if self.num_updates == 9 else original)(self, *arguments, **options)

    monkeypatch.setattr(A2C, "learn", learn)
    with pytest.raises(MemoryError):
        train(tiny("a2c", tmp_path, eval_episodes=0), console=False)
    state = load_checkpoint(latest_of(tmp_path))["run"]
    assert (state["updates"], state["abandoned"]) == (9, True)


def test_a_buffer_that_may_be_half_written_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, count = EnvRings._advance, [0]

    def advance(self: EnvRings, pick: Any) -> None:
        count[0] += 1
        if count[0] == 60:
            raise MemoryError
        original(self, pick)

    monkeypatch.setattr(EnvRings, "_advance", advance)
    with pytest.raises(MemoryError):
        train(tiny("dqn", tmp_path, eval_episodes=0, checkpoint_interval=32), console=False)
    state = load_checkpoint(latest_of(tmp_path))["run"]
    assert (state["step"], state["abandoned"]) == (32, False)


# ---- what cannot be written ------------------------------------------------------------------------------------------


class FullDisk:
    """Refuses some of the writes of `latest.ckpt`, counted from 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *refused: int) -> None:
        self.count, self.refused, self.original = 0, refused, checkpointing.save_checkpoint
        monkeypatch.setattr(checkpointing, "save_checkpoint", self)

    def __call__(self, path: Path, *arguments: Any, **options: Any) -> Path:
        self.count += path.name == "latest.ckpt"
        if path.name == "latest.ckpt" and self.count in self.refused:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.original(path, *arguments, **options)


def test_a_checkpoint_that_cannot_be_written_is_tried_again_at_the_next_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(tiny("a2c", tmp_path / "whole", checkpoint_interval=32), console=False)
    FullDisk(monkeypatch, 3)
    result = train(tiny("a2c", tmp_path / "full", checkpoint_interval=32), console=True)
    said = capsys.readouterr().err
    assert said.count("warning: a checkpoint of step 64 cannot be written to") == 1
    assert "(No space left on device); the newest is of step 32; the next checkpoint will be tried as usual" in said
    assert_same_run(whole, result)


@pytest.mark.filterwarnings("ignore:a checkpoint of step")
def test_a_last_checkpoint_that_cannot_be_written_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FullDisk(monkeypatch, *range(4, 99))
    newest = r"the newest is of step 64; free space, then rl-training resume --checkpoint .*latest\.ckpt$"
    with pytest.raises(NotSaved, match=rf"step 128 cannot be .* \(No space left on device\); {newest}"):
        train(tiny("a2c", tmp_path, checkpoint_interval=32), console=False)
    assert issubclass(NotSaved, TrainingFailure)
    assert load_checkpoint(latest_of(tmp_path))["run"]["step"] == 64


def test_a_first_checkpoint_that_cannot_be_written_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FullDisk(monkeypatch, 1)
    with pytest.raises(NotSaved, match=r"step 0 cannot be written to .*; there is none yet; free space, then start"):
        train(tiny("a2c", tmp_path), console=False)


def test_a_best_checkpoint_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = checkpointing.CheckpointFolder.save
    tries: list[float] = []

    def save(self: Any, name: str, tree: Any) -> Path:
        tries.extend([tree["run"]["best_return"]] if name == "best" else [])
        if name == "best" and len(tries) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, name, tree)

    monkeypatch.setattr(checkpointing.CheckpointFolder, "save", save)
    result = train(tiny("a2c", tmp_path, kwargs={"eval_interval": 16, "learning_rate": 0.0}), console=True)
    assert tries[1:] == tries[:1]  # the same policy again: its return counts, since it was not kept before
    assert "best.ckpt could not be written (No space left on device)" in capsys.readouterr().err
    assert load_checkpoint(result.checkpoint_path.with_name("best.ckpt"))["run"]["step"] == 32


def test_a_run_folder_that_is_deleted_is_made_again(tmp_path: Path) -> None:
    class Delete(Callback):
        def on_update(self, run: Run) -> None:
            if run.step == 64:
                shutil.rmtree(run.run_dir)

    with pytest.warns(UserWarning, match="was deleted; a new one is started"):
        result = train(tiny("a2c", tmp_path, eval_episodes=0), callbacks=[Delete()], console=False)
    assert [row["step"] for row in rows_of(result.run_dir)][:2] == [72, 80]
    again = resume_training(result.checkpoint_path, total_timesteps=160, console=False)
    assert again.run_dir == result.run_dir


def test_an_environment_that_raises_when_it_is_closed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Break(Callback):
        def on_start(self, run: Run) -> None:
            monkeypatch.setattr(Hooked, "close", fail())

    with pytest.warns(UserWarning, match="^while closing, .*Hooked raised RuntimeError: on purpose"):
        result = train(hooked(tmp_path), callbacks=[Break()], console=False)
    assert result.metrics["stop_reason"] == "total_timesteps"


def broken_close(monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]) -> list[Hooked]:
    """Let `close` of every environment raise; returns those that it was called on."""
    closed: list[Hooked] = []

    def close(env: Hooked) -> None:
        closed.append(env)
        raise kind("on purpose")

    monkeypatch.setattr(Hooked, "close", close)
    return closed


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_an_evaluation_whose_environments_raise_when_they_are_closed_counts_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    closed: list[Hooked] = []

    class Break(Callback):
        def on_start(self, run: Run) -> None:
            nonlocal closed
            closed = broken_close(monkeypatch, kind)

        def on_evaluation(self, run: Run, metrics: dict[str, Any]) -> None:
            monkeypatch.undo()

    with pytest.warns(UserWarning, match="^while closing, the environment test_lifecycle:Hooked .*on purpose"):
        result = train(
            hooked(tmp_path, eval_episodes=3, kwargs={"eval_interval": 64}), callbacks=[Break()], console=False
        )
    assert len(closed) == 3
    assert [row["step"] for row in rows_of(result.run_dir) if row["kind"] == "eval"] == [64, 128]


@pytest.mark.parametrize("interrupted", [True, False])
def test_environments_that_raise_when_they_are_closed_do_not_hide_how_the_evaluation_ended(
    tmp_path: Path, hook_at: Callable[[int, Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch,
    interrupted: bool,
) -> None:  # fmt: skip
    policy = train(hooked(tmp_path), console=False).policy
    recipe = read_recipe("test_lifecycle:Hooked", {})
    hook_at(5, fail(Interruption if interrupted else ValueError))
    closed = broken_close(monkeypatch, SystemExit)
    ending = pytest.raises(Interruption) if interrupted else pytest.raises(EnvironmentFailure, match="ValueError")
    with ending:
        Evaluator(recipe, policy.spaces, 0).evaluate(policy.algorithm, 3)
    assert len(closed) == 3
    with pytest.raises(EnvironmentFailure, match=r"Hooked called sys\.exit\(on purpose\)"):
        Evaluator(recipe, policy.spaces, 0).evaluate(policy.algorithm, 3)
    assert len(closed) == 6


def test_an_environment_that_never_closes_is_left_once_a_signal_asked_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interruption, "STOP_SECONDS", 0.01)

    class Break(Callback):
        def on_end(self, run: Run) -> None:
            monkeypatch.setattr(Hooked, "close", lambda *_: stall())

    with pytest.warns(UserWarning, match="Hooked took too long to close"):
        result = train(hooked(tmp_path), callbacks=[Break()], console=False, raise_on_signal=False)
    assert result.metrics["global_step"] == 128


def test_environments_that_never_close_after_a_signal_in_an_evaluation_are_left(
    tmp_path: Path, hook_at: Callable[[int, Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the evaluation, and those of training."""
    monkeypatch.setattr(interruption, "STOP_SECONDS", 0.01)
    hook_at(129, stall)  # the first step of the last evaluation

    class Break(Callback):
        def on_start(self, run: Run) -> None:
            monkeypatch.setattr(Hooked, "close", lambda *_: signal.pause())

    with pytest.warns(UserWarning, match="Hooked took too long to close"):
        result = train(
            hooked(tmp_path, eval_episodes=1), callbacks=[Break()], console=False, raise_on_signal=False
        )
    assert (result.metrics["stop_reason"], result.metrics["global_step"]) == ("SIGTERM", 128)


# ---- one process per folder ------------------------------------------------------------------------------------------


def during_a_run(tmp_path: Path, action: Callable[[Path], None]) -> TrainResult:
    """A run that calls `action(latest)` once while it trains."""

    class Act(Callback):
        def on_update(self, run: Run) -> None:
            if run.updates == 3:
                action(run.checkpoints.latest)

    return train(tiny("a2c", tmp_path, eval_episodes=0), callbacks=[Act()], console=False)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_process_is_told_who_is_in_the_folder_and_writes_nothing(tmp_path: Path) -> None:
    def resume(latest: Path) -> None:
        before = contents(tmp_path)
        with pytest.raises(UserError, match=rf"is in use: process {os.getpid()} on {socket.gethostname()} is training"):
            resume_training(latest, console=False)
        assert contents(tmp_path) == before
        evaluate_checkpoint(latest, num_episodes=1)  # reading is free
        assert resume_training(latest, output_dir=tmp_path / "elsewhere", console=False).metrics["global_step"] == 128

    result = during_a_run(tmp_path / "runs", resume)
    assert not (result.run_dir / ".lock").exists()
    assert resume_training(result.checkpoint_path, total_timesteps=160, console=False).run_dir == result.run_dir


@pytest.fixture
def stopped(tmp_path: Path) -> TrainResult:
    return train(tiny("a2c", tmp_path / "stopped", eval_episodes=0), console=False)


def write_lock(run: TrainResult, process: int, host: str) -> Path:
    path = run.run_dir / ".lock"
    path.write_text(json.dumps({"process": process, "host": host, "started": "2026-01-01T00:00:00+0000"}))
    return path


DEAD = 999_999_999


@pytest.mark.parametrize(("process", "host"), [(DEAD, "here"), (os.getppid(), "here"), (1, "elsewhere")])
def test_a_lock_file_that_nobody_holds_is_taken_over(
    stopped: TrainResult, monkeypatch: pytest.MonkeyPatch, process: int, host: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    path = write_lock(stopped, process, host)
    assert resume_training(stopped.checkpoint_path, total_timesteps=160, console=False).run_dir == stopped.run_dir
    assert not path.exists()


@pytest.mark.parametrize(
    ("process", "host", "free"),
    [(DEAD, "here", True), (os.getppid(), "here", False), (DEAD, "elsewhere", False)],
)
def test_without_locks_the_process_in_the_file_counts(
    stopped: TrainResult, monkeypatch: pytest.MonkeyPatch, process: int, host: str, free: bool
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    path = write_lock(stopped, process, host)
    if free:
        resume_training(stopped.checkpoint_path, total_timesteps=160, console=False)
        assert not path.exists()
        return
    with pytest.raises(UserError, match=rf"in use: process {process} on {host} is .*delete \.lock there"):
        resume_training(stopped.checkpoint_path, total_timesteps=160, console=False)
    assert path.exists()


@pytest.mark.parametrize("text", ["", "[]", '{"process": "x"}', "\0"])
def test_a_lock_file_that_makes_no_sense_is_taken_over(stopped: TrainResult, text: str) -> None:
    (stopped.run_dir / ".lock").write_text(text)
    resume_training(stopped.checkpoint_path, total_timesteps=160, console=False)


def test_a_lock_that_its_holder_removes_meanwhile_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was opened, then removed by its holder's end, then locked: that lock keeps nobody out."""
    original, path = run_folder._is_free, tmp_path / ".lock"

    def is_free(descriptor: int) -> bool:
        monkeypatch.setattr(run_folder, "_is_free", original)
        path.unlink()
        return original(descriptor)

    monkeypatch.setattr(run_folder, "_is_free", is_free)
    with run_folder.locked(tmp_path):
        assert json.loads(path.read_text())["process"] == os.getpid()


def test_a_folder_that_cannot_be_locked_is_one_sentence(stopped: TrainResult) -> None:
    (stopped.run_dir / ".lock").mkdir()
    with pytest.raises(UserError, match=r"cannot be written to \(Is a directory\); fix that, or give --output-dir\.$"):
        resume_training(stopped.checkpoint_path, console=False)


@pytest.mark.parametrize("part", ["make_run_dir", "locked"])
def test_a_run_without_a_folder_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    closed: list[Any] = []
    monkeypatch.setattr(workflows, part, fail(OSError))
    monkeypatch.setattr(SyncEngine, "close", lambda engine: closed.append(engine))
    with pytest.raises(OSError, match="on purpose"):
        train(hooked(tmp_path), console=False)
    assert len(closed) == 1


def test_a_buffer_is_closed_though_the_environments_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(hooked(tmp_path, "dqn", kwargs={"replay_folder": str(tmp_path)}))
    assert list(tmp_path.iterdir())
    monkeypatch.setattr(SyncEngine, "close", fail())
    with pytest.raises(RuntimeError, match="on purpose"):
        session.close()
    assert not list(tmp_path.iterdir())


def test_temporary_files_of_a_killed_run_go_at_the_next_start(stopped: TrainResult) -> None:
    host = safe_files.host_name()
    checkpoints = [f"checkpoints/.latest.ckpt.{name}-1.tmp" for name in (f"{host}-{DEAD}", "an0ther-17")]
    for name in [f".manifest.json.{host}-{DEAD}-1.tmp", f".metrics.jsonl.{host}-{DEAD}-1.tmp", *checkpoints]:
        (stopped.run_dir / name).write_text("")
    resume_training(stopped.checkpoint_path, total_timesteps=160, console=False)
    assert not list(stopped.run_dir.rglob(".*"))


# ---- branches --------------------------------------------------------------------------------------------------------


def test_another_checkpoint_of_the_same_step_branches(tmp_path: Path) -> None:
    finished = train(tiny("dqn", tmp_path), console=False)
    best = finished.checkpoint_path.with_name("best.ckpt")
    assert load_checkpoint(best)["run"]["step"] == load_checkpoint(finished.checkpoint_path)["run"]["step"]
    before = contents(finished.run_dir)
    branch = resume_training(best, total_timesteps=160, console=False)
    assert branch.run_dir != finished.run_dir
    assert contents(finished.run_dir) == before


@pytest.mark.parametrize("make", [os.link, os.symlink, shutil.copyfile])
def test_the_newest_checkpoint_under_another_name_goes_on_in_place(
    stopped: TrainResult, make: Callable[[Path, Path], None]
) -> None:
    other = stopped.checkpoint_path.with_name("mine.ckpt")
    make(stopped.checkpoint_path, other)
    assert resume_training(other, total_timesteps=160, console=False).run_dir == stopped.run_dir


def test_a_checkpoint_without_its_latest_goes_on_in_place(stopped: TrainResult) -> None:
    stopped.checkpoint_path.rename(stopped.checkpoint_path.with_name("mine.ckpt"))
    result = resume_training(stopped.checkpoint_path.with_name("mine.ckpt"), total_timesteps=160, console=False)
    assert result.run_dir == stopped.run_dir


# ---- the machine -----------------------------------------------------------------------------------------------------


def test_a_resume_on_another_machine_says_what_differs(
    stopped: TrainResult, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    machine = load_checkpoint(stopped.checkpoint_path)["machine"]
    assert machine["torch"] == torch.__version__
    assert machine["cpu"] == torch.backends.cpu.get_cpu_capability()

    def resumed(edit: Callable[[dict[str, Any]], Any]) -> list[str]:
        path = edit_checkpoint(stopped.checkpoint_path, tmp_path / "edited.ckpt", edit)
        result = resume_training(path, output_dir=tmp_path, console=False)
        messages = json.loads((result.run_dir / "manifest.json").read_text())["messages"]
        return [message for message in messages if "machine" in message]

    assert resumed(lambda tree: None) == []
    assert resumed(lambda tree: tree.pop("machine")) == []
    assert resumed(lambda tree: tree.update(machine="odd")) == []
    assert not recwarn
    (said,) = resumed(lambda tree: tree["machine"].update(cpu="AVX1024", torch="1.0"))
    assert f"(torch {torch.__version__}, was 1.0; cpu {machine['cpu']}, was AVX1024), so this resume may not be" in said
    assert len(recwarn) == 1


def test_the_number_of_threads_is_as_it_was_afterwards(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    class Look(Callback):
        def on_start(self, run: Run) -> None:
            seen.append(torch.get_num_threads())

    try:
        torch.set_num_threads(3)
        result = train(tiny("a2c", tmp_path, threads=2, eval_episodes=0), callbacks=[Look()], console=False)
        assert torch.get_num_threads() == 3
        resume_training(result.checkpoint_path, callbacks=[Look()], console=False)
        assert torch.get_num_threads() == 3
        evaluate_checkpoint(result.checkpoint_path, num_episodes=1)
        assert torch.get_num_threads() == 3
        with pytest.raises(UserError):
            train(tiny("a2c", tmp_path / "\0", threads=2), console=False)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [2, 2]


def test_a_checkpoint_of_before_all_this_still_loads_and_goes_on_exactly(tmp_path: Path) -> None:
    whole = train(tiny("a2c", tmp_path / "whole", total_timesteps=160), console=False)
    half = train(tiny("a2c", tmp_path / "half", eval_episodes=0), console=False)

    def age(tree: dict[str, Any]) -> None:
        del tree["machine"], tree["run"]["abandoned"]

    old = edit_checkpoint(half.checkpoint_path, tmp_path / "old.ckpt", age)
    changes = {"eval_episodes": 2, "total_timesteps": 160}
    result = resume_training(old, output_dir=tmp_path, changes=changes, force=True, console=False)
    first, second = (load_checkpoint(run.checkpoint_path) for run in (whole, result))
    assert_same(first["algorithm"], second["algorithm"])
