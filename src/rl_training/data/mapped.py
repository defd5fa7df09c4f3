"""Arrays in files: one folder per buffer, with disk space reserved in advance."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_training.errors import UserError

try:
    import fcntl
except ImportError:  # Windows, where folders of killed runs stay
    fcntl = None  # type: ignore[assignment]

_HOST = re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())


class MappedFolder:
    """A new subfolder of `parent` for the files of one buffer, removed with `close`, or when the process ends.

    A locked file in it shows that its process is alive; subfolders left by killed processes of this host are removed.
    """

    def __init__(self, parent: str | os.PathLike[str]) -> None:
        try:
            Path(parent).mkdir(parents=True, exist_ok=True)
            remove_stale_folders(parent)
            # It gets the name that others look for only once its lock is held.
            new = Path(tempfile.mkdtemp(prefix=f".replay-{_HOST}-{os.getpid()}-", dir=parent))
            lock = os.open(new / "lock", os.O_CREAT | os.O_RDWR)
            _try_lock(lock)
            self.path = new.rename(new.with_name(new.name[1:]))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"replay_folder is {os.fspath(parent)!r}, where no files can be made: {reason}.") from None
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def make_array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """A zeroed array whose memory is the file `<name>.npy`, every byte of it reserved on the disk.

        With a file that has holes, a full disk would kill the process with SIGBUS.
        """
        path = self.path / f"{name}.npy"
        array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        try:
            _reserve(path)
        except OSError as error:
            error.filename = str(path)
            raise
        return array

    def remove(self, name: str) -> None:
        """Remove the file of an array that is no longer used."""
        (self.path / f"{name}.npy").unlink()

    def close(self) -> None:
        """Remove the folder; closing twice is harmless."""
        self._end()


def remove_stale_folders(parent: str | os.PathLike[str]) -> None:
    """Remove the subfolders of dead processes of this host, whose locks are free."""
    for path in Path(parent).glob(f"replay-{_HOST}-*-*"):
        with contextlib.suppress(OSError):
            lock = os.open(path / "lock", os.O_RDWR)
            if _try_lock(lock):
                shutil.rmtree(path)
            os.close(lock)


def _reserve(path: Path) -> None:
    size = path.stat().st_size
    with open(path, "r+b") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:  # macOS, Windows: what is not there yet is zeros
            for start in range(0, size, 1 << 24):
                file.seek(start)
                part = file.read(1 << 24)
                file.seek(start)
                file.write(part)


def _try_lock(descriptor: int) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks
        return False
    return True


def _remove(path: Path, lock: int, process: int) -> None:
    if os.getpid() == process:  # not in a fork
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
