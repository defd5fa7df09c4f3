"""`rl-training runs`: list the runs in a folder with their states and returns."""

from __future__ import annotations

import math
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
    found, damaged = summarize_runs(Path(folder))
    if not found and not damaged:
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
        name, algo, env = map(escape, (run.name, run.algo, run.env))
        state = f"[{COLORS[run.state]}]{run.state}[/]"
        table.add_row(name, state, algo, env, steps, *numbers, format_age(run.changed))
    console = make_console()
    if found:
        console.print(table)
    for problem in damaged:
        console.print(f"note: {escape(problem)}", style="yellow", soft_wrap=True)


def summarize_runs(folder: Path) -> tuple[list[RunSummary], list[str]]:
    """The runs in a folder, the newest first, and a sentence about each that cannot be read."""
    from rl_training.run.folder import find_run_folders

    found, damaged = [], []
    for run in find_run_folders(folder, "manifest.json"):
        name = run.name if run == folder else str(run.relative_to(folder))
        try:
            found.append(read_run(run, name))
        except (UserError, OSError) as error:
            damaged.append(f"{name} cannot be read: {error}")
    return sorted(found, key=lambda run: -run.changed), damaged


def read_run(run_dir: Path, name: str) -> RunSummary:
    """Read the files of a run; a UserError names the value that a run would not have."""
    from rl_training.config.train_config import read_yaml
    from rl_training.run.folder import find_status

    config, metrics = read_yaml(run_dir / "config.yaml"), run_dir / "metrics.jsonl"
    for field in ("algo", "env_id"):
        if not isinstance(config.get(field), str):
            raise UserError(f"{field} is {config.get(field)!r:.60} in its config.yaml; it must be a name.")
    algo, env, budget = config["algo"], config["env_id"], read_number(config, "total_timesteps", "config.yaml")
    newest, returns = read_returns(metrics)
    changed = (metrics if metrics.is_file() else run_dir).stat().st_mtime
    steps = int(read_number({"step": 0} | newest, "step"))
    trained = read_number(newest, "episode_return_mean") if "episode_return_mean" in newest else None
    state = find_status(run_dir, is_complete=steps >= budget)
    best = max((value for value in returns if math.isfinite(value)), default=None)
    return RunSummary(name, state, algo, env, steps, int(budget), returns[-1] if returns else trained, best, changed)


def read_returns(metrics: Path) -> tuple[dict[str, Any], list[float]]:
    """The newest complete row and the mean return of every evaluation; other rows are not parsed."""
    from rl_training.record.metrics_file import parse_row
    from rl_training.safe_files import open_regular

    returns: list[float] = []
    tail: deque[bytes] = deque(maxlen=2)  # a kill may have truncated the last line
    with suppress(FileNotFoundError), open_regular(metrics) as file:
        for line in file:
            tail.append(line)
            if b'"eval_return_mean"' in line and (row := parse_row(line)) is not None:
                returns.append(read_number(row, "eval_return_mean"))
    newest = next((row for line in reversed(tail) if (row := parse_row(line)) is not None), {})
    return newest, returns


def read_number(row: dict[str, Any], name: str, file: str = "metrics.jsonl") -> float:
    """The number of that name, which may be NaN or infinite, as our files write them."""
    from rl_training.record.metrics_file import is_number, unspell

    value = unspell(row.get(name))
    if is_number(value) or (isinstance(value, float) and not math.isfinite(value)):
        return float(value)
    shown = "too large" if isinstance(value, int) and not isinstance(value, bool) else f"{value!r:.60}"
    raise UserError(f"{name} is {shown} in its {file}; it must be a number.")


def format_age(changed: float) -> str:
    """The time since then, such as 5 min."""
    seconds = max(0.0, time.time() - changed)
    size, unit = next((one for one in UNITS if seconds >= one[0]), UNITS[-1])
    return f"{seconds // size:.0f} {unit}"
