"""Rows of metrics: as lines of `metrics.jsonl`, back from them, as numbers for other loggers; and a file that grows."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_training.errors import UserError
from rl_training.safe_files import continue_file, create_file, open_regular, read_regular, replacing, start_file

_MOST_PENDING = 1 << 24  # bytes of rows or events that wait while the disk is full
LARGEST = 1e100  # numbers in files must be smaller
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_encode_row = json.JSONEncoder(allow_nan=False, default=float).encode  # default: numpy scalars and 0-dim tensors


def format_row(row: Mapping[str, Any]) -> bytes:
    """The line of a row; values are numbers (numpy scalars and 0-dim tensors too)."""
    try:
        text = _encode_row(row)
    except ValueError:  # a value that is not finite, which JSON cannot represent
        text = _encode_row({key: _spell(value) for key, value in row.items()})
    return text.encode("ascii") + b"\n"


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`; a last line cut off by a kill is left out."""
    try:
        lines = read_regular(path).splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a run's metrics.jsonl.") from None
    rows = [parse_row(line) for line in lines]
    for number, row in enumerate(rows[:-1], start=1):
        if row is None and lines[number - 1].strip():
            raise UserError(f"{path} is damaged in line {number}, which is not a row of metrics; remove that line.")
    return [{key: unspell(value) for key, value in row.items()} for row in rows if row is not None]


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The row in a line, or None if there is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def is_number(value: Any) -> bool:
    """Whether a value from a file is a finite number, small enough to compute with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def trim_rows(path: Path, last_step: int | None) -> float:
    """Drop rows after `last_step`, rows marked `last`, and lines that are not rows; returns the last row's time."""
    elapsed = 0.0
    try:
        with open_regular(path) as source, replacing(path) as target:
            for line in source:
                row = parse_row(line)
                if row is None or row.get("last") is True:
                    continue
                if last_step is None or row["step"] <= last_step:
                    target.write(line.rstrip() + b"\n")
                    elapsed = row["time"] if isinstance(row.get("time"), float) else elapsed
    except FileNotFoundError:  # none, or a link to nothing
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be continued ({error.strerror}); fix that, or give --output-dir.") from None
    return elapsed


def tagged_numbers(kind: str, metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The metrics that are numbers, under the name `kind/metric`."""
    for name, value in metrics.items():
        try:
            yield f"{kind}/{name}", float(value)
        except (TypeError, ValueError):
            continue


def _spell(value: Any) -> Any:
    value = value if isinstance(value, str | int | float | None) else float(value)
    return repr(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def unspell(value: Any) -> Any:
    """The number that a value from a file stands for; JSON has no NaN and no infinity."""
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


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
