"""`DefaultExperimentManager`: make an experiment, which can be trained or resumed, from a config."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_training.config.params import read_params
from rl_training.config.settings import AnyConfig, read_config
from rl_training.config.train_config import TrainConfig
from rl_training.envs.factory import UserEnv, read_env
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.run.run import Callback
from rl_training.run.workflows import TrainResult, resume_training, train


@dataclass(frozen=True)
class Experiment:
    """One checked config."""

    config: TrainConfig
    env: UserEnv | None = None

    def train(
        self, *, run_suffix: str | None = None, callbacks: Iterable[Callback] | Callback | None = None
    ) -> TrainResult:
        """Start a new run."""
        return train(self.config, env=self.env, run_suffix=run_suffix, callbacks=callbacks)

    def resume(self, checkpoint: str | Path, **changes: Any) -> TrainResult:
        """Continue from a checkpoint; takes the arguments of `resume_training`."""
        return resume_training(checkpoint, env=self.config.named if self.env is None else self.env, **changes)


class DefaultExperimentManager:
    """Checks a config against the registry and makes the experiment."""

    def setup(self, config: AnyConfig, *, env: UserEnv | None = None) -> Experiment:
        """The experiment of a config, a mapping, a file or a preset; wrong names and bounds are refused here."""
        env = read_env(env)
        loaded = read_config(config, env)
        read_params(get_algorithm_spec(loaded.algo).params, loaded.algo_kwargs)
        return Experiment(loaded, env)
