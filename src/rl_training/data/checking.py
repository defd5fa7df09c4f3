"""`check_dataset`: the contents and the problems of a data set, as plain data."""

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

    The spaces are those of the Gymnasium environment that the data set should fit.
    """
    returns, lengths = dataset.episode_returns, dataset.episode_lengths
    bad = {name: int(np.count_nonzero(~np.isfinite(array))) for name, array in dataset.arrays().items()}
    not_finite = {name: count for name, count in bad.items() if count}
    breaks, both = _count_breaks(dataset), int((dataset.terminated & dataset.truncated).sum())
    problems = [f"{name} holds {count} values that are NaN or infinite." for name, count in not_finite.items()]
    if both:
        problems.append(f"{both} rows are marked terminated and truncated at once; terminated wins.")
    if breaks:
        problems.append(
            f"{breaks} rows are followed by another observation than their next_obs without an end being marked "
            "(shuffled rows, or truncations that were not recorded)."
        )
    problems += _space_problems("obs", dataset.obs, observation_space)
    problems += _space_problems("actions", dataset.actions, action_space)
    return {
        "transitions": len(dataset),
        "episodes": len(returns),
        "terminated": int(dataset.terminated.sum()),
        "truncated": int((dataset.truncated & ~dataset.terminated).sum()),
        "last_episode_is_open": dataset.last_episode_is_open,
        "episode_return": _summary(returns),
        "episode_length": _summary(lengths),
        "reward": _summary(dataset.rewards),
        "obs": _describe(dataset.obs),
        "actions": _describe(dataset.actions),
        "coverage": _coverage(dataset.actions, action_space),
        "not_finite": not_finite,
        "breaks": breaks,
        "has_behavior_logprobs": dataset.behavior_logprobs is not None,
        "sha256": dataset.sha256,
        "metadata": dict(dataset.metadata),
        "problems": problems,
    }


def _summary(values: Array) -> dict[str, float]:
    return {name: float(getattr(np, name)(values)) for name in ("min", "mean", "max", "std")}


def _describe(array: Array) -> dict[str, Any]:
    """Kind and range: one per dimension for short vectors, one overall for everything else."""
    axis = 0 if array.ndim == 2 and array.shape[1] <= 64 else None
    ranges = {"min": np.min(array, axis=axis).tolist(), "max": np.max(array, axis=axis).tolist()}
    return {"shape": list(array.shape[1:]), "dtype": str(array.dtype), **ranges}


def _coverage(actions: Array, space: Any) -> dict[str, Any]:
    """How often each whole-number action occurs, or the share of ten equal bins that each dimension visits."""
    if actions.dtype.kind in "biu":
        values, counts = np.unique(actions, axis=0, return_counts=True)
        if len(values) > 256:
            return {"distinct_actions": len(values)}
        return {"action_counts": [[value.tolist(), int(count)] for value, count in zip(values, counts, strict=True)]}
    flat = actions.reshape(len(actions), -1)
    low, high = (np.ravel(limit) for limit in (getattr(space, "low", ()), getattr(space, "high", ())))
    if len(low) != flat.shape[1] or not np.isfinite([low, high]).all():
        low, high = flat.min(axis=0), flat.max(axis=0)
    bins = np.clip((flat - low) / np.where(high > low, high - low, 1.0) * _BINS, 0, _BINS - 1).astype(np.int64)
    return {"visited_bins": [len(np.unique(column)) / _BINS for column in bins.T]}


def _count_breaks(dataset: TransitionDataset) -> int:
    """Rows whose successor is not the next row's observation although no end is marked there."""
    going = np.flatnonzero(~(dataset.terminated | dataset.truncated)[:-1])
    differs = dataset.next_obs[going] != dataset.obs[going + 1]
    return int(differs.any(axis=tuple(range(1, differs.ndim))).sum())


def _space_problems(name: str, array: Array, space: Any) -> list[str]:
    """Shape, kind and bounds of rows against a Gymnasium space; spaces without one shape are not compared."""
    if space is None or space.shape is None:
        return []
    shape, wanted = tuple(array.shape[1:]), tuple(space.shape)
    if int(np.prod(shape)) != int(np.prod(wanted)):
        return [f"{name} has rows of shape {shape}, but the environment's space is {space}."]
    if np.issubdtype(space.dtype, np.floating) and array.dtype.kind in "biu" and name == "actions":
        return [f"{name} are {array.dtype}, but the environment's space {space} wants real numbers, not choices."]
    if hasattr(space, "low"):
        low, high = space.low, space.high
    elif hasattr(space, "start"):
        low, high = space.start, space.start + getattr(space, "nvec", getattr(space, "n", None)) - 1
    else:
        return []
    if np.issubdtype(space.dtype, np.integer) and array.dtype.kind == "f" and name == "actions":
        return [f"{name} are {array.dtype}, but the environment's space {space} wants whole numbers."]
    flat = array.reshape(len(array), -1)
    outside = int(((flat < np.ravel(low)) | (flat > np.ravel(high))).any(axis=1).sum())
    return [f"{outside} rows of {name} lie outside the environment's space {space}."] if outside else []
