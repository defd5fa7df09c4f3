"""Tracking services in addition to the run's own files: Weights & Biases and MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_training.errors import first_line
from rl_training.record.metrics_file import tagged_numbers
from rl_training.safe_files import refuse_link


class Service:
    """A tracking service in addition to the run's files; if it fails, the run warns once and continues without it."""

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        self.name, self._warn, self._client = name, warn, None
        self._client = self._try(lambda: SERVICES[name](folder.resolve(), config))

    def add(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Add the metrics that are numbers."""
        client, numbers = self._client, dict(tagged_numbers(kind, metrics))
        if client is not None and numbers:
            self._try(lambda: client.add(step, numbers))

    def close(self) -> None:
        """End the run there."""
        client, self._client = self._client, None
        if client is not None:
            self._try(client.close)

    def _try(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # a server, a package or a disk can fail in any way
            self._client = None
            self._warn(f"{self.name} failed ({first_line(error)}); the run continues without it")
            return None


class _Wandb:
    """Weights & Biases: offline, in the run's folder, unless WANDB_MODE or a WANDB_API_KEY says otherwise."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self._run = wandb.init(
            project="rl-training", name=folder.name, id=folder.name, resume="allow", dir=str(folder), mode=mode,
            config=dict(config), tags=config.get("tags"), settings=wandb.Settings(silent=True),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, "step": step})

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """MLflow: in the file `mlflow.db` next to the run's folder, unless MLFLOW_TRACKING_URI is set."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric = Metric
        refuse_link(folder.parent / "mlflow.db")
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.parent / 'mlflow.db'}")
        experiment = self._client.get_experiment_by_name("rl-training")
        number = self._client.create_experiment("rl-training") if experiment is None else experiment.experiment_id
        found = self._client.search_runs([number], f"tags.folder = '{folder.name}'")  # of a run that is resumed
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        tags = {"folder": folder.name, "tags": ", ".join(config.get("tags", ()))}
        self._run = self._client.create_run(number, run_name=folder.name, tags=tags).info.run_id
        for name, value in config.items():
            self._client.log_param(self._run, name, str(value)[:500])

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._run, [self._metric(name, value, now, step) for name, value in numbers.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run)


SERVICES: dict[str, Callable[[Path, Mapping[str, Any]], Any]] = {"wandb": _Wandb, "mlflow": _MLflow}
