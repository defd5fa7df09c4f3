"""Put the evaluations of finished runs into results/benchmarks.csv: collect_benchmarks.py RUN... [--machine NAME].

A row is one evaluation: algo, env, seed, step, return, config_hash, commit, machine. `step` is rounded down to the
evaluation interval, so that rows of different algorithms line up. A run that is there already is replaced; an
unfinished one is refused, so that nothing is dropped by choosing when to look.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_training.tools.records import EVALUATED, RunRecord, read_run

TABLE = Path(__file__).resolve().parents[1] / "results" / "benchmarks.csv"
COLUMNS = ("algo", "env", "seed", "step", "return", "config_hash", "commit", "machine")
OF_ONE_RUN = ("seed", "output_dir", "name")  # not part of what is compared
Row = dict[str, Any]


def config_hash(config: dict[str, Any]) -> str:
    """Twelve digits that are the same for runs that differ in nothing but their seed and their place."""
    shared = {name: value for name, value in config.items() if name not in OF_ONE_RUN}
    return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:12]


def rows_of(run: RunRecord, machine: str, commit: str = "") -> list[Row]:
    """One row per evaluation of a finished run."""
    if run.status != "done":
        raise SystemExit(f"{run.folder} is {run.status} at step {run.last_step:,}; finish it first.")
    commit = commit or str((run.manifest.get("git") or {}).get("commit", ""))[:12]
    interval = int(run.settings.get("eval_interval") or 0)
    steps, returns = run.curve(EVALUATED)
    same = {"algo": run.algo, "env": run.env_id, "seed": run.config["seed"]}
    marks = {"config_hash": config_hash(run.config), "commit": commit, "machine": machine}
    rounded = [int(step) // interval * interval if interval else int(step) for step in steps]
    last = dict(zip(rounded, returns, strict=True))  # of two evaluations in one interval, the later one
    return [{**same, "step": step, "return": f"{value:.1f}", **marks} for step, value in last.items()]


def key_of(row: Row) -> tuple[str, str, str, str]:
    """What one curve is."""
    return str(row["algo"]), str(row["env"]), str(row["seed"]), str(row["config_hash"])


def merge(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """The old rows without those of curves that are new, and the new ones, in order."""
    new = list(new)
    replaced = {key_of(row) for row in new}
    kept = [row for row in old if key_of(row) not in replaced]
    order = "algo", "env", "seed", "config_hash", "step"
    numbers = "seed", "step"
    return sorted([*kept, *new], key=lambda row: [int(row[name]) if name in numbers else row[name] for name in order])


def main() -> None:
    """Read the runs and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--machine", default=platform.machine(), help="a name for the machine they ran on")
    parser.add_argument("--commit", default="", help="of runs on a machine that has no git")
    parser.add_argument("--table", type=Path, default=TABLE)
    arguments = parser.parse_args()
    new = [row for folder in arguments.runs for row in rows_of(read_run(folder), arguments.machine, arguments.commit)]
    old = list(csv.DictReader(arguments.table.open())) if arguments.table.is_file() else []
    with arguments.table.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(merge(old, new))
    print(f"{len(new)} rows of {len(arguments.runs)} runs in {arguments.table}")


if __name__ == "__main__":
    main()
