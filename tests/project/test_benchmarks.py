"""The table of benchmark runs: one row per evaluation, nothing unfinished, nothing twice."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

import pytest

from resume_cases import tiny
from rl_training.run.workflows import train

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import collect_benchmarks as benchmarks
import run_benchmarks

ROOT = Path(__file__).parents[2]


def run(folder: Path, seed: int, **fields: object) -> Path:
    given = {"seed": seed, "kwargs": {"eval_interval": 64}, "total_timesteps": 128, "name": f"seed{seed}", **fields}
    return train(tiny("ppo", folder, **given), console=False).run_dir


def collect(table: Path, *runs: Path) -> list[dict[str, str]]:
    sys.argv = ["collect_benchmarks.py", *map(str, runs), "--machine", "here", "--table", str(table)]
    benchmarks.main()
    with table.open() as file:
        return list(csv.DictReader(file))


def test_a_run_has_one_row_per_evaluation_and_comes_back_in_its_own_place(tmp_path: Path) -> None:
    one, other = run(tmp_path, 1), run(tmp_path, 0)
    rows = collect(tmp_path / "table.csv", one)
    assert [(row["seed"], row["step"]) for row in rows] == [("1", "64"), ("1", "128")]
    again = collect(tmp_path / "table.csv", other, one)
    assert [(row["seed"], row["step"]) for row in again] == [("0", "64"), ("0", "128"), ("1", "64"), ("1", "128")]
    assert again[2:] == rows
    assert len({row["config_hash"] for row in again}) == 1
    assert tuple(rows[0]) == benchmarks.COLUMNS


def test_other_settings_are_another_curve(tmp_path: Path) -> None:
    plain, other = run(tmp_path, 0), run(tmp_path / "other", 0, num_envs=2)
    hashes = [row["config_hash"] for row in collect(tmp_path / "table.csv", plain, other)]
    assert len(set(hashes)) == 2


def test_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    folder = run(tmp_path, 0)
    (folder / "end.json").write_text('{"stop_reason": "SIGTERM"}')
    with pytest.raises(SystemExit, match="stopped at step 128; finish it first"):
        collect(tmp_path / "table.csv", folder)


def test_the_recorded_table_has_the_columns_of_the_contract() -> None:
    with (ROOT / "results" / "benchmarks.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows
    assert tuple(rows[0]) == benchmarks.COLUMNS
    for row in rows:
        assert math.isfinite(float(row["return"]))
        assert all(row[name] for name in ("config_hash", "commit", "machine"))


def test_a_cell_is_run_unless_its_last_evaluation_is_in_the_table(tmp_path: Path) -> None:
    suites = {"small": {"budget": 128, "presets": {"ppo/cartpole": {"seeds": [0, 1], "hours": 1.0}}}}
    cells = run_benchmarks.cells_of(suites, ["ppo/cartpole"])
    table = tmp_path / "table.csv"
    collect(table, run(tmp_path, 1))
    assert [cell.seed for cell in run_benchmarks.missing(cells, suites, table)] == [0]
    suites["small"]["budget"] = 256
    assert [cell.seed for cell in run_benchmarks.missing(cells, suites, table)] == [0, 1]
    with pytest.raises(SystemExit, match="no cell 'ppo/cartpol'"):
        run_benchmarks.cells_of(suites, ["ppo/cartpol"])


def test_every_cell_of_the_benchmarks_is_a_preset() -> None:
    suites = run_benchmarks.yaml.safe_load(run_benchmarks.CELLS.read_text())
    for cell in run_benchmarks.cells_of(suites, []):
        assert run_benchmarks.load_config(cell.preset).algo == cell.preset.split("/")[0]
