"""The notebooks in examples/notebooks run from top to bottom, with small budgets."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"


def cells(path: Path) -> list[str]:
    """The code of a notebook."""
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["nbformat"] == 4
    assert all(not cell["outputs"] for cell in found["cells"] if cell["cell_type"] == "code"), "clear the outputs"
    return ["".join(cell["source"]) for cell in found["cells"] if cell["cell_type"] == "code"]


def run_cell(code: str, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does; the value of its last expression."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)  # type: ignore[attr-defined]


def shortened(code: str) -> str:
    """With budgets of some hundred steps."""
    return re.sub(r"\b\d+_000\b", lambda m: "200" if m[0] == "5_000" else "600", code).replace("range(5)", "range(2)")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(mpl.rcParams, "backend", "agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = [run_cell(shortened(code), names) for code in cells(path)]
    assert any(value is not None for value in shown)
    for value in shown:
        if hasattr(value, "_repr_html_"):
            assert value._repr_html_()


def test_the_medians_are_over_all_runs_at_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are evaluated at steps of their own, so a median of the rows with one step is that of a single run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(mpl.rcParams, "backend", "agg")
    rows = [(algo, seed, step + shift, 10.0 * seed + shift) for algo in ("a2c", "ppo") for seed in range(3)
            for shift, step in ((seed, 5_000), (seed, 30_000))]  # fmt: skip
    frame = pandas.DataFrame(rows, columns=["algo", "seed", "step", "return"]).assign(kind="eval")
    (code,) = (code for code in cells(FOLDER / "compare_algorithms.ipynb") if "median" in code)
    names: dict[str, Any] = {"frame": frame}
    run_cell(code, names)
    assert (names["curves"] == 11.0).all(axis=None)
    assert len(names["curves"]) > 10


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_installs_what_it_imports_and_draws_with(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    extras = set(re.search(r"pip install '\.\[([\w,]+)\]'", text)[1].split(","))  # type: ignore[index]
    assert ("video" in extras) == (".video()" in text)
    assert ("pandas" in extras) == ("load_runs" in text)


def test_there_are_notebooks() -> None:
    assert len(list(FOLDER.glob("*.ipynb"))) == 2
