"""How large a function may be: read from the source, for every function in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "rl_training"
MOST_LINES = 50  # of a body, docstring not counted
MOST_COMPLEX = 20
BRANCHES = (
    ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.comprehension, ast.Assert,
    ast.match_case,
)  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


def body_lines(function: Function) -> int:
    """Lines from the first statement after the docstring to the last."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def complexity(function: Function) -> int:
    """Cyclomatic complexity: 1, and 1 for every branch, condition and `and` or `or`; inner functions count as well."""
    found = list(ast.walk(function))
    return (
        1
        + sum(isinstance(node, BRANCHES) for node in found)
        + sum(len(node.values) - 1 for node in found if isinstance(node, ast.BoolOp))
        + sum(len(node.ifs) for node in found if isinstance(node, ast.comprehension))
    )


def functions_of(path: Path) -> Iterator[tuple[str, Function]]:
    """Every function and method in a file, with where it is."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Function):
            yield f"{path.name}:{node.lineno} {node.name}", node


def all_functions() -> list[tuple[str, Function]]:
    found = [function for path in sorted(PACKAGE.rglob("*.py")) for function in functions_of(path)]
    assert len(found) > 1_000
    return found


@pytest.mark.parametrize(("measure", "most"), [(body_lines, MOST_LINES), (complexity, MOST_COMPLEX)])
def test_every_function_is_read_at_a_glance(measure, most: int) -> None:
    assert {where: size for where, function in all_functions() if (size := measure(function)) > most} == {}


def test_a_long_or_complex_function_would_be_found(tmp_path: Path) -> None:
    source = tmp_path / "large.py"
    rows = "\n".join("    x = 1 if x and y else 2" for _ in range(51))
    source.write_text(f'def large(x, y):\n    """Two\n    lines."""\n{rows}\n')
    ((_, function),) = functions_of(source)
    assert body_lines(function) == 51
    assert complexity(function) == 1 + 2 * 51
