"""Statistics over runs agree with rliable 1.2.0's on the score matrices of its own tests (metrics_test, library_test).

The numbers under RLIABLE were printed by two scripts in an environment of its own (`python -m venv V; V/bin/pip install
rliable==1.2.0 'pandas<3'`), with `import numpy as np, rliable.library as rly, rliable.metrics as m`, x, w, a and b as
below, and `z = np.stack([x, 2 * x], axis=-1)`. The first is

    np.random.seed(0)
    rly.get_interval_estimates({"x": x, "w": w, "b": b}, lambda s: np.array([m.aggregate_iqm(s)]), reps=50_000)

and the second, where `iqms` is `lambda s: np.array([m.aggregate_iqm(s[..., i]) for i in range(2)])`,

    np.random.seed(0)
    rly.get_interval_estimates({"wx": [w, x], "ab": [a, b]}, m.probability_of_improvement, reps=2_000)
    rly.create_performance_profile({"x": x, "w": w}, [0, 10, 20, 40, 60, 79], reps=4_000)
    rly.get_interval_estimates({"z": z}, iqms, reps=4_000)

Values agree to the last digits; the ends of intervals as well as two sets of random resamples do. A profile moves in
steps of one run (1/48 for w), and several of its exact percentiles lie at the edge of a step: at 40 the resamples of w
below 0.4375 have a probability of 0.0238, so rliable's draws gave 0.4167 and the exact 2.5 % point is 0.4375. There
ends may be one step apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl_training.tools import compare
from rl_training.tools.compare import (
    Estimate,
    difference,
    estimate,
    interquartile_mean,
    performance_profile,
    probability_of_improvement,
)

x = np.arange(80.0).reshape(5, 16)  # runs x tasks, as rliable has them
w = x[:3] + np.array([[5.0], [20.0], [30.0]])
a, b = np.array([[1, 2], [2, 2], [1, 1], [2, 1]]), np.array([[1, 1], [2, 2], [3, 3]])
RLIABLE: dict[str, tuple[Any, Any, Any]] = {
    "iqm x": (39.5, 32.55, 46.5),
    "iqm w": (42.66666667, 32.08333333, 52.75),
    "iqm b": (2.0, 1.25, 2.75),
    "improvement wx": (0.53333333, 0.42083333, 0.63333333),
    "improvement ab": (0.33333333, 0.08333333, 0.625),
    "profile x": (
        [0.9875, 0.8625, 0.7375, 0.4875, 0.2375, 0],
        [0.9625, 0.7875, 0.6375, 0.3875, 0.15, 0],
        [1, 0.925, 0.825, 0.6, 0.3375, 0],
    ),
    "profile w": (
        [1, 0.875, 0.66666667, 0.5625, 0.33333333, 0],
        [1, 0.79166667, 0.52083333, 0.41666667, 0.20833333, 0],
        [1, 0.95833333, 0.79166667, 0.70833333, 0.47916667, 0],
    ),
    "efficiency z": ([39.5, 79.0], [32.4, 64.55], [46.375, 92.80125]),
}


def tasks(scores: Any) -> list[Any]:
    """A matrix of runs x tasks as a sample."""
    return list(np.asarray(scores, dtype=float).T)


def estimate_named(name: str) -> Estimate:
    kind, which = name.split()
    samples = [tasks({"x": x, "w": w, "a": a, "b": b}[letter]) for letter in which if letter != "z"]
    if kind == "efficiency":
        samples = [[np.stack([runs, 2 * runs]) for runs in tasks(x)]]
    profile = performance_profile(np.array([0.0, 10, 20, 40, 60, 79]))
    statistic = {"improvement": probability_of_improvement, "profile": profile}.get(kind, interquartile_mean)
    return estimate(statistic, *samples, repetitions=20_000)


@pytest.mark.parametrize("name", RLIABLE)
def test_values_and_intervals_are_those_of_rliable(name: str) -> None:
    found, (value, low, high) = estimate_named(name), RLIABLE[name]
    np.testing.assert_allclose(found.value, value, atol=1e-8)
    width = np.asarray(high, dtype=float) - np.asarray(low, dtype=float)
    apart = np.maximum(0.06 * width, 1.001 / w.size if name.startswith("profile") else 0.0)
    assert (np.abs(found.low - low) <= apart).all(), found
    assert (np.abs(found.high - high) <= apart).all(), found


def test_the_interval_is_the_percentiles_of_all_resamples() -> None:
    """Of three runs there are 27 resamples; their means can be listed."""
    scores = np.array([0.0, 3.0, 9.0])
    means = np.array([np.mean([i, j, k]) for i in scores for j in scores for k in scores])
    found = estimate(interquartile_mean, [scores], repetitions=20_000, level=0.8)
    assert (found.low, found.high) == pytest.approx((np.quantile(means, 0.1), np.quantile(means, 0.9)))


def test_the_same_seed_draws_the_same_resamples_and_rounds_only_save_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = [np.random.default_rng(1).normal(size=(4, 7))]
    first, again = (estimate(interquartile_mean, sample, seed=3) for _ in range(2))
    assert all((one == two).all() for one, two in zip(first, again, strict=True))
    assert (estimate(interquartile_mean, sample, seed=4).low != first.low).any()
    monkeypatch.setattr(compare, "MOST_NUMBERS", 1_000)
    small = estimate(interquartile_mean, sample, seed=3)
    np.testing.assert_allclose(small.low, first.low, atol=0.15)


def test_each_task_is_resampled_on_its_own_and_may_have_its_own_number_of_runs() -> None:
    far = [np.array([0.0, 0.0]), np.array([100.0, 100.0, 100.0])]  # strata without spread: nothing is uncertain
    mean = estimate(lambda sample: sum(task.mean(axis=-1) for task in sample), far)
    assert (float(mean.value), float(mean.low), float(mean.high)) == (100.0, 100.0, 100.0)


def test_a_run_is_drawn_as_a_whole() -> None:
    runs = np.array([[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]])  # the second point is the first plus 10
    gap = estimate(lambda sample: sample[0][1].mean(axis=-1) - sample[0][0].mean(axis=-1), [runs])
    assert (gap.low, gap.high) == (10.0, 10.0)


def test_single_runs_have_a_value_but_no_interval() -> None:
    found = estimate(difference, [np.array([3.0])], [np.array([1.0, 2.0])])
    assert float(found.value) == 1.5
    assert np.isnan([found.low, found.high]).all()
