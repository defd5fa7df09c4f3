"""Hints with the full path of a config key, for a key that is in the wrong place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rl_training.config.params import SCHEDULE, parameter_names
from rl_training.config.spec import get_algorithm_spec
from rl_training.config.train_config import TrainConfig
from rl_training.envs.wrappers import AtariOptions, PixelOptions, WrapperOptions
from rl_training.errors import ALSO_CALLED, UnknownKey, UserError, did_you_mean, near_name
from rl_training.stable_baselines3 import translate

ENVIRONMENT = {
    "env_kwargs": ("max_episode_steps", "wrappers"),
    "env_kwargs.wrappers": tuple(WrapperOptions.model_fields),
    "env_kwargs.wrappers.pixels": tuple(PixelOptions.model_fields),
    "env_kwargs.wrappers.atari": tuple(AtariOptions.model_fields),
}


def hyper_parameters(algo: Any) -> list[str]:
    """Names that `algo_kwargs` may hold for that algorithm, schedules included."""
    return parameter_names(get_algorithm_spec(str(algo)).params)


def full_path(name: str, algo: Any = None) -> str | None:
    """The full path of the key with that name or the most similar one; None if no key is similar."""
    levels: dict[str, Any] = {"": tuple(TrainConfig.model_fields)}
    try:
        levels["algo_kwargs"] = hyper_parameters(algo)
    except UserError:  # there is no such algorithm
        levels["algo_kwargs"] = ("learning_rate",)
    levels |= ENVIRONMENT
    paths: dict[str, str] = {}
    for level, names in levels.items():
        for known in names:
            paths.setdefault(known, f"{level}.{known}".lstrip("."))
    return paths.get(near_name(name, paths, likeness=0.8) or "")


def nearest_setting(name: str, algo: str) -> str:
    """The end of a sentence about an unknown setting: the most similar name, its full path, or where to find all."""
    known = [*hyper_parameters(algo), *TrainConfig.model_fields]
    if (ours := translate(name, known)) is not None:
        return ours
    if (number := name.removesuffix(SCHEDULE)) != name and number in known:
        return f"{number} cannot be scheduled."
    found = (full_path(name, algo) or name).removeprefix("algo_kwargs.")
    nearest = did_you_mean(found, [*known, *([found] if "." in found else [])])
    if nearest.startswith("known:"):  # a list of sixty names does not help
        return f"rl-training config --schema --algo {algo} shows them all."
    return nearest


@contextmanager
def keys_located() -> Iterator[None]:
    """Add a hint to every unknown-key error that is raised inside."""
    try:
        yield
    except UnknownKey as error:
        raise with_full_path(error) from None


def with_full_path(error: UnknownKey) -> UnknownKey:
    """The error with the full path of the key, unless it already suggests a similar key of its own level."""
    name = error.field.rpartition(".")[2]
    found = full_path(name, error.data.get("algo"))
    elsewhere = found is not None and (found.rpartition(".")[2] == ALSO_CALLED.get(name, name) or not error.is_near)
    return UnknownKey(error.where, error.field, did_you_mean(found, [found])) if found and elsewhere else error
