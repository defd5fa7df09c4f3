"""For the whole suite: one torch thread, since tiny networks lose more by sharing two busy cores than they gain; a
folder of its own for every test, so that what a run writes to `runs` does not lie in the checkout; and compiled code is
kept, because with a container's PYTHONDONTWRITEBYTECODE every process of the suite would compile the package again."""

import os
import sys
from functools import cache
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import torch
import typer.testing

sys.dont_write_bytecode = False
torch.set_num_threads(1)
typer.testing._get_command = cache(typer.testing._get_command)  # hundreds of tests would build all commands again
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # where Triton is installed, before anything imports it


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths, `runs` among them, are those of a temporary folder."""
    monkeypatch.chdir(tmp_path)
