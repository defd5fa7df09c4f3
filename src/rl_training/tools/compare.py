"""Group runs by the settings that differ, and compare the groups by their scores and the uncertainty of these.

The statistics are those of Agarwal et al. 2021, "Deep RL at the edge of the precipice". A sample is a list of tasks,
each an array [..., runs]: the last axis is over runs, whose number may differ between tasks, and the axes before it are
points of a curve. A statistic takes samples and reduces the last axis.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from rl_training.errors import UserError, counted, did_you_mean
from rl_training.record.metrics_file import is_number
from rl_training.tools.records import (
    EVALUATED,
    Array,
    Groups,
    RunRecord,
    Series,
    choose_curve,
    choose_measure,
    find_runs,
    select_runs,
)

Sample = Sequence[Array]
Statistic = Callable[..., Any]
REPETITIONS = 2_000
LEVEL = 0.95
MOST_NUMBERS = 1 << 24  # of one round of resamples
NEVER_COMPARED = (
    "seed", "output_dir", "name", "tags", "benchmark", "threads", "device", "accelerate", "ray", "worker_timeout",
    "log_interval", "loggers", "checkpoint_interval", "checkpoint_keep", "replay_in_checkpoint", "replay_folder",
    "replay_memory", "max_worker_restarts",
)  # fmt: skip
POINTS = 60  # of a curve
FEW_RUNS = 5  # with fewer, a bootstrap interval is too narrow
References = Mapping[str, tuple[float, float]]  # environment -> the returns that count as 0 and 1


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


def read_groups(folders: Iterable[str], by: str | None = None) -> Groups:
    """The runs in these folders, grouped."""
    return group_runs(find_runs(folders), by)


def differing(runs: Sequence[RunRecord]) -> list[str]:
    """Names of settings that are not the same in all runs."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in NEVER_COMPARED)
    return [name for name in names if len({repr(run.settings.get(name)) for run in runs}) > 1]


def group_runs(runs: Sequence[RunRecord], by: str | None = None) -> Groups:
    """Group runs by the settings in `by`, or else by algorithm; runs of one algorithm by the settings that differ.

    Runs of tables, whose settings are not known, are grouped by algorithm.
    """
    names = choose_names([run for run in runs if not run.measured_on] or runs, by)
    groups: Groups = {}
    for run in runs:
        shown = [(name, describe_value(run.settings.get(name))) for name in names if not run.measured_on]
        label = ", ".join(value if name == "algo" else f"{name}={value}" for name, value in shown) or run.algo
        groups.setdefault(label, []).append(run)
    return dict(sorted(groups.items()))


def choose_names(runs: Sequence[RunRecord], by: str | None) -> list[str]:
    """The settings by which runs are grouped."""
    if by is None:
        several = len({run.algo for run in runs}) > 1
        return ["algo"] if several else [name for name in differing(runs) if name != "env_id"]
    names = [name.strip().removeprefix("algo_kwargs.") for name in by.split(",")]
    known = {name for run in runs for name in run.settings}
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--by {unknown[0]}: no run has that setting; {did_you_mean(unknown[0], known)}")
    return names


