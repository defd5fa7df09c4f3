"""`loggers`: where metrics go besides metrics.jsonl. The packages are not installed here; small stand-ins write what
they are told to a file. (Both were tried with the real ones: wandb 0.31 offline, mlflow-skinny 3.17.)"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from resume_cases import StopAt, tiny
from rl_training.errors import UserError
from rl_training.record.logger import RunLogger
from rl_training.record.metrics_file import read_metrics
from rl_training.run.workflows import resume_training, train

TELL = """
import json, os

def tell(*what):
    if what[0] == os.environ.get("STAND_IN_FAILS"):
        raise RuntimeError("no server\\nat all")
    with open(os.environ["STAND_IN"], "a") as file:
        file.write(json.dumps(what) + "\\n")
"""
WANDB = TELL + """
class Settings:
    def __init__(self, silent): pass

class Run:
    def define_metric(self, name, step_metric): pass
    def log(self, row): tell("log", row)
    def finish(self): tell("close")

def init(**options):
    options.pop("settings")
    tell("start", options)
    return Run()
"""
MLFLOW = TELL + """
from types import SimpleNamespace as Space

class MlflowClient:
    def __init__(self, uri): self.uri = uri
    def get_experiment_by_name(self, name): return None
    def create_experiment(self, name): return "1"
    def search_runs(self, experiments, query): return []
    def create_run(self, experiment, run_name, tags):
        tell("start", {"name": run_name, "dir": self.uri})
        return Space(info=Space(run_id="7"))
    def log_param(self, run, name, value): pass
    def log_batch(self, run, metrics): tell("log", {m[0]: m[1] for m in metrics} | {"step": metrics[0][3]})
    def set_terminated(self, run): tell("close")
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-ins can be imported; returns a function that reads what they were told."""
    packages = tmp_path / "packages"
    (packages / "mlflow").mkdir(parents=True)
    (packages / "wandb.py").write_text(WANDB)
    (packages / "mlflow" / "__init__.py").write_text(MLFLOW)
    (packages / "mlflow" / "entities.py").write_text("def Metric(*parts):\n    return parts\n")
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setenv("STAND_IN", str(tmp_path / "told.jsonl"))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    for name in ("wandb", "mlflow", "mlflow.entities"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield lambda: [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
    for name in ("wandb", "mlflow", "mlflow.entities"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_service_gets_the_numbers_of_every_row(name: str, told: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "mine"
    with closing(RunLogger(run_dir, console=False, total_steps=10, loggers=[name], config={"algo": "ppo"})) as logger:
        logger.log(3, {"loss": 0.5, "note": "text"})
        logger.log(3, {"eval_return_mean": 2.0, "eval_returns": [1.0, 3.0]}, kind="eval")
    start, *rows, close = told()
    assert start[0] == "start"
    assert start[1]["name"] == "mine"
    assert str(tmp_path / "runs") in start[1]["dir"]  # on this machine
    assert start[1].get("mode", "offline") == "offline"
    assert rows == [["log", {"train/loss": 0.5, "step": 3}], ["log", {"eval/eval_return_mean": 2.0, "step": 3}]]
    assert close == ["close"]
    assert not list(run_dir.glob("events*"))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
@pytest.mark.parametrize("moment", ["start", "log", "close"])
def test_a_service_that_fails_is_warned_of_once_and_the_run_goes_on(
    moment: str, name: str, told: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_FAILS", moment)
    config = tiny("ppo", tmp_path / "runs", loggers=["tensorboard", name])
    with pytest.warns(UserWarning, match=rf"{name} failed \(no server\); the run continues without it") as caught:
        result = train(config, console=False)
    assert len([warning for warning in caught if "continues without" in str(warning.message)]) == 1
    assert result.metrics["stop_reason"] == "total_timesteps"
    assert len(read_metrics(result.run_dir / "metrics.jsonl")) > 3
    assert list(result.run_dir.glob("events*"))


def test_a_logger_that_is_not_installed_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_training.run.build.find_spec", lambda name: None if name == "wandb" else object())
    with pytest.raises(UserError, match=r"loggers names 'wandb', which is not installed: pip install 'rl"):
        train(tiny("ppo", tmp_path / "runs", loggers=["wandb"]), console=False)
    assert not (tmp_path / "runs").exists()


def test_an_unknown_logger_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"loggers.*tensorboard.*wandb.*mlflow"):
        tiny("ppo", tmp_path, loggers=["comet"])


def test_a_resume_may_change_the_loggers(told: Any, tmp_path: Path) -> None:
    first = train(tiny("ppo", tmp_path / "runs", loggers=[]), callbacks=[StopAt(64)], console=False)
    resume_training(first.checkpoint_path, changes={"loggers": ["wandb"]}, console=False)
    assert told()[0][1]["id"] == first.run_dir.name  # so that wandb goes on with the same run
