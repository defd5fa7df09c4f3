"""The status of a run (running, done, stopped or failed), from its files alone; imports nothing heavy."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_training.safe_files import read_regular

END_FILE = "end.json"  # why the run stopped, or what it failed with
COMPLETE = ("total_timesteps", "max_updates", "max_seconds", "early_stopping")


def find_run_folders(folder: Path, file: str) -> list[Path]:
    """The folders of runs that have this file, at any depth; the folder itself may be one."""
    found = []
    for root, inside, files in os.walk(folder):
        if {"config.yaml", file} <= set(files):
            found.append(Path(root))
            inside.clear()  # a run folder contains no other runs
        inside.sort()
    return found


def find_status(run_dir: Path, *, is_complete: bool) -> str:
    """`running`, `done`, `stopped` or `failed`; without an end file, `is_complete` distinguishes done from killed."""
    if is_running(run_dir):
        return "running"
    end = read_end(run_dir)
    if "failure" in end:
        return "failed"
    return "done" if end.get("stop_reason") in COMPLETE or (is_complete and not end) else "stopped"


def read_end(run_dir: Path) -> dict[str, Any]:
    """The `stop_reason` or `failure` of a run that has ended; empty if it runs or was killed."""
    return read_json(run_dir / END_FILE)


def is_running(run_dir: Path) -> bool:
    """Whether the process named in the lock file still holds the lock; a process on another host is assumed to."""
    holder = read_json(run_dir / ".lock")
    if not holder or holder.get("host") != socket.gethostname():
        return bool(holder)
    try:
        os.kill(int(holder["process"]), 0)
        import fcntl

        descriptor = os.open(run_dir / ".lock", os.O_RDWR)
    except (KeyError, TypeError, ValueError, OverflowError, ProcessLookupError, FileNotFoundError):
        return False
    except (ImportError, OSError):  # no locks here, or somebody else's process
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a killed run left the file, and its number was reused
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; empty if it cannot be read or is none."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_regular(path))
        if isinstance(found, dict):
            return found
    return {}
