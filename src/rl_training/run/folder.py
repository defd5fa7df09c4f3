"""A run's folder: created once, never reused, locked while a run uses it; its small files, and the status they show.

Listing runs imports this module, so it imports nothing heavy.
"""

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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import rl_training
from rl_training import safe_files
from rl_training.config.train_config import TrainConfig, dump_yaml
from rl_training.errors import Terminated, TrainingFailure, UserError

END_FILE = "end.json"  # why the run stopped, or what it failed with
COMPLETE = ("total_timesteps", "max_updates", "max_seconds", "early_stopping")
FOLDERS = ("checkpoints", "wandb")  # what a run writes besides files
_locks: dict[Path, int] = {}  # descriptors that hold the locks of this process's runs, by folder


def make_run_dir(config: TrainConfig, suffix: str | None = None, *, reuse: bool = False) -> Path:
    """A new folder for the run; an existing one is never reused unless `reuse` says so."""
    env = re.sub(r"[^\w.]+", "_", config.env_id)
    name = config.name or f"{config.algo}-{env}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    name += f"-{suffix}" if suffix else ""
    try:
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
        for attempt in range(1000):
            path = Path(config.output_dir) / (name if attempt == 0 else f"{name}-{attempt}")
            with suppress(FileExistsError):
                path.mkdir(exist_ok=reuse)
                return path
    except (OSError, ValueError) as error:  # ValueError: an impossible name, such as one with a NUL
        reason = getattr(error, "strerror", None) or error
        if isinstance(error, FileExistsError | NotADirectoryError):
            reason = "a file is in its place; name a folder"
        raise UserError(f"output_dir is {config.output_dir!r}, where no folder can be made: {reason}.") from None
    raise UserError(f"output_dir {config.output_dir!r} holds a thousand runs named {name}; clean it up.")


def branch_run_dir(config: TrainConfig, begun_in: Path | None) -> Path:
    """Make a new folder for a resumed run with the metrics of its first folder, which the logger cuts at the step."""
    run_dir = make_run_dir(config, "resumed")
    name = "metrics.jsonl"
    if begun_in is not None and (begun_in / name).is_file():
        with safe_files.open_regular(begun_in / name) as source, safe_files.create_file(run_dir / name) as target:
            shutil.copyfileobj(source, target)
    return run_dir


def run_dir_of(checkpoint: Path) -> Path | None:
    """The run folder whose `checkpoints/` contains a checkpoint; a checkpoint anywhere else has none.

    A link to a checkpoint of a run counts as that checkpoint, but a link inside a run folder never leads out of it.
    """
    with suppress(OSError, ValueError):  # an impossible name
        for folder in (checkpoint.absolute().parent, checkpoint.resolve().parent):
            files = [folder.parent / name for name in ("config.yaml", "manifest.json")]
            if folder.name == "checkpoints" and all(path.is_file() for path in files):
                return folder.parent.resolve()
    return None


def home_of(checkpoint: Path) -> str:
    """The `output_dir` of a run that continues from a checkpoint: next to its own run, or the default.

    A checkpoint does not decide where its run writes.
    """
    begun_in = run_dir_of(checkpoint)
    return TrainConfig.model_fields["output_dir"].default if begun_in is None else str(begun_in.parent)


def is_newest(checkpoint: Path, run_dir: Path) -> bool:
    """Whether a checkpoint has the contents of the run's `latest.ckpt`, under any name, or there is no latest."""
    latest = run_dir / "checkpoints" / "latest.ckpt"
    if not latest.is_file() or not checkpoint.is_file() or latest.samefile(checkpoint):
        return True
    return filecmp.cmp(checkpoint, latest, shallow=False)


# the lock --------------------------------------------------------------------------------------------------------


@contextmanager
def locked(run_dir: Path, instead: str = "--output-dir") -> Iterator[None]:
    """Keep other processes out of a run's folder; a second process gets an error that names the first.

    `instead` is the option that names another folder.
    """
    path = run_dir / ".lock"
    try:
        for name in FOLDERS:
            safe_files.refuse_link(run_dir / name)
        _locks[run_dir] = _take_lock(path, instead)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{run_dir} cannot be written to ({reason}); fix that, or give {instead}.") from None
    try:
        safe_files.remove_stale_temporaries(run_dir)
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


def is_running(run_dir: Path) -> bool:
    """Whether the process named in the lock file still holds the lock; a process on another host is assumed to."""
    try:
        with safe_files.open_regular(run_dir / ".lock") as file:
            holder = _read_holder(file.fileno())
            if not holder or holder.get("host") != socket.gethostname():
                return bool(holder)
            return safe_files.is_alive(holder["process"]) and not _is_free(file.fileno(), shared=True)
    except OSError:
        return False


