"""`rl-training runs`: list the runs in a folder with their states and returns."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from rl_training.cli.screen import TABLE_STYLE, make_console
from rl_training.errors import UserError

COLORS = {"running": "cyan", "done": "green", "stopped": "yellow", "failed": "red"}
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@dataclass(frozen=True)
class RunSummary:
    """One row of the table; None means not known yet."""

    name: str
    state: str
    algo: str
    env: str
    steps: int
    budget: int
    last: float | None
    best: float | None
    changed: float  # when, as a time stamp


def list_runs(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of runs.")] = "runs",
) -> None:
    """List runs: state, algorithm, environment, steps, last and best return, age of the newest row."""
    found = summarize_runs(Path(folder))
    if not found:
        raise UserError(f"{folder} contains no runs; give another folder, or train: rl-training train ppo/cartpole.")
    table = Table(**TABLE_STYLE)
    table.add_column("run", overflow="fold")
    for name in ("state", "algorithm", "environment"):
        table.add_column(name, no_wrap=name == "state", overflow="fold")
    for name in ("steps", "last", "best", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in found:
        steps = f"{run.steps:,}" if run.steps >= run.budget else f"{run.steps:,} ({run.steps / run.budget:.0%})"
        numbers = ["-" if value is None else f"{value:.1f}" for value in (run.last, run.best)]
        state = f"[{COLORS[run.state]}]{run.state}[/]"
        table.add_row(escape(run.name), state, run.algo, escape(run.env), steps, *numbers, format_age(run.changed))
    make_console().print(table)


def summarize_runs(folder: Path) -> list[RunSummary]:
    """The runs in a folder, the newest first."""
    from rl_training.runtime.run_status import find_run_folders

    runs = find_run_folders(folder, "manifest.json")
    found = [summary for run in runs if (summary := read_run(run, folder)) is not None]
    return sorted(found, key=lambda run: -run.changed)


def read_run(run_dir: Path, folder: Path) -> RunSummary | None:
    """Read the files of a run; None if its config is not that of a run."""
    from rl_training.experiment.config import read_yaml
    from rl_training.runtime.run_status import find_status

    try:
        config = read_yaml(run_dir / "config.yaml")
        algo, env, budget = str(config["algo"]), str(config["env_id"]), int(config["total_timesteps"])
    except (UserError, KeyError, TypeError, ValueError):
        return None
    metrics = run_dir / "metrics.jsonl"
    newest, returns = read_returns(metrics)
    changed = (metrics if metrics.is_file() else run_dir).stat().st_mtime
    steps = int(newest.get("step", 0))
    last = returns[-1] if returns else newest.get("episode_return_mean")
    name = run_dir.name if run_dir == folder else str(run_dir.relative_to(folder))
    state = find_status(run_dir, is_complete=steps >= budget)
    return RunSummary(name, state, algo, env, steps, budget, last, max(returns, default=None), changed)


def read_returns(metrics: Path) -> tuple[dict[str, Any], list[float]]:
    """The newest complete row and the mean return of every evaluation; other rows are not parsed."""
    from rl_training.experiment.metrics_file import parse_row

    returns: list[float] = []
    tail: deque[bytes] = deque(maxlen=2)  # a kill may have truncated the last line
    with suppress(FileNotFoundError), open(metrics, "rb") as file:
        for line in file:
            tail.append(line)
            if b'"eval_return_mean"' in line and (row := parse_row(line)) is not None:
                returns.append(float(row["eval_return_mean"]))
    newest = next((row for line in reversed(tail) if (row := parse_row(line)) is not None), {})
    return newest, returns


def format_age(changed: float) -> str:
    """The time since then, such as 5 min."""
    seconds = max(0.0, time.time() - changed)
    size, unit = next((one for one in UNITS if seconds >= one[0]), UNITS[-1])
    return f"{seconds // size:.0f} {unit}"