def describe_value(value: Any) -> str:
    """A setting as one line of YAML."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {describe_value(part)}" for key, part in value.items())
    return value if isinstance(value, str) else f"{value:g}" if is_number(value) else json.dumps(value, default=str)


def check_environments(groups: Groups, references: References) -> list[str]:
    """The environments of the runs; several are an error unless each has references and every group has runs on all."""
    envs = list(dict.fromkeys(run.env_id for runs in groups.values() for run in runs))
    if unknown := [name for name in references if name not in envs]:
        raise UserError(f"--reference {unknown[0]}: no run is on that environment; {did_you_mean(unknown[0], envs)}")
    bare = [env for env in envs if env not in references]
    if bare and (len(envs) > 1 or references):
        what = f"the runs are on {' and '.join(envs[:3])}, whose returns are not of one scale"
        raise UserError(f"{what}; give --reference {bare[0]}=LOW,HIGH and so on, or no --reference.")
    for name, runs in groups.items():
        if missing := [env for env in envs if env not in {run.env_id for run in runs}]:
            raise UserError(f"{name} has no run on {missing[0]}; every group needs runs on the same environments.")
    return envs


def by_task(groups: Groups) -> list[Groups]:
    """The groups on each environment."""
    envs = dict.fromkeys(run.env_id for runs in groups.values() for run in runs)
    found = [{name: [run for run in runs if run.env_id == env] for name, runs in groups.items()} for env in envs]
    return [{name: runs for name, runs in task.items() if runs} for task in found]


class GroupScores(NamedTuple):
    """The scores of one group of runs."""

    name: str
    runs: int
    iqm: Estimate  # of the final returns
    final: float  # a mean over runs, like `best` and `area`
    best: float
    area: float | None  # mean return over the steps that all runs have
    to_threshold: Sequence[float]  # steps of each run that reached the threshold
    curve: Estimate | None  # interquartile mean over those steps
    profile: Estimate


class PairScores(NamedTuple):
    """One group against another: the difference of interquartile means, and the probability of improvement."""

    name: str
    other: str
    difference: Estimate
    improvement: Estimate
    runs: int  # on one environment, of the group that has fewer

    @property
    def verdict(self) -> str:
        """The conclusion from the interval of the difference, and its weakness if there are few runs."""
        low, high = float(self.difference.low), float(self.difference.high)
        if math.isnan(low):
            return "too few runs to tell"
        if low <= 0 <= high:
            return "no difference shown"
        few = f" ({counted(self.runs, 'run')} only)" if self.runs < FEW_RUNS else ""
        return f"{self.name if low > 0 else self.other} is better{few}"


def compare_pair(name: str, other: str, finals: Sequence[Array], others: Sequence[Array]) -> PairScores:
    """Compare the final returns of two groups, an array per environment."""
    runs = min(map(len, [*finals, *others]))
    improvement = estimate(probability_of_improvement, finals, others)
    return PairScores(name, other, estimate(difference, finals, others), improvement, runs)


class Comparison(NamedTuple):
    """Groups of runs compared, the best first."""

    envs: list[str]
    groups: list[GroupScores]
    pairs: list[PairScores]
    scored_by: str
    curve_of: str  # nothing where there are no curves
    steps: Array | None  # that all runs have; shares of them where environments differ
    thresholds: Array  # of the performance profile
    notes: list[str]  # runs that were left out, and doubts


def compare_groups(
    groups: Groups, references: References | None = None, threshold: float | None = None, *,
    shared_steps: bool = False, trained: bool = False,
) -> Comparison:  # fmt: skip
    """Compare groups of runs by their final returns, normalized where references are given.

    Unfinished runs are left out, or with `shared_steps` all runs are cut at the step that all reached.
    """
    references = references or {}
    groups, left_out = select_runs(groups, shared_steps=shared_steps)
    groups, scored_by, measured = choose_measure(groups, trained=trained)
    envs = check_environments(groups, references)
    if references:
        groups = {name: [run.scaled(*references[run.env_id]) for run in group] for name, group in groups.items()}
    runs = [run for group in groups.values() for run in group]
    curve_of, drawn_by = choose_curve(runs, trained=trained)
    shared = steps_by_environment(runs, envs, curve_of)
    finals = {name: final_values(group, envs, scored_by) for name, group in groups.items()}
    everything = np.concatenate([task for tasks in finals.values() for task in tasks])
    thresholds = np.linspace(everything.min(), everything.max(), POINTS)

    def score(name: str, group: list[RunRecord]) -> GroupScores:
        final, curve, area = finals[name], None, None
        if shared:
            tasks = zip(shared, by_environment(group, envs), strict=True)
            drawn = [curves_at(steps, task, curve_of) for steps, task in tasks]
            curve, area = estimate(interquartile_mean, drawn), float(np.concatenate(drawn, axis=-1).mean())
        return GroupScores(
            name, len(group), estimate(interquartile_mean, final), float(np.concatenate(final).mean()),
            float(np.mean([run.curve(scored_by)[1].max() for run in group])), area,
            steps_to(threshold, group, curve_of or scored_by), curve, estimate(performance_profile(thresholds), final),
        )  # fmt: skip

    scores = sorted((score(*group) for group in groups.items()), key=lambda group: -float(group.iqm.value))
    pairs = [compare_pair(x, y, finals[x], finals[y]) for x, y in choose_pairs(groups, [s.name for s in scores])]
    steps = np.linspace(0, 1, POINTS) if len(shared) > 1 else shared[0] if shared else None
    notes = [*left_out, *measured, *drawn_by, *doubts(groups)]
    return Comparison(envs, scores, pairs, scored_by, curve_of if shared else "", steps, thresholds, notes)


def choose_pairs(groups: Groups, names: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs to compare: of published groups with each other only if there is no other."""
    published = {name for name, group in groups.items() if group[0].measured_on}
    return [pair for pair in combinations(names, 2) if not set(pair) <= published or len(published) == len(groups)]


def by_environment(runs: Sequence[RunRecord], envs: Sequence[str]) -> list[list[RunRecord]]:
    """The runs on each environment."""
    return [[run for run in runs if run.env_id == env] for env in envs]


def final_values(runs: Sequence[RunRecord], envs: Sequence[str], metric: str) -> list[Array]:
    """The last value of a metric of each run, an array per environment."""
    return [np.array([run.curve(metric)[1][-1] for run in task]) for task in by_environment(runs, envs)]


def steps_by_environment(runs: Sequence[RunRecord], envs: Sequence[str], metric: str) -> list[Array]:
    """The steps that all runs share, per environment; none unless there are such steps on each."""
    found = [steps for task in by_environment(runs, envs) if (steps := steps_of_all(task, metric)) is not None]
    return found if len(found) == len(envs) else []


def steps_of_all(runs: Sequence[RunRecord], metric: str) -> Array | None:
    """Steps spread over the range in which all runs have this metric; None if there is no such range."""
    all_steps = [run.curve(metric)[0] for run in runs]
    if not all(map(len, all_steps)):
        return None
    first, last = max(steps[0] for steps in all_steps), min(steps[-1] for steps in all_steps)
    return np.linspace(first, last, POINTS) if first < last else None


