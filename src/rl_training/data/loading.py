"""`load_transition_dataset`: one function for every kind of recorded data (npz, Minari, made at random)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from rl_training.data.datasets import TransitionDataset
from rl_training.data.generated import make_random_dataset
from rl_training.data.minari_io import read_minari
from rl_training.errors import UserError, did_you_mean

KINDS = ("random", "npz", "minari")
Packaged = files("rl_training").joinpath("assets/datasets")


def load_transition_dataset(
    kind: str, *, path: str | Path | None = None, dataset_id: str | None = None, env_id: str | None = None,
    size: int | None = None, seed: int = 0, env_kwargs: Mapping[str, Any] | None = None,
    make_env: Callable[[], Any] | None = None, prefix: str = "",
) -> TransitionDataset:  # fmt: skip
    """The data set of the given kind, with actions in the environment's own range.

    `npz` reads `path`, or the packaged set of that name; `minari` reads `dataset_id` from Minari's folder, or from
    `path` if given; `random` acts at random for `size` steps (default 10,000) in `env_id`, or in what `make_env()`
    returns. For the others `size` keeps the first rows. `prefix` precedes `dataset_size` in error messages.
    """
    if size is not None and size < 1:
        raise UserError(f"{prefix}dataset_size is {size}; it must be at least 1.")
    if kind == "random":
        name = env_id or "environment" if make_env else _need(env_id, "env_id", kind)
        return make_random_dataset(name, size or 10_000, seed, env_kwargs, make_env)
    if kind == "npz":
        dataset = TransitionDataset.from_npz(find_npz(_need(path, "dataset_path", kind)))
    elif kind == "minari":
        dataset = read_minari(_need(dataset_id, "dataset_id", kind), path, size=size)
    elif kind == "checkpoint":  # reading it needs its config and spaces, unknown here
        raise UserError(
            "dataset_kind is 'checkpoint', which only a run reads; `rl-training dataset collect --checkpoint P "
            "--from-replay` writes such a replay to an npz file, which can be loaded here."
        )
    else:
        raise UserError(f"unknown dataset_kind {kind!r}: {did_you_mean(kind, KINDS)}")
    if size is not None and size > len(dataset):
        raise UserError(f"{prefix}dataset_size is {size}, but {dataset_id or path} has only {len(dataset)} rows.")
    return dataset if size is None else dataset.take(slice(size))


def find_npz(path: str | Path) -> str | Path:
    """The path of a file, or of the packaged data set where only its name is given and no such file exists."""
    packaged = {} if os.path.isfile(path) else {entry.name: entry for entry in Packaged.iterdir()}
    return Path(str(packaged.get(str(path), path)))


def _need(value: Any, name: str, kind: str) -> Any:
    if value is None:
        raise UserError(f"dataset_kind is {kind!r}, which needs {name}.")
    return value


def export_random_transition_dataset(env_id: str, path: str | Path, num_steps: int, seed: int = 0) -> Path:
    """Act at random in `env_id` for `num_steps` and write the transitions to an npz file; returns its path."""
    return load_transition_dataset("random", env_id=env_id, size=num_steps, seed=seed).save_npz(path)
