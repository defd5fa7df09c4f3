"""Managed classes such as `PPO("CartPole-v1").learn()`: one per algorithm, made from the registry."""

from __future__ import annotations

from typing import Any

from rl_training.api.algorithms import managed_class, register
from rl_training.api.managed import ManagedAlgorithm
from rl_training.config.params import Schedule
from rl_training.config.train_config import TrainConfig
from rl_training.errors import Terminated, did_you_mean
from rl_training.experiment.registry import list_algorithm_specs, spec_of_class
from rl_training.run.run import Callback
from rl_training.run.workflows import TrainResult

__all__ = ["Callback", "ManagedAlgorithm", "Schedule", "Terminated", "TrainConfig", "TrainResult", "register"]


def __getattr__(name: str) -> Any:
    """A managed class (`PPO`) or a learner (`PPOAlgorithm`)."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    learner = name.removesuffix("Algorithm")
    if (spec := spec_of_class(learner)) is not None:
        return managed_class(name) if learner == name else spec.learner
    known = [*__all__, "load_runs", *(spec.class_name for spec in list_algorithm_specs())]
    raise AttributeError(f"rl_training has no name {name!r}; {did_you_mean(name, known)}")
