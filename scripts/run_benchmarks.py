"""Run the cells of benchmarks.yaml that are not in results/benchmarks.csv, then add them: run_benchmarks.py [CELL...].

A cell is a preset (`ppo/hopper`), or a preset and a seed (`ppo/hopper:103`); none means all. A run that was stopped
goes on from its checkpoint. `--plan` runs nothing: it lists the missing runs and their hours. `--again` repeats runs
that are in the table.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from collect_benchmarks import TABLE

from rl_training.config.train_config import load_config

CELLS, SCRIPTS = Path(__file__).with_name("benchmarks.yaml"), Path(__file__).parent


class Cell(NamedTuple):
    """One run of a benchmark."""

    suite: str
    preset: str
    seed: int
    hours: float

    @property
    def name(self) -> str:
        """Of the run's folder."""
        return f"{self.preset.replace('/', '_')}_{self.seed}"


def cells_of(suites: dict[str, Any], wanted: Sequence[str]) -> list[Cell]:
    """The wanted cells, the longest first; unknown names end the program."""
    every = [
        Cell(suite, preset, seed, about["hours"])
        for suite, entry in suites.items() for preset, about in entry["presets"].items() for seed in about["seeds"]
    ]  # fmt: skip
    known = {cell.preset for cell in every} | {f"{cell.preset}:{cell.seed}" for cell in every}
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"there is no cell {unknown[0]!r} in {CELLS.name}.")
    chosen = [cell for cell in every if not wanted or {cell.preset, f"{cell.preset}:{cell.seed}"} & set(wanted)]
    return sorted(chosen, key=lambda cell: -cell.hours)


def recorded(table: Path) -> set[tuple[str, str, int, int]]:
    """Algorithm, environment, seed and step of every row."""
    with table.open(encoding="utf-8") as file:
        return {(row["algo"], row["env"], int(row["seed"]), int(row["step"])) for row in csv.DictReader(file)}


def missing(cells: Sequence[Cell], suites: dict[str, Any], table: Path) -> Iterator[Cell]:
    """The cells whose last evaluation is not in the table."""
    there = recorded(table) if table.is_file() else set()
    for cell in cells:
        config = load_config(cell.preset)
        if (config.algo, config.env_id, cell.seed, suites[cell.suite]["budget"]) not in there:
            yield cell


def run(cell: Cell, suite: dict[str, Any], folder: Path) -> bool:
    """Start the run, or go on with it; whether it is done."""
    command = [
        sys.executable, "-m", "rl_training", "train", "--config", cell.preset, "--seed", str(cell.seed),
        "--total-timesteps", str(suite["budget"]), "--eval-episodes", str(suite["eval_episodes"]),
        "--set", f"eval_interval={suite['eval_interval']}",
        "--output-dir", str(folder), "--name", cell.name, "--continue",
    ]  # fmt: skip
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode == 0


def main() -> int:
    """Run what is missing and add it to the table; 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cells", nargs="*", metavar="CELL")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one core each (default 2)")
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmarks"), help="where the run folders are")
    parser.add_argument("--machine", default="", help="a name for the machine")
    parser.add_argument("--plan", action="store_true", help="run nothing; list what is missing")
    parser.add_argument("--again", action="store_true", help="repeat what is in the table")
    asked = parser.parse_args()
    suites = yaml.safe_load(CELLS.read_text(encoding="utf-8"))
    cells = cells_of(suites, asked.cells)
    due = cells if asked.again else list(missing(cells, suites, TABLE))
    print(f"{len(due)} of {len(cells)} runs are missing: {sum(cell.hours for cell in due):.1f} core hours")
    if asked.plan:
        print("\n".join(f"{cell.preset} seed {cell.seed}: {cell.hours} h" for cell in due))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-")) if asked.again else asked.runs
    with ThreadPoolExecutor(asked.jobs) as pool:
        ended = list(pool.map(lambda cell: run(cell, suites[cell.suite], folder), due))
    if done := [str(folder / cell.name) for cell, is_done in zip(due, ended, strict=True) if is_done]:
        named = ["--machine", asked.machine] if asked.machine else []
        subprocess.run([sys.executable, str(SCRIPTS / "collect_benchmarks.py"), *done, *named], check=True)
    return 0 if all(ended) else 1


if __name__ == "__main__":
    sys.exit(main())
