"""A run's folder: created once, never reused, locked while a run uses it; and its files other than checkpoints."""

from __future__ import annotations

import filecmp
import json
import os
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rl_training
from rl_training.config.train_config import TrainConfig, dump_yaml
from rl_training.errors import Terminated, TrainingFailure, UserError
from rl_training.run.status import END_FILE
from rl_training.safe_files import (
    create_file,
    is_alive,
    open_locked,
    open_regular,
    output_written,
    read_regular,
    refuse_link,
    remove_stale_temporaries,
    write_text,
)

FOLDERS = ("checkpoints", "wandb")  # what a run writes besides files
_locks: dict[Path, int] = {}  # descriptors that hold the locks of this process's runs, by folder


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
        with open_regular(begun_in / "metrics.jsonl") as source, create_file(run_dir / "metrics.jsonl") as target:
            shutil.copyfileobj(source, target)
    return run_dir


def run_dir_of(checkpoint: Path) -> Path | None:
    """The run folder whose `checkpoints/` contains a checkpoint; a checkpoint anywhere else has none.

    A link to a checkpoint of a run counts as that checkpoint, but a link inside a run folder never leads out of it.
    """
    try:
        for folder in (checkpoint.absolute().parent, checkpoint.resolve().parent):
            files = [folder.parent / name for name in ("config.yaml", "manifest.json")]
            if folder.name == "checkpoints" and all(path.is_file() for path in files):
                return folder.parent.resolve()
    except (OSError, ValueError):  # an impossible name
        pass
    return None


def is_newest(checkpoint: Path, run_dir: Path) -> bool:
    """Whether a checkpoint has the contents of the run's `latest.ckpt`, under any name, or there is no latest."""
    latest = run_dir / "checkpoints" / "latest.ckpt"
    if not latest.is_file() or not checkpoint.is_file() or latest.samefile(checkpoint):
        return True
    return filecmp.cmp(checkpoint, latest, shallow=False)


@contextmanager
def locked(run_dir: Path, instead: str = "--output-dir") -> Iterator[None]:
    """Keep other processes out of a run's folder; a second process gets an error that names the first.

    `instead` is the option that names another folder.
    """
    path = run_dir / ".lock"
    try:
        for name in FOLDERS:
            refuse_link(run_dir / name)
        _locks[run_dir] = _take_lock(path, instead)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{run_dir} cannot be written to ({reason}); fix that, or give {instead}.") from None
    try:
        remove_stale_temporaries(run_dir)
        yield
    finally:
        if has_lock(run_dir):
            with suppress(OSError):  # a leftover file without a lock does no harm
                path.unlink(missing_ok=True)
        os.close(_locks.pop(run_dir))


def has_lock(run_dir: Path) -> bool:
    """Whether this process's lock is still in the folder; a run that does not lock its folder has nothing to lose."""
    try:
        return run_dir not in _locks or os.path.samestat(os.lstat(run_dir / ".lock"), os.fstat(_locks[run_dir]))
    except OSError:
        return False


def keep_lock(run_dir: Path) -> None:
    """Take the lock again if it was deleted with the folder; fail if another process has taken it meanwhile."""
    if has_lock(run_dir):
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        taken = _take_lock(run_dir / ".lock")
    except UserError as error:
        raise TrainingFailure(f"this run lost its folder, which was deleted and made again: {error}") from None
    os.close(_locks[run_dir])
    _locks[run_dir] = taken


def _take_lock(path: Path, instead: str = "--output-dir") -> int:
    """Return a descriptor that holds the lock; try again if the last holder removed the file in between."""
    while True:
        descriptor = open_locked(path)
        try:
            if not _is_free(descriptor):
                holder = _read_holder(descriptor)
                who = f"process {holder.get('process')} on {holder.get('host')}" if holder else "another process"
                raise UserError(
                    f"{path.parent} is in use: {who} is training in it; wait until it ends or give {instead} "
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
    with output_written(run_dir / END_FILE, "the file"):
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
            if has_lock(run_dir):
                write_text(run_dir / END_FILE, json.dumps({**end, "ended": now()}) + "\n")


def earlier_starts(manifest: Path) -> list[Any]:
    """The run's starts in an existing manifest; a resume in place keeps them."""
    try:
        previous = json.loads(read_regular(manifest))
        return [*previous.pop("earlier", []), previous]
    except (OSError, ValueError, AttributeError, TypeError):  # none, or not as we write it
        return []


def git_state() -> dict[str, str] | None:
    """The commit of the working directory, read from its files; None if it is not a checkout.

    Git itself is not run: it executes commands that the folder's own configuration names.
    """
    with suppress(OSError, ValueError):  # a damaged repository, or one that cannot be read
        here = Path.cwd()
        found = [folder / ".git" for folder in (here, *here.parents) if (folder / ".git").exists()]
        return {"commit": _read_commit(found[0])} if found else None
    return None


def _read_commit(git: Path) -> str:
    """The commit that HEAD names; `git` is the folder .git, or the file that names it in a linked worktree."""
    if git.is_file():
        git = git.parent / _read_line(git).partition("gitdir: ")[2]
    common = git / _read_line(git / "commondir") if (git / "commondir").is_file() else git
    head = _read_line(git / "HEAD")
    for _ in range(5):  # a branch may be the name of another one
        _, is_name, name = head.partition("ref: ")
        if not is_name:
            break
        found = [folder / name for folder in (git, common) if (folder / name).is_file()]
        head = _read_line(found[0]) if found else _find_packed(common / "packed-refs", name)
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", head):
        raise ValueError("not a commit")
    return head


def _read_line(path: Path) -> str:
    with open_regular(path) as file:
        return file.readline(4096).decode().strip()


def _find_packed(path: Path, name: str) -> str:
    with open_regular(path) as file:
        lines = file.read(1 << 24).decode().splitlines()
    return next((line for line in lines if line.endswith(f" {name}")), "").partition(" ")[0]
