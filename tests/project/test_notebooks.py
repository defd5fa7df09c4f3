"""The notebooks in examples/notebooks run from top to bottom, with small budgets."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
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


def test_there_are_notebooks() -> None:
    assert len(list(FOLDER.glob("*.ipynb"))) == 2
