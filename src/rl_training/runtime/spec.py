"""`AlgorithmSpec`: the registry entry of an algorithm, and how entries are discovered."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol

import numpy as np

from rl_training.algorithms.base import Algorithm, Batch, UpdateResult
from rl_training.collect.local import Request
from rl_training.data.experience import Experience, ExperienceLayout
from rl_training.envs.recipe import EnvRecipe
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError, did_you_mean
from rl_training.runtime.params import Params

ENTRY_POINT_GROUP = "rl_training.algorithms"


class Store(Protocol):
    """Keeps experience and turns it into batches."""

    layout: ExperienceLayout  # of the experience that it accepts
    metrics: dict[str, float]  # for the log

    def describe(self) -> str:
        """One line about what it keeps in memory, printed when a run starts; further lines are `warning: ...`."""

    def request(self, step: int) -> Request:
        """The experience needed for the turn that begins at `step`."""

    def add(self, experience: Experience, step: int) -> int:
        """Keep the experience collected from `step` on; return the number of real transitions in it."""

    def batches(self, algorithm: Algorithm, step: int) -> Iterator[tuple[str, Batch]]:
        """The batches for the updates that are due now, each with its phase."""

    def feedback(self, batch: Batch, result: UpdateResult) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restore a saved state; return one sentence for each thing that could not be restored exactly."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class StoreContext:
    """The arguments of a store."""

    params: Any
    spaces: EnvSpaces
    num_envs: int
    seed: int
    device: str
    recipe: EnvRecipe
    rng: np.random.Generator  # shared with acting in one process
    holds_resets: bool = False  # whether the engine resets in the step after an end

    def layout(self, max_steps: int, *, masks: bool = True, logprobs: bool = False) -> ExperienceLayout:
        """The layout of experience from these environments."""
        spaces = self.spaces
        return ExperienceLayout(
            max_steps, self.num_envs, tuple(spaces.obs_shape), spaces.obs_dtype, tuple(spaces.action_shape),
            continuous=spaces.action_kind == "continuous",
            mask_size=spaces.action_dim if masks and spaces.has_action_mask else 0,
            holds_resets=self.holds_resets, logprobs=logprobs,
        )  # fmt: skip


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
def _discover() -> dict[str, AlgorithmSpec]:
    import rl_training.runtime as package

    specs: list[AlgorithmSpec] = []
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda found: found.name):
        if module.name.endswith("_trainer"):
            specs += importlib.import_module(f"{package.__name__}.{module.name}").SPECS
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            loaded = point.load()
        except Exception as error:
            plugin, reason = f"{point.name} = {point.value}", f"{type(error).__name__}: {error}"
            raise UserError(f"the plugin {plugin} cannot be loaded ({reason}); fix or uninstall it.") from error
        specs += loaded if isinstance(loaded, (list, tuple)) else [loaded]
    return {spec.name: spec for spec in sorted(specs, key=lambda spec: (spec.year, spec.name))}


def list_algorithm_specs() -> list[AlgorithmSpec]:
    """Every registered algorithm, oldest first."""
    return list(_discover().values())


def get_algorithm_spec(name: str) -> AlgorithmSpec:
    """The algorithm with that registry name."""
    specs = _discover()
    if name not in specs:
        raise UserError(f"algo {name!r} is not a registered algorithm; {did_you_mean(name, specs)}")
    return specs[name]
