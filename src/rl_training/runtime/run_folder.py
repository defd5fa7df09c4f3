"""A run's folder: created once, never reused, locked while a run uses it; and its files other than checkpoints."""

from __future__ import annotations

import filecmp
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rl_training
from rl_training.errors import Terminated, UserError
from rl_training.experiment.checkpointing import is_alive, remove_stale_temporaries, write_text
from rl_training.experiment.config import TrainConfig, dump_yaml
from rl_training.runtime.run_status import END_FILE


def make_run_dir(config: TrainConfig, suffix: str | None = None, *, reuse: bool = False) -> Path:
    """A new folder for the run; an existing one is never reused unless `reuse` says so."""
    env = re.sub(r"[^\w.]+", "_", config.env_id)
    name = config.name or f"{config.algo}-{env}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    name += f"-{suffix}" if suffix else ""
    parent = Path(config.output_dir)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(1000):
            path = parent / (name if attempt == 0 else f"{name}-{attempt}")
            try:
                path.mkdir(exist_ok=reuse)
                return path
            except FileExistsError:
                continue
    except (OSError, ValueError) as error:  # ValueError: an impossible name, such as one with a NUL
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"output_dir is {config.output_dir!r}, where no folder can be made: {reason}.") from None
    raise UserError(f"output_dir {config.output_dir!r} holds a thousand runs named {name}; clean it up.")


def branch_run_dir(config: TrainConfig, begun_in: Path | None) -> Path:
    """Make a new folder for a resumed run with the metrics of its first folder, which the logger cuts at the step."""
    run_dir = make_run_dir(config, "resumed")
    if begun_in is not None and (begun_in / "metrics.jsonl").is_file():
        shutil.copyfile(begun_in / "metrics.jsonl", run_dir / "metrics.jsonl")
    return run_dir


def run_dir_of(checkpoint: Path) -> Path | None:
    """The run folder whose `checkpoints/` contains a checkpoint; a checkpoint anywhere else has none."""
    try:
        folder = checkpoint.resolve().parent
        files = [folder.parent / name for name in ("config.yaml", "manifest.json")]
        return folder.parent if folder.name == "checkpoints" and all(path.is_file() for path in files) else None
    except (OSError, ValueError):  # an impossible name
        return None


def is_newest(checkpoint: Path) -> bool:
    """Whether a checkpoint has the contents of the `latest.ckpt` next to it, under any name, or there is no latest."""
    latest = checkpoint.resolve().with_name("latest.ckpt")
    if not latest.is_file() or not checkpoint.is_file() or latest.samefile(checkpoint):
        return True
    return filecmp.cmp(checkpoint, latest, shallow=False)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keep other processes out of a run's folder; a second process gets an error that names the first."""
    path = run_dir / ".lock"
    try:
        descriptor = _take_lock(path)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{run_dir} cannot be written to ({reason}); fix that, or give --output-dir.") from None
    try:
        remove_stale_temporaries(run_dir)
        yield
    finally:
        with suppress(OSError):  # a leftover file without a lock does no harm
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _take_lock(path: Path) -> int:
    """Return a descriptor that holds the lock; try again if the last holder removed the file in between."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not _is_free(descriptor):
                holder = _read_holder(descriptor)
                who = f"process {holder.get('process')} on {holder.get('host')}" if holder else "another process"
                raise UserError(
                    f"{path.parent} is in use: {who} is training in it; wait until it ends or give --output-dir "
                    f"(if it is gone, delete {path.name} there)."
                )
            if os.fstat(descriptor).st_nlink:
                holder = {"process": os.getpid(), "host": socket.gethostname(), "started": now()}
                os.ftruncate(descriptor, 0)
                os.write(descriptor, json.dumps(holder).encode())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    """Take the lock if no other process has it.

    `flock` decides: a lock ends with its process, so a file left by a killed run locks nothing. If the file system
    has no locks, the process named in the file keeps the folder, unless it was on this host and is gone.
    """
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        holder = _read_holder(descriptor)
        return not holder or (holder.get("host") == socket.gethostname() and not is_alive(int(holder["process"])))


def _read_holder(descriptor: int) -> dict[str, Any]:
    os.lseek(descriptor, 0, os.SEEK_SET)
    try:
        holder = json.loads(os.read(descriptor, 1000))
        return {**holder, "process": int(holder["process"])}
    except (ValueError, KeyError, TypeError):  # empty, or not as we write it
        return {}


def now() -> str:
    """The current time, as files record it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def write_run_files(run_dir: Path, config: TrainConfig, messages: Iterable[str]) -> None:
    """`config.yaml`, resolved, and `manifest.json`: versions, platform, git state, seed, command, messages."""
    import gymnasium

    run_dir.mkdir(parents=True, exist_ok=True)
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
        "started": now(),
        "messages": list(messages),
        "earlier": earlier_starts(run_dir / "manifest.json"),
    }
    write_text(run_dir / "manifest.json", json.dumps(manifest, indent=2) + "\n")


@contextmanager
def end_written(run_dir: Path, *, writes: bool = True) -> Iterator[dict[str, Any]]:
    """Write `end.json` however the block ends, with what the caller put into the mapping, or with the exception."""
    end: dict[str, Any] = {}
    if not writes:  # another rank writes it
        yield end
        return
    (run_dir / END_FILE).unlink(missing_ok=True)
    try:
        yield end
    except BaseException as error:
        signals = {KeyboardInterrupt: "SIGINT", Terminated: "SIGTERM"}
        stopped = next((name for kind, name in signals.items() if isinstance(error, kind)), None)
        end |= {"stop_reason": stopped} if stopped else {"failure": f"{type(error).__name__}: {error}"}
        raise
    finally:
        with suppress(OSError):  # a full disk must not hide how the run ended
            write_text(run_dir / END_FILE, json.dumps({**end, "ended": now()}) + "\n")


def earlier_starts(manifest: Path) -> list[Any]:
    """The run's starts in an existing manifest; a resume in place keeps them."""
    try:
        previous = json.loads(manifest.read_text(encoding="utf-8"))
        return [*previous.pop("earlier", []), previous]
    except (OSError, ValueError, AttributeError, TypeError):  # none, or not as we write it
        return []


def git_state() -> dict[str, Any] | None:
    """The commit of the working directory, and whether it has changes; None if it is not a checkout."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
        status = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.stdout.strip(), "clean": not status.stdout.strip()}
