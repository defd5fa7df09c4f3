"""The managed classes by name: `from rl_training.api.algorithms import PPO`."""

from __future__ import annotations

from functools import cache
from typing import Any

from rl_training.api.managed import ManagedAlgorithm
from rl_training.experiment.registry import list_algorithm_specs


@cache
def managed_class(class_name: str) -> type[ManagedAlgorithm]:
    """The managed class of that name; the same object every time."""
    spec = next(spec for spec in list_algorithm_specs() if spec.class_name == class_name)
    doc = f"{spec.class_name}, managed: {spec.paper}. {spec.scope}"
    return type(class_name, (ManagedAlgorithm,), {"algo": spec.name, "__doc__": doc, "__module__": __name__})


def __getattr__(name: str) -> Any:
    if name not in {spec.class_name for spec in list_algorithm_specs()}:
        raise AttributeError(f"module {__name__!r} has no class {name!r}")
    return managed_class(name)
