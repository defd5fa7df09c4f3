"""A file to which records are appended while a run trains; a full disk does not end the run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_training.safe_files import continue_file, create_file, start_file

_MOST_PENDING = 1 << 24  # bytes of rows or events that wait while the disk is full


class Appender:
    """A file to which records are appended; records that cannot be written wait for the next flush.

    It is unbuffered, so that a worker process inherits no half-full buffer.
    """

    def __init__(self, path: Path, warn: Callable[[str], None], *, fresh: bool = True) -> None:
        self._path, self._warn = path, warn
        self._open: Callable[[Path], Any] = start_file if fresh else continue_file
        self._file: Any = None
        self._pending, self._unwritten = bytearray(), 0
        self.flush()

    def write(self, record: bytes) -> None:
        """Keep a record until the next flush."""
        self._unwritten += 1
        if len(self._pending) < _MOST_PENDING:
            self._pending += record

    def flush(self) -> None:
        """Write all waiting records."""
        try:
            if self._file is not None and not os.fstat(self._file.fileno()).st_nlink:
                self._warn(f"{self._path} was deleted; a new one is started")
                self._file.close()
                self._file = None
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file, self._open = self._open(self._path), create_file
            while self._pending:
                del self._pending[: self._file.write(self._pending)]
            self._unwritten = 0
        except OSError as error:
            self._warn(f"{self._path} cannot be written ({error.strerror or error}); training continues")

    def close(self) -> None:
        """Write all waiting records, and report how many could not be written."""
        if self._pending:
            self.flush()
        if self._pending:
            self._warn(f"{self._unwritten} records could not be written to {self._path}")
        if self._file is not None:
            self._file.close()
        self._file, self._pending = None, bytearray()
