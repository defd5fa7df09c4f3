"""Runs as plain data from their folders or from tables of curves, and which of them can be compared."""

from __future__ import annotations

import csv
import math
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl_training.config.train_config import read_yaml
from rl_training.errors import UserError, did_you_mean
from rl_training.record.metrics_file import is_number, read_metrics
from rl_training.run.folder import find_run_folders, find_status, read_json
from rl_training.safe_files import read_regular

Array = NDArray[np.float64]
EVALUATED, TRAINED = "eval_return_mean", "episode_return_mean"
FEW_EVALUATIONS = 3  # with fewer, there is no curve
MOST_NAMES = 5  # of runs in a sentence
TABLE_COLUMNS = ("algo", "env", "seed", "step", "return")

Groups = dict[str, list["RunRecord"]]


class Series(NamedTuple):
    """One line of a chart, with a band where its lower and upper ends are numbers."""

    name: str
    x: Array
    y: Array
    low: Array | None = None
    high: Array | None = None


@dataclass(frozen=True, eq=False)
class RunRecord:
    """The contents of a run's folder; nothing in it is executed. Or a run of a table, whose file is its `folder`."""

    folder: Path
    algo: str
    env_id: str
    config: dict[str, Any]
    manifest: dict[str, Any]
    rows: list[dict[str, Any]]
    measured_on: str = ""  # the environment that a table names; `env_id` may be another version of it

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of the config and hyper-parameters by name; arguments of the environment as `env_kwargs.x`."""
        nested = {name: as_mapping(self.config.get(name)) for name in ("algo_kwargs", "env_kwargs")}
        fields = {name: value for name, value in self.config.items() if name not in nested}
        return fields | nested["algo_kwargs"] | {f"env_kwargs.{key}": v for key, v in nested["env_kwargs"].items()}

    @property
    def last_step(self) -> int:
        """The step of the last row."""
        return max((int(row["step"]) for row in self.rows if is_number(row["step"])), default=0)

    @property
    def unspent(self) -> str:
        """` of 20,000` if the run has not used its whole budget."""
        budget: Any = self.config.get("total_timesteps")
        return f" of {budget:,}" if is_number(budget) and self.last_step < budget else ""

    @property
    def status(self) -> str:
        """`done`, `running`, `stopped` or `failed`."""
        if self.measured_on:
            return "done"
        return find_status(self.folder, is_complete=not self.unspent)

    def up_to(self, step: int) -> RunRecord:
        """The run without the rows after this step."""
        return replace(self, rows=[row for row in self.rows if row["step"] <= step])

    def scaled(self, low: float, high: float) -> RunRecord:
        """The run with returns of which `low` is 0 and `high` is 1."""
        returns = EVALUATED, TRAINED
        rows = [row | {m: (row[m] - low) / (high - low) for m in returns if is_number(row.get(m))} for row in self.rows]
        return replace(self, rows=rows)

    def curve(self, metric: str) -> tuple[Array, Array]:
        """Steps and finite values of a metric, in the order of the steps."""
        pairs = {row["step"]: row[metric] for row in self.rows if is_number(row.get(metric)) and is_number(row["step"])}
        steps = sorted(pairs)
        return np.array(steps, dtype=np.float64), np.array([pairs[step] for step in steps], dtype=np.float64)


def as_mapping(value: Any) -> dict[str, Any]:
    return {str(key): part for key, part in value.items()} if isinstance(value, dict) else {}


def find_runs(given: Iterable[str], *, to_compare: bool = True) -> list[RunRecord]:
    """The runs in these: a run's folder, one that contains some at any depth, or a table, FILE.csv or FILE.csv:ALGO.

    To compare them, tables are taken on the environments of the runs (`match_environments`).
    """
    folders: dict[Path, Path] = {}
    tables: list[RunRecord] = []
    for text in given:
        file, is_table, algos = f"{text}:".partition(".csv:")
        if is_table:
            tables += read_table(Path(f"{file}.csv"), [name for name in algos.rstrip(":").split(",") if name])
            continue
        found = find_run_folders(Path(text), "metrics.jsonl")
        if not found:
            wanted = "give folders with a config.yaml and a metrics.jsonl"
            raise UserError(f"{text} is not a run folder and contains none; {wanted}.")
        folders |= {p.resolve(): p for p in found}
    runs = [read_run(path) for path in folders.values()]
    if not to_compare:
        return [*runs, *tables]
    matched = match_environments(tables, runs)
    warn_of_missing(tables, matched, {run.env_id for run in runs})
    return [*runs, *matched]


def read_table(path: Path, algos: Sequence[str] = ()) -> list[RunRecord]:
    """The runs of a CSV file with the columns algo, env, seed, step and return; of these algorithms, or of all.

    Their algorithm is called by its name and the file's, because it may be another program's.
    """
    try:
        rows = list(csv.DictReader(read_regular(path).decode("utf-8").splitlines()))
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as a table of curves: {error}.") from None
    if missing := [name for name in TABLE_COLUMNS if name not in (rows[0] if rows else ())]:
        raise UserError(f"{path} has no column {missing[0]!r}; a table of curves has {', '.join(TABLE_COLUMNS)}.")
    known = {row["algo"] for row in rows}
    if unknown := [name for name in algos if name not in known]:
        raise UserError(f"{path} has no algorithm {unknown[0]!r}; {did_you_mean(unknown[0], known)}")
    curves: dict[tuple[str | None, ...], list[dict[str, Any]]] = {}
    for line, row in enumerate(rows, start=2):
        if not algos or row["algo"] in algos:
            key = row["algo"], row["env"], row["seed"], row.get("config_hash")
            curves.setdefault(key, []).append(read_point(row, f"{path}, line {line}"))
    runs = []
    for (algo, env, seed, _), points in curves.items():
        name, env = f"{algo} ({path.stem})", str(env)
        last = max(point["step"] for point in points)
        config = {"algo": name, "env_id": env, "seed": seed, "total_timesteps": last}
        runs.append(RunRecord(path, name, env, config, {}, points, env))
    return runs


def read_point(row: dict[str, str], where: str) -> dict[str, Any]:
    """A line of a table as a row of metrics; its return is compared with returns of evaluations and of training."""
    try:
        step, value = int(float(row["step"])), float(row["return"])
    except (TypeError, ValueError, OverflowError):
        step, value = 0, math.nan
    if not is_number(value):
        raise UserError(f"{where}: step is {row['step']!r} and return is {row['return']!r}; they must be numbers.")
    return {"step": step, EVALUATED: value, TRAINED: value}


def match_environments(tables: Sequence[RunRecord], runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs of tables on the environments of these runs, or of another version of one: Ant-v4 goes next to Ant-v5.

    Without runs, on all environments; if tables have several versions, the first one counts.
    """
    wanted = {run.env_id.rpartition("-v")[0]: run.env_id for run in runs}
    exact = {run.env_id for run in runs}
    if not runs:
        for table in tables:
            wanted.setdefault(table.env_id.rpartition("-v")[0], table.env_id)
    placed = [(table, wanted.get(table.env_id.rpartition("-v")[0], "")) for table in tables]
    return [table if table.env_id in exact else replace(table, env_id=env) for table, env in placed if env]


