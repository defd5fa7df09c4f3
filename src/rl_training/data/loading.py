"""`load_transition_dataset`: one function for every kind of recorded data (npz, Minari, made at random)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.data.datasets import REQUIRED, TransitionDataset
from rl_training.data.minari_io import open_env, read_minari
from rl_training.errors import UserError, did_you_mean
from rl_training.play import closed_after, play

# What each kind needs. Reading a checkpoint takes its config and spaces, which are unknown here.
NEEDED = {"random": "env_id", "npz": "dataset_path", "minari": "dataset_id"}
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
    if kind == "checkpoint":
        raise UserError(
            "dataset_kind is 'checkpoint', which only a run reads; `rl-training dataset collect --checkpoint P "
            "--from-replay` writes such a replay to an npz file, which can be loaded here."
        )
    if kind not in NEEDED:
        raise UserError(f"unknown dataset_kind {kind!r}: {did_you_mean(kind, NEEDED)}")
    given: Any = {"random": env_id or (make_env and "environment"), "npz": path, "minari": dataset_id}[kind]
    if given is None:
        raise UserError(f"dataset_kind is {kind!r}, which needs {NEEDED[kind]}.")
    if kind == "random":
        return make_random_dataset(given, size or 10_000, seed, make_env or (lambda: open_env(given, env_kwargs)))
    dataset = TransitionDataset.from_npz(find_npz(given)) if kind == "npz" else read_minari(given, path, size=size)
    if size is not None and size > len(dataset):
        raise UserError(f"{prefix}dataset_size is {size}, but {given} has only {len(dataset)} rows.")
    return dataset if size is None else dataset.take(slice(size))


def find_npz(path: str | Path) -> str | Path:
    """The path of a file, or of the packaged data set where only its name is given and no such file exists."""
    packaged = {} if os.path.isfile(path) else {entry.name: entry for entry in Packaged.iterdir()}
    return Path(str(packaged.get(str(path), path)))


def export_random_transition_dataset(env_id: str, path: str | Path, num_steps: int, seed: int = 0) -> Path:
    """Act at random in `env_id` for `num_steps` and write the transitions to an npz file; returns its path."""
    return load_transition_dataset("random", env_id=env_id, size=num_steps, seed=seed).save_npz(path)


def make_random_dataset(env_id: str, num_steps: int, seed: int, make_env: Callable[[], Any]) -> TransitionDataset:
    """`num_steps` of uniformly random legal actions; the same seed makes the same data."""
    env = make_env()
    with closed_after([env], env_id):
        env.action_space.seed(seed)
        steps = play(
            [env], lambda _, infos, __: [_random_action(env.action_space, infos[0], env_id)],
            lambda episode: None if episode else seed, env_id,
        )  # fmt: skip
        rows = [
            (_encode(env, obs), np.array(action), reward, _encode(env, next_obs), terminated, truncated)
            for obs, action, reward, next_obs, terminated, truncated, *_ in islice(steps, num_steps)
        ]
    arrays = {name: np.stack(column) for name, column in zip(REQUIRED, zip(*rows, strict=True), strict=True)}
    return TransitionDataset.from_arrays(arrays, env_id, env_id=env_id, policy="random", seed=seed)


def _random_action(space: Any, info: Any, env_id: str) -> Any:
    """An action drawn uniformly from those that the mask allows; the mask has any dtype, whole or in parts."""
    from gymnasium import spaces

    mask = info.get("action_mask") if isinstance(info, Mapping) else None
    if mask is None or isinstance(space, spaces.Box):
        return space.sample()
    is_binary = isinstance(space, spaces.MultiBinary)
    sizes = np.full(space.shape, 2) if is_binary else getattr(space, "nvec", getattr(space, "n", None))
    flat = np.concatenate([np.ravel(part) for part in mask]) if isinstance(mask, list | tuple) else np.ravel(mask)
    if flat.size != np.sum(sizes):
        raise UserError(f"info['action_mask'] of {env_id} has {flat.size} entries; {space} needs {np.sum(sizes)}.")
    legal = [np.flatnonzero(part) for part in np.split(flat, np.cumsum(sizes)[:-1])]
    if not all(part.size for part in legal):
        raise UserError(f"info['action_mask'] of {env_id} forbids every action; one at least must be legal.")
    drawn = np.array([space.np_random.choice(part) for part in legal])  # as Gymnasium draws from an int8 mask
    return (drawn.reshape(space.shape) + getattr(space, "start", 0)).astype(space.dtype)


def _encode(env: Any, obs: Any) -> Any:
    """A copy of a Box observation, any other as Gymnasium flattens it."""
    from gymnasium import spaces

    space = env.observation_space
    return np.array(obs if isinstance(space, spaces.Box) else spaces.flatten(space, obs))
