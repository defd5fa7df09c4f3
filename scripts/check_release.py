"""Before a release: one version everywhere, a dated page, stored checkpoints, and no placeholder in the metadata."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "rl-training.example"  # of the project's addresses, until it has a home


def read(path: str) -> str:
    """A file of the repository, or nothing if it is not there."""
    file = ROOT / path
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def found(pattern: str, text: str) -> str:
    """What the first group of the pattern matches, or nothing."""
    match = re.search(pattern, text, re.M)
    return match[1] if match else ""


def versions() -> dict[str, str]:
    """The version that each file names."""
    return {
        "pyproject.toml": found(r'^version = "(.+)"', read("pyproject.toml")),
        "src/rl_training/__init__.py": found(r'^__version__ = "(.+)"', read("src/rl_training/__init__.py")),
        "CITATION.cff": found(r"^version: (\S+)", read("CITATION.cff")),
    }


def problems(tag: str | None = None) -> Iterator[str]:
    """One sentence for everything that keeps this tree from being released."""
    named = versions()
    version = named["pyproject.toml"]
    for file, other in named.items():
        if other != version:
            yield f"{file} says version {other or 'nothing'}, pyproject.toml {version}."
    if tag is not None and tag != f"v{version}":
        yield f"The tag is {tag}, but the version is {version}; the tag should be v{version}."
    page = f"docs/releases/{version}.md"
    if not re.search(r"^\d{4}-\d{2}-\d{2}", read(page), re.M):
        yield f"{page} is missing or has no date."
    if not list((ROOT / "tests/record/released").glob(f"{version}/*.ckpt")):
        yield f"tests/record/released/{version} holds no checkpoint; scripts/store_released.py makes them."
    if PLACEHOLDER in read("pyproject.toml"):
        yield f"pyproject.toml has addresses at {PLACEHOLDER}; put the project's own there."


def main() -> int:
    """Print what is wrong; 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tag", help="the tag that is about to be released")
    wrong = list(problems(parser.parse_args().tag))
    print("\n".join(wrong) if wrong else "ready to be released")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