def _take_lock(path: Path, instead: str = "--output-dir") -> int:
    """Return a descriptor that holds the lock; try again if the last holder removed the file in between."""
    while True:
        descriptor = safe_files.open_locked(path)
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


def _is_free(descriptor: int, *, shared: bool = False) -> bool:
    """Take the lock if no other process has it; `shared` is for those that only look.

    `flock` decides: a lock ends with its process, so a file left by a killed run locks nothing. If the file system
    has no locks, the process named in the file keeps the folder, unless it was on this host and is gone.
    """
    try:
        import fcntl

        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        holder = _read_holder(descriptor)
        return not holder or (holder.get("host") == socket.gethostname() and not safe_files.is_alive(holder["process"]))


def _read_holder(descriptor: int) -> dict[str, Any]:
    os.lseek(descriptor, 0, os.SEEK_SET)
    try:
        holder = json.loads(os.read(descriptor, 1000))
        return {**holder, "process": int(holder["process"])}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # empty, or not as we write it
        return {}


# the files -------------------------------------------------------------------------------------------------------


def now() -> str:
    """The current time, as files record it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def write_run_files(run_dir: Path, config: TrainConfig, machine: Mapping[str, str], messages: Iterable[str]) -> None:
    """`config.yaml`, resolved, and `manifest.json`: versions, hardware, git state, seed, command, messages.

    `earlier` in the manifest keeps the run's earlier starts.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    safe_files.write_text(run_dir / "config.yaml", dump_yaml(config.model_dump(mode="json")))
    previous = read_json(run_dir / "manifest.json")
    earlier = previous.pop("earlier", [])
    manifest = {
        "rl_training": rl_training.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **machine,
        "git": git_state(),
        "seed": config.seed,
        "command": sys.argv,
        "started": now(),
        "messages": list(messages),
        "earlier": [*earlier, previous] if previous and isinstance(earlier, list) else [],
    }
    safe_files.write_text(run_dir / "manifest.json", json.dumps(manifest, indent=2) + "\n")


@contextmanager
def end_written(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Write `end.json` however the block ends, with what the caller put into the mapping, or with the exception."""
    end: dict[str, Any] = {}
    with safe_files.output_written(run_dir / END_FILE, "the file"):
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
                safe_files.write_text(run_dir / END_FILE, json.dumps({**end, "ended": now()}) + "\n")


def read_end(run_dir: Path) -> dict[str, Any]:
    """The `stop_reason` or `failure` of a run that has ended; empty if it runs or was killed."""
    return read_json(run_dir / END_FILE)


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; empty if it cannot be read or is none."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(safe_files.read_regular(path))
        if isinstance(found, dict):
            return found
    return {}


def find_status(run_dir: Path, *, is_complete: bool) -> str:
    """`running`, `done`, `stopped` or `failed`; without an end file, `is_complete` distinguishes done from killed."""
    if is_running(run_dir):
        return "running"
    end = read_end(run_dir)
    if "failure" in end:
        return "failed"
    return "done" if end.get("stop_reason") in COMPLETE or (is_complete and not end) else "stopped"


def find_run_folders(folder: Path, file: str) -> list[Path]:
    """The folders of runs that have this file, at any depth; the folder itself may be one."""
    found = []
    for root, inside, files in os.walk(folder):
        if {"config.yaml", file} <= set(files):
            found.append(Path(root))
            inside.clear()  # a run folder contains no other runs
        inside.sort()
    return found


def git_state() -> dict[str, str] | None:
    """The commit of the working directory, read from its files; None if it is not a checkout.

    Git itself is not run: it executes commands that the folder's own configuration names.
    """
    with suppress(OSError, ValueError):  # a damaged repository, or one that cannot be read
        here = Path.cwd()
        for folder in (here, *here.parents):
            if (folder / ".git").exists():
                commit = _read_commit(folder / ".git")
                return {"commit": commit} if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", commit) else None
    return None


def _read_commit(git: Path) -> str:
    """The commit that HEAD names; `git` is the folder .git, or the file that names it in a linked worktree."""
    if git.is_file():
        git = git.parent / _read_text(git).removeprefix("gitdir: ")
    head = _read_text(git / "HEAD")
    if not head.startswith("ref: "):
        return head
    common, branch = git, head.removeprefix("ref: ")
    if (git / "commondir").is_file():
        common = git / _read_text(git / "commondir")
    if (common / branch).is_file():
        return _read_text(common / branch)
    packed = re.search(rf"^(\w+) {re.escape(branch)}$", _read_text(common / "packed-refs"), re.MULTILINE)
    return packed[1] if packed else ""


def _read_text(path: Path) -> str:
    with safe_files.open_regular(path) as file:
        return file.read(1 << 24).decode().strip()
