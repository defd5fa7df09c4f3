"""A run's folder: made once, never reused, and what stands in it beside checkpoints and metrics."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rl_training
from rl_training.errors import UserError
from rl_training.experiment.checkpointing import load_checkpoint, write_text
from rl_training.experiment.config import TrainConfig, dump_yaml
from rl_training.runtime.run import RunState
from rl_training.validation import validate


def make_run_dir(config: TrainConfig, suffix: str | None = None) -> Path:
    """A new folder for the run; an existing one is never reused."""
    env = re.sub(r"[^\w.]+", "_", config.env_id)
    name = f"{config.algo}-{env}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}{f'-{suffix}' if suffix else ''}"
    parent = Path(config.output_dir)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(1000):
            path = parent / (name if attempt == 0 else f"{name}-{attempt}")
            try:
                path.mkdir()
                return path
            except FileExistsError:
                continue
    except (OSError, ValueError) as error:  # ValueError: a name that no file system has, such as one with a NUL
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"output_dir is {config.output_dir!r}, where no folder can be made: {reason}.") from None
    raise UserError(f"output_dir {config.output_dir!r} holds a thousand runs named {name}; clean it up.")


def choose_run_dir(config: TrainConfig, checkpoint: Path, step: int, *, elsewhere: bool) -> tuple[Path, list[str]]:
    """Where a run resumed at `step` goes on, and what is to be said about it.

    In the folder that it began in, unless that has gone on without it or `elsewhere` is asked for; a new folder has
    the rows of metrics up to there, which the logger cuts at the step. Unless `elsewhere` is asked for, a new folder
    lies next to the run's own, or next to a checkpoint outside of one: a checkpoint does not say where to write.
    """
    begun_in = checkpoint.resolve().parent.parent
    is_own = is_run_dir_of(begun_in, checkpoint)
    if not elsewhere:
        beside = begun_in.parent if is_own else checkpoint.resolve().parent
        config = config.model_copy(update={"output_dir": str(beside)})
    if not is_own:
        return make_run_dir(config, "resumed"), []
    notes = []
    if not elsewhere:
        newest = newest_step(checkpoint)
        if newest <= step:
            return begun_in, []
        notes = [f"{begun_in} has gone on to step {newest}, so this branch of it has a folder of its own."]
    run_dir = make_run_dir(config, "resumed")
    if (begun_in / "metrics.jsonl").is_file():
        shutil.copyfile(begun_in / "metrics.jsonl", run_dir / "metrics.jsonl")
    return run_dir, notes


def is_run_dir_of(folder: Path, checkpoint: Path) -> bool:
    """Whether a checkpoint lies in a run's own `checkpoints/`; elsewhere a folder with a config.yaml is somebody's."""
    in_place = checkpoint.resolve().parent.name == "checkpoints"
    return in_place and (folder / "config.yaml").is_file() and (folder / "manifest.json").is_file()


def newest_step(checkpoint: Path) -> int:
    """The step of the `latest.ckpt` beside a checkpoint; 0 where that is the checkpoint itself, or cannot be read."""
    latest = checkpoint.resolve().with_name("latest.ckpt")
    if latest == checkpoint.resolve():
        return 0
    try:
        return validate(RunState, load_checkpoint(latest).get("run"), str(latest)).step
    except UserError:
        return 0


def write_run_files(run_dir: Path, config: TrainConfig, messages: Iterable[str]) -> None:
    """`config.yaml`, resolved, and `manifest.json`: versions, platform, git state, seed, command, what was said."""
    import gymnasium

    write_text(run_dir / "config.yaml", dump_yaml(config.model_dump(mode="json")))

    manifest = {
        "rl_training": rl_training.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gymnasium": gymnasium.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "git": git_state(),
        "seed": config.seed,
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "messages": list(messages),
        "earlier": earlier_starts(run_dir / "manifest.json"),
    }
    write_text(run_dir / "manifest.json", json.dumps(manifest, indent=2) + "\n")


def earlier_starts(manifest: Path) -> list[Any]:
    """What a manifest that is there already says of the run's starts: a resume in place keeps it."""
    try:
        previous = json.loads(manifest.read_text(encoding="utf-8"))
        return [*previous.pop("earlier", []), previous]
    except (OSError, ValueError, AttributeError, TypeError):  # none, or not as we write it
        return []


def git_state() -> dict[str, Any] | None:
    """Commit and cleanliness of the working directory, where it is a checkout."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
        status = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.stdout.strip(), "clean": not status.stdout.strip()}
