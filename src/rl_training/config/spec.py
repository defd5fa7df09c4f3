"""`AlgorithmSpec`: the registry entry of an algorithm, and how entries are discovered."""

from __future__ import annotations

import importlib
import pkgutil
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rl_training.algorithms.base import Algorithm
from rl_training.config.params import Params
from rl_training.data.store import Store, StoreContext
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError, did_you_mean, kind_and_line

ENTRY_POINT_GROUP = "rl_training.algorithms"


@dataclass(frozen=True)
class AlgorithmSpec:
    """One algorithm: what it is, what it supports, its hyper-parameters, and how its parts are built."""

    name: str
    class_name: str
    year: int
    paper: str
    lane: str
    scope: str
    params: type[Params]
    learner: type[Algorithm]
    build: Callable[[Any, EnvSpaces], Algorithm]
    store: Callable[[StoreContext], Store]
    action_kinds: tuple[str, ...]
    observation_kinds: tuple[str, ...] = ("vector", "image", "mixed")
    steps_environments: bool = True  # False: learns from recorded data only
    normalizes_rewards: bool = False  # whether its learner supports env_kwargs.wrappers.normalize_reward
    defaults: Mapping[str, Any] = field(default_factory=dict)  # for fields of TrainConfig that are not set

    def __post_init__(self) -> None:
        """Give a spec without a budget one, so that `learn()` and `train --algo` need no config."""
        budget = self.defaults.get("total_timesteps", 100_000)
        object.__setattr__(self, "defaults", {**self.defaults, "total_timesteps": budget})

    def check_support(self, spaces: EnvSpaces, *, learns: bool = True) -> None:
        """Raise a UserError if this algorithm does not support the environment, or cannot learn in it."""
        actions = spaces.action_kind, "actions", self.action_kinds
        for kind, what, supported in (actions, (spaces.obs_kind, "observations", self.observation_kinds)):
            if kind not in supported:
                shown = f"{kind} {what} (images in a Dict or Tuple)" if kind == "mixed" else f"{kind} {what}"
                refused = f"{self.name} does not support the {shown} of {spaces.env_id}"
                raise UserError(f"{refused}; it supports {', '.join(supported)}.")
        if learns and spaces.normalize_rewards and not self.normalizes_rewards:
            raise UserError(
                f"{self.name} does not normalize rewards; take normalize_reward out of env_kwargs.wrappers."
            )


@cache
def own_specs() -> dict[str, AlgorithmSpec]:
    """The algorithms of this package by name."""
    package = importlib.import_module("rl_training.runtime")  # by name: it is above this module

    modules = sorted(found.name for found in pkgutil.iter_modules(package.__path__) if found.name.endswith("_trainer"))
    specs = [spec for name in modules for spec in importlib.import_module(f"{package.__name__}.{name}").SPECS]
    return {spec.name: spec for spec in specs}


_plugins: dict[str, AlgorithmSpec | str] | None = None
_loading = threading.RLock()


def _load_plugins() -> dict[str, AlgorithmSpec | str]:
    """The algorithms of installed plugins by name; for a plugin that cannot be loaded, the reason under its name."""
    global _plugins
    with _loading:
        if _plugins is None:
            _plugins = {}  # what a plugin gets that asks for algorithms while it is loaded
            for point in entry_points(group=ENTRY_POINT_GROUP):
                _plugins |= _load_plugin(point)
        return _plugins


def _load_plugin(point: EntryPoint) -> dict[str, AlgorithmSpec | str]:
    try:
        loaded = point.load()
        specs = list(loaded) if isinstance(loaded, (list, tuple)) else [loaded]
        if odd := [spec for spec in specs if not isinstance(spec, AlgorithmSpec)]:
            raise TypeError(f"it names {odd[0]!r}, which is not an AlgorithmSpec")
        if taken := [spec.name for spec in specs if spec.name in own_specs()]:
            raise ValueError(f"the name {taken[0]!r} is taken by an algorithm of rl-training")
    except (Exception, SystemExit) as error:
        plugin = f"the plugin {point.name} = {point.value} cannot be loaded"
        reason = f"{plugin} ({kind_and_line(error)})"
        warnings.warn(f"{reason} and is left out; fix or uninstall it.", stacklevel=2)
        return {point.name: reason}
    return {spec.name: spec for spec in specs}


def list_algorithm_specs() -> list[AlgorithmSpec]:
    """Every registered algorithm, oldest first; a plugin that cannot be loaded is left out, with a warning."""
    plugins = [spec for spec in _load_plugins().values() if isinstance(spec, AlgorithmSpec)]
    return sorted([*own_specs().values(), *plugins], key=lambda spec: (spec.year, spec.name))


def get_algorithm_spec(name: str) -> AlgorithmSpec:
    """The algorithm with that registry name; plugins are loaded only for a name that is not this package's own."""
    found = own_specs().get(name) or _load_plugins().get(name)
    if isinstance(found, AlgorithmSpec):
        return found
    if found is not None:
        raise UserError(f"algo is {name!r}, but {found}; fix the plugin or choose another algorithm.")
    known = [spec.name for spec in list_algorithm_specs()]
    raise UserError(f"algo {name!r} is not a registered algorithm; {did_you_mean(name, known)}")


def spec_of_class(class_name: str) -> AlgorithmSpec | None:
    """The algorithm whose managed class has that name; plugins are loaded only if it is not this package's own.

    So a plugin can import our names while it is loaded.
    """
    named = (spec for specs in (own_specs().values, list_algorithm_specs) for spec in specs())
    return next((spec for spec in named if spec.class_name == class_name), None)
