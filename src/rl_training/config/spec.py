"""`AlgorithmSpec`: the registry entry of an algorithm, and how entries are discovered."""

from __future__ import annotations

import importlib
import pkgutil
import re
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import Field, create_model

from rl_training.algorithms.base import Algorithm, Setting
from rl_training.config.params import Params
from rl_training.data.store import Store, StoreContext
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError, did_you_mean, kind_and_line

ENTRY_POINT_GROUP = "rl_training.algorithms"
FAMILIAR = ("ppo", "dqn", "sac")  # named when another algorithm does not fit; PPO supports every kind


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

    def _kinds(self, spaces: EnvSpaces) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
        """The kind of the actions and of the observations, what it is a kind of, and the kinds that are supported."""
        actions = spaces.action_kind, "actions", self.action_kinds
        return actions, (spaces.obs_kind, "observations", self.observation_kinds)

    def check_support(self, spaces: EnvSpaces, *, learns: bool = True) -> None:
        """Raise a UserError if this algorithm does not support the environment, or cannot learn in it."""
        for kind, what, supported in self._kinds(spaces):
            if kind not in supported:
                shown = f"{kind} {what} (images in a Dict or Tuple)" if kind == "mixed" else f"{kind} {what}"
                refused = f"{self.name} does not support the {shown} of {spaces.env_id}"
                others = [(name, own_specs()[name]._kinds(spaces)) for name in FAMILIAR]
                fitting = [name for name, kinds in others if all(one in all_of for one, _, all_of in kinds)]
                raise UserError(f"{refused}; it supports {', '.join(supported)}; these fit: {', '.join(fitting)}.")
        if learns and spaces.normalize_rewards and not self.normalizes_rewards:
            raise UserError(
                f"{self.name} does not normalize rewards; take normalize_reward out of env_kwargs.wrappers."
            )

    def derive(self, learner: type[Algorithm], **entry: Any) -> AlgorithmSpec:
        """The entry of another learner, usually a subclass of this one's; `entry` are fields that differ.

        Its names come from the class, and the numbers that it declares become hyper-parameters.
        """
        build = self.build
        if not (isinstance(build, partial) and self.learner in build.args):
            raise UserError(f"no learner derives from {self.name}, which builds more than one; register a spec of it.")
        arguments = (learner if part is self.learner else part for part in build.args)
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", learner.__name__).lower()
        own: dict[str, Any] = {
            "name": name, "class_name": learner.__name__, "paper": f"none: a variant of {self.class_name}",
            "scope": (learner.__doc__ or self.scope).strip().splitlines()[0], "learner": learner,
            "build": partial(build.func, *arguments, **build.keywords), "params": _add_numbers(self.params, learner),
        }  # fmt: skip
        return replace(self, **own | entry)


def _add_numbers(params: type[Params], learner: type[Algorithm]) -> type[Params]:
    """The parameters, with a field for each number that the learner's own class declares."""
    limits: dict[str, Any] = {
        ">= 0": {"ge": 0}, "> 0": {"gt": 0}, ">= 1": {"ge": 1}, "in [0, 1]": {"ge": 0, "le": 1},
        "in (0, 1]": {"gt": 0, "le": 1}, "in (0, 1)": {"gt": 0, "lt": 1},
        "in [0, 1)": {"ge": 0, "lt": 1},
    }  # fmt: skip
    fields: dict[str, Any] = {}
    for name, one in vars(learner).items():
        if isinstance(one, Setting) and isinstance(one.default, bool | int | float):
            kind = params.model_fields[name].annotation if name in params.model_fields else type(one.default)
            told = {"description": f"{name} of {learner.__name__}.", **limits.get(one.bound, {})}
            fields[name] = kind, Field(one.default, **told)
    made: type[Params] = create_model(f"{learner.__name__}Params", __base__=params, **fields)
    return made


@cache
def own_specs() -> dict[str, AlgorithmSpec]:
    """The algorithms of this package by name."""
    package = importlib.import_module("rl_training.runtime")  # by name: it is above this module

    modules = sorted(found.name for found in pkgutil.iter_modules(package.__path__) if found.name.endswith("_trainer"))
    specs = [spec for name in modules for spec in importlib.import_module(f"{package.__name__}.{name}").SPECS]
    return {spec.name: spec for spec in specs}


_registered: dict[str, AlgorithmSpec] = {}  # by `register_algorithm`, by name
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


def register_algorithm(spec: AlgorithmSpec | type[Algorithm], *, like: str | None = None) -> AlgorithmSpec:
    """Add an algorithm to this process's registry, or replace the one registered before under that name.

    A learner's class gets the entry that it derives from that of the algorithm `like`.
    """
    if isinstance(spec, type):
        if like is None:
            raise UserError(f'{spec.__name__} is a class; register({spec.__name__}, like="ppo") says what it is like.')
        spec = get_algorithm_spec(like).derive(spec)
    others = [*own_specs().values(), *(one for one in _load_plugins().values() if isinstance(one, AlgorithmSpec))]
    for own, taken in ((spec.name, "name"), (spec.class_name, "class_name")):
        if own in {getattr(other, taken) for other in others}:
            raise UserError(f"the {taken} {own!r} is taken by another algorithm; choose another one.")
    _registered[spec.name] = spec
    return spec


def list_algorithm_specs() -> list[AlgorithmSpec]:
    """Every registered algorithm, oldest first; a plugin that cannot be loaded is left out, with a warning."""
    plugins = [spec for spec in _load_plugins().values() if isinstance(spec, AlgorithmSpec)]
    return sorted([*own_specs().values(), *plugins, *_registered.values()], key=lambda spec: (spec.year, spec.name))


def get_algorithm_spec(name: str) -> AlgorithmSpec:
    """The algorithm with that registry name; plugins are loaded only for a name that is not this package's own."""
    found = own_specs().get(name) or _registered.get(name) or _load_plugins().get(name)
    if isinstance(found, AlgorithmSpec):
        return found
    if found is not None:
        raise UserError(f"algo is {name!r}, but {found}; fix the plugin or choose another algorithm.")
    hint = did_you_mean(name, [spec.name for spec in list_algorithm_specs()])
    if hint.startswith("known"):
        hint = f"{hint[:-1]}; one of your own needs --import MODULE, of the module that registers it."
    raise UserError(f"algo {name!r} is not a registered algorithm; {hint}")


def spec_of_class(class_name: str) -> AlgorithmSpec | None:
    """The algorithm whose managed class has that name; plugins are loaded only if it is not this package's own.

    So a plugin can import our names while it is loaded.
    """
    named = (spec for specs in (own_specs().values, list_algorithm_specs) for spec in specs())
    return next((spec for spec in named if spec.class_name == class_name), None)