def curves_at(steps: Array, runs: Sequence[RunRecord], metric: str) -> Array:
    """A metric of each run at these steps, [step, run]."""
    return np.stack([np.interp(steps, *run.curve(metric)) for run in runs], axis=-1)


def steps_to(threshold: float | None, runs: Sequence[RunRecord], metric: str) -> list[float]:
    """The first step at which a metric is at the threshold, of each run that reached it."""
    if threshold is None:
        return []
    curves = [run.curve(metric) for run in runs]
    return [float(steps[values >= threshold][0]) for steps, values in curves if (values >= threshold).any()]


def learning_curves(groups: Groups) -> tuple[str, list[Series], list[str]]:
    """What was measured, a line per group with enough points over the steps that its runs share, and why it was chosen.

    All runs are on one environment.
    """
    drawn = {name: group for name, group in groups.items() if choose_curve(group)[0]}
    metric, notes = choose_curve([run for group in drawn.values() for run in group])
    lines = []
    for name, group in drawn.items():
        steps = steps_of_all(group, metric)
        if steps is not None:
            lines.append(Series(name, steps, *estimate(interquartile_mean, [curves_at(steps, group, metric)])))
    return metric, lines, notes


def doubts(groups: Groups) -> list[str]:
    """Sentences about what makes a comparison weaker than its numbers suggest."""
    notes = []
    for name, group in groups.items():
        seeds = [(run.env_id, run.config.get("seed")) for run in group]
        if len(set(seeds)) < len(seeds):
            notes.append(f"{name}: some runs have the same seed; repeats of a run make its interval too narrow.")
    if hidden := hidden_differences(groups):
        notes.append(f"the runs also differ in {', '.join(hidden[:5])}; a difference may come from that.")
    notes += measured_elsewhere(groups)
    if few := [name for name, group in groups.items() if len(group) < FEW_RUNS]:
        notes.append(
            f"fewer than {FEW_RUNS} runs of {', '.join(few)}: a bootstrap interval of so few is too narrow; "
            f"train {counted(FEW_RUNS, 'seed')} or more before you rely on it."
        )
    return notes


def hidden_differences(groups: Groups) -> list[str]:
    """Settings that differ and that no group's name tells; tables tell none but the number of steps."""
    own = {name: group for name, group in groups.items() if not group[0].measured_on}
    by_algorithm = all(run.algo in name.split(", ") for name, group in own.items() for run in group)
    compared = list(own.values()) if by_algorithm else [[run for group in own.values() for run in group]]
    others = [name for some in compared for name in differing(some)]
    everything = differing([run for group in groups.values() for run in group])
    others += [name for name in everything if name == "total_timesteps"]
    return [name for name in dict.fromkeys(others) if f"{name}=" not in next(iter(own), "") and name != "env_id"]


def measured_elsewhere(groups: Groups) -> list[str]:
    """A sentence for each other version of an environment on which groups were measured."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, group in groups.items():
        for pair in {(run.measured_on, run.env_id) for run in group if run.measured_on not in ("", run.env_id)}:
            found.setdefault(pair, []).append(name)
    return [f"measured on {there}, not {here}: {', '.join(names)}." for (there, here), names in found.items()]


def metric_name(metric: str) -> str:
    """A return in words."""
    return "return of evaluations" if metric == EVALUATED else "return of training episodes"


def describe_estimate(found: Estimate) -> str:
    """`12.3 [10.1, 14.9]`, without the interval if there is none."""
    value, low, high = (float(part) for part in found)
    return format_score(value) + ("" if math.isnan(low) else f" [{format_score(low)}, {format_score(high)}]")


def format_score(value: float) -> str:
    """Four digits, or a large number without a fraction."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def describe_groups(result: Comparison, threshold: float | None = None) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of groups."""
    place = "in evaluations" if (result.curve_of or result.scored_by) == EVALUATED else "in training"
    last = f"mean over steps {place}" if threshold is None else f"steps to {threshold:g} {place}"

    def describe_speed(group: GroupScores) -> str:
        if threshold is None:
            return "-" if group.area is None else format_score(group.area)
        if not group.to_threshold:
            return f"none of {group.runs}"
        return f"{np.median(group.to_threshold):,.0f} (median, {len(group.to_threshold)} of {group.runs})"

    rows = [
        [g.name, str(g.runs), describe_estimate(g.iqm), *map(format_score, (g.final, g.best)), describe_speed(g)]
        for g in result.groups
    ]
    return ["group", "runs", "IQM [95 % interval]", "mean", "best", last], rows


def describe_pairs(result: Comparison) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of pairs."""
    rows = [
        [f"{p.name} − {p.other}", p.verdict, describe_estimate(p.difference), describe_estimate(p.improvement)]
        for p in result.pairs
    ]
    return ["pair", "verdict", "difference of IQMs", "P(first is better)"], rows
