"""`check_dataset`: what a data set holds and what is wrong with it, as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rl_training.data.memory import Array

if TYPE_CHECKING:
    from rl_training.data.datasets import TransitionDataset

_BINS = 10


def check_dataset(
    dataset: TransitionDataset, *, observation_space: Any = None, action_space: Any = None
) -> dict[str, Any]:
    """Counts, returns, ranges, coverage, and `problems`: one sentence for each (an empty list means none).

    The spaces are Gymnasium's, those of the environment that the data set should fit.
    """
    returns, lengths = dataset.episode_returns, dataset.episode_lengths
    return {
        "transitions": len(dataset),
        "episodes": len(returns),
        "terminated": int(dataset.terminated.sum()),
        "truncated": int((dataset.truncated & ~dataset.terminated).sum()),
        "last_episode_is_open": dataset.last_episode_is_open,
        "episode_return": _summary(returns),
        "episode_length": _summary(lengths),
        "reward": _summary(dataset.rewards),
        "obs": {"shape": list(dataset.obs.shape[1:]), "dtype": str(dataset.obs.dtype), **_ranges(dataset.obs)},
        "actions": {
            "shape": list(dataset.actions.shape[1:]), "dtype": str(dataset.actions.dtype), **_ranges(dataset.actions)
        },
        "coverage": _coverage(dataset.actions, action_space),
        "not_finite": {name: count for name, count in _not_finite(dataset).items() if count},
        "breaks": _count_breaks(dataset),
        "has_behavior_logprobs": dataset.behavior_logprobs is not None,
        "sha256": dataset.sha256,
        "metadata": dict(dataset.metadata),
        "problems": _problems(dataset, observation_space, action_space),
    }  # fmt: skip


def _summary(values: Array) -> dict[str, float]:
    return {name: float(getattr(np, name)(values)) for name in ("min", "mean", "max", "std")}


def _ranges(array: Array) -> dict[str, Any]:
    """Per-dimension ranges of short vectors, one overall range of everything else."""
    axis = 0 if array.ndim == 2 and array.shape[1] <= 64 else None
    return {"min": np.min(array, axis=axis).tolist(), "max": np.max(array, axis=axis).tolist()}


def _coverage(actions: Array, space: Any) -> dict[str, Any]:
    """How often each whole-number action occurs, or the share of ten equal bins that each dimension visits."""
    if actions.dtype.kind in "biu":
        values, counts = np.unique(actions.reshape(-1) if actions.ndim == 1 else actions, axis=0, return_counts=True)
        if len(values) > 256:
            return {"distinct_actions": len(values)}
        return {"action_counts": [[value.tolist(), int(count)] for value, count in zip(values, counts, strict=True)]}
    flat = actions.reshape(len(actions), -1)
    low, high = _bounds(space, flat)
    bins = np.clip((flat - low) / np.where(high > low, high - low, 1.0) * _BINS, 0, _BINS - 1).astype(np.int64)
    return {"visited_bins": [len(np.unique(column)) / _BINS for column in bins.T]}


def _bounds(space: Any, flat: Array) -> tuple[Array, Array]:
    low = getattr(space, "low", None)
    if low is not None and np.size(low) == flat.shape[1] and np.isfinite(low).all() and np.isfinite(space.high).all():
        return np.ravel(low), np.ravel(space.high)
    return flat.min(axis=0), flat.max(axis=0)


def _not_finite(dataset: TransitionDataset) -> dict[str, int]:
    return {
        name: int(np.count_nonzero(~np.isfinite(array)))
        for name, array in dataset.arrays().items() if array.dtype.kind == "f"
    }  # fmt: skip


def _count_breaks(dataset: TransitionDataset) -> int:
    """Rows whose successor is not the next row's observation although no end is marked there."""
    going = np.flatnonzero(~(dataset.terminated | dataset.truncated)[:-1])
    if not len(going):
        return 0
    return int((dataset.next_obs[going] != dataset.obs[going + 1]).reshape(len(going), -1).any(axis=1).sum())


def _problems(dataset: TransitionDataset, observation_space: Any, action_space: Any) -> list[str]:
    not_finite = _not_finite(dataset)
    problems = [f"{name} holds {count} values that are NaN or infinite." for name, count in not_finite.items() if count]
    both = int((dataset.terminated & dataset.truncated).sum())
    if both:
        problems.append(f"{both} rows are marked terminated and truncated at once; terminated wins.")
    if breaks := _count_breaks(dataset):
        problems.append(
            f"{breaks} rows are followed by another observation than their next_obs without an end being marked "
            "(shuffled rows, or truncations that were not recorded)."
        )
    problems += _space_problems("obs", dataset.obs, observation_space)
    problems += _space_problems("actions", dataset.actions, action_space)
    return problems


def _space_problems(name: str, array: Array, space: Any) -> list[str]:
    """Shape, kind and bounds of rows against a Gymnasium space; spaces without one shape are not compared."""
    if space is None or space.shape is None:
        return []
    shape, wanted = tuple(array.shape[1:]), tuple(space.shape)
    if int(np.prod(shape)) != int(np.prod(wanted)):
        return [f"{name} has rows of shape {shape}, but the environment's space is {space}."]
    if np.issubdtype(space.dtype, np.floating) and array.dtype.kind in "biu" and name == "actions":
        return [f"{name} are {array.dtype}, but the environment's space {space} wants real numbers, not choices."]
    low, high = _limits(space)
    if low is None or high is None:
        return []
    if np.issubdtype(space.dtype, np.integer) and array.dtype.kind == "f" and name == "actions":
        return [f"{name} are {array.dtype}, but the environment's space {space} wants whole numbers."]
    flat = array.reshape(len(array), -1)
    outside = int(((flat < np.ravel(low)) | (flat > np.ravel(high))).any(axis=1).sum())
    return [f"{outside} rows of {name} lie outside the environment's space {space}."] if outside else []


def _limits(space: Any) -> tuple[Any, Any]:
    if hasattr(space, "low"):
        return space.low, space.high
    if hasattr(space, "nvec"):
        return space.start, space.start + space.nvec - 1
    return (space.start, space.start + space.n - 1) if hasattr(space, "start") else (None, None)