def warn_of_missing(tables: Sequence[RunRecord], matched: Sequence[RunRecord], envs: Iterable[str]) -> None:
    """Warn of each table that has no curve on any of these environments, and of environments that no table has."""
    used, wanted = {table.folder for table in matched}, sorted(envs)
    for file in dict.fromkeys(table.folder for table in tables if wanted and table.folder not in used):
        has = ", ".join(sorted({table.env_id for table in tables if table.folder == file}))
        warnings.warn(f"{file} has no curve on {', '.join(wanted)}; it has {has}.", stacklevel=2)
    missing = [env for env in wanted if env not in {table.env_id for table in matched}]
    if used and missing:
        warnings.warn(f"no table has a curve on {', '.join(missing)}.", stacklevel=2)


def read_run(folder: Path) -> RunRecord:
    """The record of a run's folder; a manifest that cannot be read counts as empty."""
    config = read_yaml(folder / "config.yaml")
    for name in ("algo", "env_id"):
        if not isinstance(config.get(name), str):
            raise UserError(f"{folder / 'config.yaml'}: {name} is {config.get(name)!r}; it must be a name.")
    metrics = folder / "metrics.jsonl"
    rows = read_metrics(metrics) if os.path.lexists(metrics) else []
    return RunRecord(folder, config["algo"], config["env_id"], config, read_json(folder / "manifest.json"), rows)


