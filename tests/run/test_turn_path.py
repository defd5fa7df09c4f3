"""What a reader of one turn has to open: files between two updates, and calls from one file to another."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import rl_training
from resume_cases import tiny
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import train

PACKAGE = str(Path(rl_training.__file__).parent) + os.sep


class Follow(Callback):
    """Records the files of this package that run from one update to the next, and who calls whom."""

    def __init__(self, after: int) -> None:
        self.after, self.files, self.transitions = after, set[str](), set[tuple[str, str]]()

    def on_update(self, run: Run) -> bool | None:
        if run.updates >= self.after and not self.files:
            sys.setprofile(self.look)
            return None
        sys.setprofile(None)
        return False if self.files else None

    def look(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(PACKAGE):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back  # through torch, for example
        self.files.add(path)
        if caller is not None and caller.f_code.co_filename != path:
            self.transitions.add((caller.f_code.co_filename, path))


# PPO had 28 transitions before it shared its epochs, and the values of rollouts, with PQN.
@pytest.mark.parametrize(("algo", "files", "transitions"), [("ppo", 20, 31), ("sac", 20, 28), ("dqn", 22, 32)])
def test_one_turn_passes_through_few_files(algo: str, files: int, transitions: int, tmp_path: Path) -> None:
    follow = Follow(after=4)
    config = tiny(algo, tmp_path, num_envs=2, total_timesteps=4096, log_interval=1000, eval_episodes=0)
    train(config, callbacks=[follow], console=False)
    assert len(follow.files) <= files
    assert len(follow.transitions) <= transitions
    names = {path.removeprefix(PACKAGE) for path in follow.files}
    assert not {"run/ranks.py", "run/build.py", "run/interruption.py", "record/logger.py"} & names
