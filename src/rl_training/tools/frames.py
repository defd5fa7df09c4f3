"""Runs as a pandas data frame."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from typing import Any

from rl_training.errors import UserError, install
from rl_training.tools.compare import describe_value, differing
from rl_training.tools.records import EVALUATED, TRAINED, RunRecord, find_runs

FIRST = ("run", "algo", "env", "seed", "step", "kind", "return")  # columns


def load_runs(paths: str | PathLike[str] | Iterable[str | PathLike[str]], *more: str | PathLike[str]) -> Any:
    """The metrics of runs as a pandas.DataFrame: a row per row of their `metrics.jsonl`, in the order of the steps.

    `paths` are folders of runs, folders that contain some, or tables of curves (FILE.csv): one, several, or a list.
    The columns are run, algo, env, seed, step, kind (eval or train; empty in a table), return (of the evaluation or of
    the last training episodes), then every metric by its name, and `config.NAME` for each setting that is not the same
    in all runs.
    """
    try:
        import pandas
    except ImportError:
        raise UserError(f"load_runs needs pandas; run {install('pandas')}.") from None
    given = [paths] if isinstance(paths, str | PathLike) else list(paths)
    if odd := [one for one in (*given, *more) if not isinstance(one, str | PathLike)]:
        raise UserError(f"load_runs got a {type(odd[0]).__name__}; it takes paths of folders and tables.")
    runs = find_runs(map(str, (*given, *more)), to_compare=False)
    names = [name for name in differing([run for run in runs if not run.measured_on]) if name not in ("algo", "env_id")]
    rows = [row for run in runs for row in rows_of(run, names)]
    columns = dict.fromkeys([*FIRST, *(name for row in rows for name in row)])
    return pandas.DataFrame(rows, columns=list(columns))


def rows_of(run: RunRecord, names: Iterable[str]) -> Iterable[dict[str, Any]]:
    """The rows of a run with what it is and these settings; a list or mapping among them is one line of YAML."""
    settings = {f"config.{name}": run.settings.get(name) for name in names}
    plain = {key: describe_value(v) if isinstance(v, list | dict) else v for key, v in settings.items()}
    about = {"run": str(run.folder), "algo": run.algo, "env": run.env_id, "seed": run.config.get("seed"), **plain}
    for row in sorted(run.rows, key=lambda row: row["step"]):
        found = {"step": row["step"], "kind": row.get("kind"), "return": row.get(EVALUATED, row.get(TRAINED))}
        yield {**about, **found, **(row if not run.measured_on else {})}