def check_number(values: dict[str, Any], name: str, file: str = "metrics.jsonl") -> float:
    """The number of that name, which may be NaN or infinite; a UserError says what it is instead."""
    value: Any = values.get(name)
    if is_number(value) or (isinstance(value, float) and not math.isfinite(value)):
        return float(value)
    shown = "too large" if isinstance(value, int) and not isinstance(value, bool) else f"{value!r:.60}"
    raise UserError(f"{name} is {shown} in its {file}; it must be a number.")


def select_runs(groups: Groups, *, shared_steps: bool = False) -> tuple[Groups, list[str]]:
    """The finished runs, or all of them up to the step that all on their environment reached; and what was done."""
    runs = [run for group in groups.values() for run in group]
    unfinished = [run for run in runs if run.status != "done"]
    if not unfinished:
        return groups, []
    if not shared_steps and len(unfinished) < len(runs):
        told = name_runs(unfinished, [f"{run.status} at step {run.last_step:,}{run.unspent}" for run in unfinished])
        note = f"unfinished and left out: {told}; --shared-steps compares all runs up to the step that all reached."
        return keep_runs(groups, [run for run in runs if run not in unfinished]), [note]
    last = {env: min(run.last_step for run in runs if run.env_id == env) for env in {run.env_id for run in runs}}
    steps = ", ".join(f"{step:,}" for step in sorted(set(last.values())))
    why = "not every" if len(unfinished) < len(runs) else "no"
    note = f"{why} run is finished, so all are compared up to step {steps}, which every run reached."
    return {name: [run.up_to(last[run.env_id]) for run in group] for name, group in groups.items()}, [note]


def choose_measure(groups: Groups, *, trained: bool = False) -> tuple[Groups, str, list[str]]:
    """The groups without runs that lack the measure, the measure, and what was done.

    The measure is the return of evaluations, unless no run was evaluated or `trained` asks for training episodes.
    """
    runs = [run for group in groups.values() for run in group]
    has = {metric: [run for run in runs if len(run.curve(metric)[0])] for metric in (EVALUATED, TRAINED)}
    own = [run for run in has[EVALUATED] if not run.measured_on] or all(run.measured_on for run in runs)
    metric = EVALUATED if own and not trained else TRAINED
    if not has[metric]:
        raise UserError("no run has an evaluation or a finished training episode; train them for longer.")
    notes = []
    if metric == TRAINED and not trained:
        notes.append("no run was evaluated, so returns of training episodes are compared.")
    if without := [run for run in runs if run not in has[metric]]:
        reason = "never evaluated" if metric == EVALUATED else "without a finished training episode"
        notes.append(f"{reason} and left out: {name_runs(without)}.")
    return keep_runs(groups, has[metric]), metric, notes


def keep_runs(groups: Groups, runs: Sequence[RunRecord]) -> Groups:
    """The groups with only these runs; a group without any is dropped."""
    kept = {name: [run for run in group if run in runs] for name, group in groups.items()}
    return {name: group for name, group in kept.items() if group}


def name_runs(runs: Sequence[RunRecord], states: Sequence[str] = ()) -> str:
    """The folders of a few runs, each with its state in parentheses, and how many more there are."""
    told = [run.folder.name + (f" ({states[i]})" if states else "") for i, run in enumerate(runs[:MOST_NAMES])]
    return ", ".join(told) + (f" and {len(runs) - MOST_NAMES} more" if len(runs) > MOST_NAMES else "")


def choose_curve(runs: Sequence[RunRecord], *, trained: bool = False) -> tuple[str, list[str]]:
    """The return that every run has often enough for a curve or nothing, and a sentence if a few runs decided it."""
    few = [run for run in runs if not run.measured_on and len(run.curve(EVALUATED)[0]) < FEW_EVALUATIONS]
    metric = TRAINED if few or trained else EVALUATED
    if not all(len(run.curve(metric)[0]) > 1 for run in runs):
        return "", []
    if metric == EVALUATED:
        return EVALUATED, []
    why = f"fewer than {FEW_EVALUATIONS} evaluations of {name_runs(few)}: curves show training episodes."
    return TRAINED, [why] if len(few) < len(runs) and not trained else []
