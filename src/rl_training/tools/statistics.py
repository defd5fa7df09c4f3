"""Scores of a few runs, compared with their uncertainty (Agarwal et al. 2021, "Deep RL at the edge of the precipice").

A sample is a list of tasks, each an array [..., runs]: the last axis is over runs, whose number may differ
between tasks, and the axes before it are points of a curve. A statistic takes samples and reduces the last axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Sample = Sequence[Array]
Statistic = Callable[..., Any]
REPETITIONS = 2_000
LEVEL = 0.95
MOST_NUMBERS = 1 << 24  # of one round of resamples


class Estimate(NamedTuple):
    """A statistic and its interval, arrays of the statistic's shape; the interval is NaN if no task has two runs."""

    value: Any
    low: Any
    high: Any


def estimate(
    statistic: Statistic, *samples: Sample, repetitions: int = REPETITIONS, level: float = LEVEL, seed: int = 0
) -> Estimate:
    """The statistic of the samples with its stratified bootstrap interval (percentiles).

    A resample draws the runs of each task with replacement; a run of several points is drawn as a whole.
    """
    value = np.asarray(statistic(*samples))
    if any(all(task.shape[-1] < 2 for task in sample) for sample in samples):
        return Estimate(value, *np.full((2, *value.shape), np.nan))
    rng = np.random.default_rng(seed)
    size = max(1, sum(task.size for sample in samples for task in sample))
    rounds = -(-repetitions * size // MOST_NUMBERS)
    parts = [statistic(*_resample(rng, samples, -(-repetitions // rounds))) for _ in range(rounds)]
    ends = np.quantile(np.concatenate(parts, axis=-1), [(1 - level) / 2, (1 + level) / 2], axis=-1)
    return Estimate(value, *ends)


def _resample(rng: np.random.Generator, samples: Sequence[Sample], count: int) -> list[list[Array]]:
    """Every task as [..., count, runs]."""
    return [
        [task[..., rng.integers(task.shape[-1], size=(count, task.shape[-1]))] for task in sample] for sample in samples
    ]


def interquartile_mean(sample: Sample) -> Any:
    """The mean of the middle half of the runs of all tasks; for the points of curves, the sample efficiency."""
    ordered = np.sort(np.concatenate(sample, axis=-1), axis=-1)
    cut = ordered.shape[-1] // 4
    return ordered[..., cut : ordered.shape[-1] - cut].mean(axis=-1)


def probability_of_improvement(sample: Sample, other: Sample) -> Any:
    """Probability that a run of `sample` beats one of `other` on the same task, ties counted half; mean over tasks."""
    tasks = [np.sign(x[..., :, None] - y[..., None, :]).mean(axis=(-2, -1)) for x, y in zip(sample, other, strict=True)]
    return 0.5 + 0.5 * np.mean(tasks, axis=0)


def performance_profile(thresholds: Array) -> Statistic:
    """The statistic [thresholds]: the share of runs, over all tasks, with a score above each threshold."""

    def profile(sample: Sample) -> Any:
        joined = np.concatenate(sample, axis=-1)
        return np.stack([(joined > threshold).mean(axis=-1) for threshold in thresholds])

    return profile


def difference(sample: Sample, other: Sample) -> Any:
    """How much larger the interquartile mean of `sample` is."""
    return interquartile_mean(sample) - interquartile_mean(other)
