"""Apply the mutants of `tests/mutants.yaml`, one at a time, and count those that no test notices.

A mutant is a small fault: `find` in a file of the package becomes `replace`, in a copy of the source that only the
mutant's tests import. At least one of them must fail. `python scripts/mutants.py [--only NAME] [--jobs 2]` exits 1 if a
mutant survives, if its `find` is not in its file exactly once, or if its tests fail without it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
SOURCE, LIST = ROOT / "src" / "rl_training", ROOT / "tests" / "mutants.yaml"
MOST_SECONDS = 300  # of one mutant's tests; a mutant that never ends is noticed too
PASSED, FAILED = 0, 1  # exit codes of pytest; the others mean that it could not run the tests


class Mutant(NamedTuple):
    """A fault, and the tests (files or node ids below `tests`) of which at least one must fail."""

    name: str
    file: str
    find: str
    replace: str
    tests: list[str]

    def apply(self, package: Path) -> None:
        """Put the fault into a copy of the package."""
        path = package / self.file
        text = path.read_text()
        if text.count(self.find) != 1:
            raise ValueError(f"find is {text.count(self.find)} times in {self.file}; it must be there once")
        path.write_text(text.replace(self.find, self.replace))
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def read_mutants(only: str | None = None) -> list[Mutant]:
    """All mutants, or those whose name contains `only`."""
    entries = yaml.safe_load(LIST.read_text())
    return [Mutant(**entry) for entry in entries if only is None or only in entry["name"]]


def run_tests(folder: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests on the package in `folder`; return pytest's exit code and what it printed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    ids = [f"tests/{test}" for test in dict.fromkeys(tests)]
    try:
        done = subprocess.run(
            [*command, *ids], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return FAILED, f"no end in {MOST_SECONDS} seconds"
    return done.returncode, done.stdout + done.stderr


def judge(mutant: Mutant) -> str:
    """`killed`, `survived`, or why its tests say nothing."""
    with tempfile.TemporaryDirectory() as folder:
        package = shutil.copytree(SOURCE, Path(folder) / "rl_training")
        try:
            mutant.apply(package)
        except ValueError as error:
            return str(error)
        code, said = run_tests(Path(folder), mutant.tests)
    if code in (PASSED, FAILED):
        return "killed" if code == FAILED else "survived"
    return f"pytest ended with {code}: {said.strip().splitlines()[-1] if said.strip() else 'no output'}"


def main() -> int:
    """Print a line for every mutant, then the count; 1 if one was not killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="mutants whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    given = parser.parse_args()
    mutants = read_mutants(given.only)
    if not mutants:
        print(f"--only is {given.only!r}; no mutant has this in its name")
        return 2
    code, said = run_tests(SOURCE.parent, [test for mutant in mutants for test in mutant.tests])
    if code != PASSED:
        print(f"{said}\nthe tests do not pass without a mutant")
        return 1
    width, killed = max(len(mutant.name) for mutant in mutants), 0
    with ThreadPoolExecutor(given.jobs) as pool:
        for mutant, verdict in zip(mutants, pool.map(judge, mutants), strict=True):
            killed += verdict == "killed"
            print(f"{mutant.name:{width}}  {verdict}", flush=True)
    print(f"{killed} of {len(mutants)} mutants killed")
    return int(killed < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
