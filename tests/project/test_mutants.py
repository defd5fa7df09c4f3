"""The list of mutants fits today's source and tests, so that `make mutants` can run them all."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MUTANTS = yaml.safe_load((ROOT / "tests" / "mutants.yaml").read_text())


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_names_are_unique_and_every_fault_is_in_the_source_once() -> None:
    assert len({mutant["name"] for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        text = (ROOT / "src" / "rl_training" / mutant["file"]).read_text()
        assert text.count(mutant["find"]) == 1, f"{mutant['name']}: find is not in {mutant['file']} exactly once"
        ast.parse(text.replace(mutant["find"], mutant["replace"]))
        assert mutant["find"] != mutant["replace"]


def test_every_test_of_a_mutant_exists() -> None:
    for mutant in MUTANTS:
        assert mutant["tests"], mutant["name"]
        for test in mutant["tests"]:
            file, _, node = test.partition("::")
            functions = {f.name for f in ast.walk(ast.parse((ROOT / "tests" / file).read_text())) if hasattr(f, "name")}
            assert not node or node.partition("[")[0] in functions, f"{mutant['name']}: {test} does not exist"


@pytest.mark.parametrize(
    ("find", "replace", "verdict"),
    [
        ("return 1", "return 2", "killed"),
        ("return 1", "return 1  # the same", "survived"),
        ("return 3", "return 2", "find is 0 times in small.py; it must be there once"),
    ],
)
def test_a_mutant_is_judged_by_its_tests_on_a_copy(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, find: str, replace: str, verdict: str
) -> None:
    package = tmp_path / "rl_training"
    package.mkdir()
    (package / "small.py").write_text("def one():\n    return 1\n")

    def run_here(folder: Path, tests: list[str]) -> tuple[int, str]:
        monkeypatch.syspath_prepend(str(folder / "rl_training"))
        sys.modules.pop("small", None)
        return int(importlib.import_module("small").one() != 1), ""

    monkeypatch.setattr(script, "SOURCE", package)
    monkeypatch.setattr(script, "run_tests", run_here)
    assert script.judge(script.Mutant("it", "small.py", find, replace, ["any"])) == verdict
    assert (package / "small.py").read_text() == "def one():\n    return 1\n"
