"""What a run writes while it trains: `metrics.jsonl`, a TensorBoard event file and a progress line on the terminal."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import socket
import struct
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from rl_training.errors import UserError

_LIVE_SECONDS, _PLAIN_SECONDS = 0.25, 5.0
_MOST_PENDING = 1 << 24  # bytes of rows or events that wait for a disk that takes no more
_WARNING = "warning: "
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_encode_row = json.JSONEncoder(allow_nan=False, default=float).encode  # default: numpy scalars and 0-dim tensors
_pack_float = struct.Struct("<f").pack


class RunLogger:
    """The metrics file, the event file and the terminal of one run.

    `append` continues the files of a run that is resumed: rows after `resume_step` are dropped, since they are going to
    be written again, and so are rows that were there only because the run ended (`last`) and a line that a kill left
    half written. What cannot be written (a full disk) waits until it can, with one warning; a run does not end for it.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str], *, console: bool = True, total_steps: int, append: bool = False,
        resume_step: int | None = None, tensorboard: bool = True, stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        elapsed = _trim_rows(self.path, resume_step) if append and self.path.exists() else 0.0
        self._clock, self._start = clock, clock() - elapsed
        self._stream = (stream or sys.stderr) if console else None
        self._live = self._stream is not None and self._stream.isatty()
        self._total, self._line, self._due = total_steps, "", -math.inf if self._stream else math.inf
        self._warned: set[str] = set()
        self._rows = _Appender(self.path, self._warn, fresh=not append)
        purge_from = resume_step + 1 if append and resume_step is not None else None
        self._events = _EventFile(folder, clock, purge_from, self._warn) if tensorboard else None

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def log(self, step: int, metrics: Mapping[str, Any], *, kind: str = "train", last: bool = False) -> None:
        """Append one row; values are numbers (numpy scalars and 0-dim tensors too).

        `last` marks a row that is not due but written because the run ends here; if it is resumed, the row goes.
        """
        head: dict[str, Any] = {"step": step, "kind": kind, "time": round(self._clock() - self._start, 4)}
        if last:
            head["last"] = True
        row = {**head, **metrics, **head}  # a metric named "step" must not hide the step
        try:
            text = _encode_row(row)
        except ValueError:  # a value that is not finite, which JSON cannot say
            text = _encode_row({key: _spell(value) for key, value in row.items()})
        self._rows.add(text.encode("ascii") + b"\n")
        self._rows.flush()
        if self._events:
            self._events.add(step, kind, metrics)

    def _warn(self, text: str) -> None:
        if text not in self._warned:  # once each
            self._warned.add(text)
            self.message(f"{_WARNING}{text}")

    @property
    def progress_due(self) -> bool:
        """Whether `progress` would draw now, for callers whose arguments cost something."""
        return self._clock() >= self._due

    def progress(
        self, step: int, steps_per_second: float, return_mean: float | None, losses: Mapping[str, Any] | None = None,
        *, force: bool = False,
    ) -> None:  # fmt: skip
        """Redraw the live line of a terminal, at most 4 times a second, or print a plain line every 5 seconds."""
        now = self._clock()
        if (now < self._due and not force) or self._stream is None:
            return
        self._due = now + (_LIVE_SECONDS if self._live else _PLAIN_SECONDS)
        text = self._describe(step, steps_per_second, return_mean, losses or {})
        if not self._live:
            self._print(text + "\n")
            return
        width = shutil.get_terminal_size().columns - 1
        text = f"{self._bar(step, width - len(text) - 1)} {text}"
        while len(text) > width and "  " in text:  # whole parts only: half a number reads as another number
            text = text.rpartition("  ")[0]
        text = text[:width]
        self._print("\r" + text.ljust(len(self._line)))
        self._line = text

    def message(self, text: str) -> None:
        """Print a line of its own above the live line; without a terminal, `warning: ...` becomes Python's own kind."""
        if self._stream is None and text.startswith(_WARNING):
            warnings.warn(text.removeprefix(_WARNING), stacklevel=3)
        blank = "\r" + " " * len(self._line) + "\r" if self._line else ""
        self._print(f"{blank}{text}\n{self._line}")

    def close(self) -> None:
        """Finish the files and the live line, and say what could not be written; closing twice is harmless."""
        self._rows.close()
        if self._events:
            self._events.close()
        if self._line:
            self._print("\n")
        self._line, self._stream, self._due = "", None, math.inf

    def _describe(self, step: int, rate: float, return_mean: float | None, losses: Mapping[str, Any]) -> str:
        left = (self._total - step) / rate if rate > 0 else math.inf
        parts = [f"{step:,}/{self._total:,}", f"{rate:,.0f} steps/s", f"eta {format_duration(left)}"]
        parts += [] if return_mean is None else [f"return {float(return_mean):.4g}"]
        parts += [f"{name} {float(value):.3g}" for name, value in itertools.islice(losses.items(), 3)]
        return f"{math.floor(100 * self._share(step)):3d}%  " + "  ".join(parts)

    def _share(self, step: int) -> float:
        return min(1.0, step / self._total) if self._total > 0 else 1.0

    def _bar(self, step: int, room: int) -> str:
        width = min(20, max(8, room))
        full, empty = "━╌" if "utf" in (getattr(self._stream, "encoding", None) or "").lower() else "#-"
        return (full * int(self._share(step) * width)).ljust(width, empty)

    def _print(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # a terminal that went away must not end a run
            self._stream, self._line, self._due = None, "", math.inf
        except RuntimeError:  # the message of a signal in the middle of another one
            return


def format_duration(seconds: float) -> str:
    """`h:mm:ss`, or dashes when the duration is not known."""
    if not math.isfinite(seconds):
        return "-:--:--"
    minutes, second = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`; a last line that a kill cut off is left out."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a run's metrics.jsonl.") from None
    rows = [_parse_row(line) for line in lines]
    for number, row in enumerate(rows[:-1], start=1):
        if row is None and lines[number - 1].strip():
            raise UserError(f"{path} is damaged in line {number}, which is not a row of metrics; remove that line.")
    return [{key: _unspell(value) for key, value in row.items()} for row in rows if row is not None]


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _trim_rows(path: Path, last_step: int | None) -> float:
    """Drop rows after `last_step`, rows marked `last`, and what is no row; returns the time of the last one kept."""
    kept, elapsed = path.with_name(f".{path.name}.tmp"), 0.0  # one writer: what a kill left is written over
    try:
        with open(path, "rb") as source, open(kept, "wb") as target:
            for line in source:
                row = _parse_row(line)
                if row is None or row.get("last") is True:
                    continue
                if last_step is None or row["step"] <= last_step:
                    target.write(line.rstrip() + b"\n")
                    elapsed = row["time"] if isinstance(row.get("time"), float) else elapsed
        os.replace(kept, path)
    finally:
        kept.unlink(missing_ok=True)
    return elapsed


def _spell(value: Any) -> Any:
    value = value if isinstance(value, str | int | float | None) else float(value)
    return repr(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def _unspell(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


class _Appender:
    """A file that grows by records; what the disk does not take waits for the next flush.

    It is unbuffered, so that a worker process inherits no half-full buffer of it.
    """

    def __init__(self, path: Path, warn: Callable[[str], None], *, fresh: bool = True) -> None:
        self._path, self._warn, self._mode = path, warn, "wb" if fresh else "ab"
        self._file: Any = None
        self._pending, self._unwritten = bytearray(), 0
        self.flush()

    def add(self, record: bytes) -> None:
        self._unwritten += 1
        if len(self._pending) < _MOST_PENDING:
            self._pending += record

    def flush(self) -> None:
        try:
            if self._file is not None and not os.fstat(self._file.fileno()).st_nlink:
                self._warn(f"{self._path} was deleted; a new one begins")
                self._file.close()
                self._file = None
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file, self._mode = open(self._path, self._mode, buffering=0), "ab"  # noqa: SIM115
            while self._pending:
                del self._pending[: self._file.write(self._pending)]
            self._unwritten = 0
        except OSError as error:
            self._warn(f"{self._path} cannot be written ({error.strerror or error}); training goes on")

    def close(self) -> None:
        if self._pending:
            self.flush()
        if self._pending:
            self._warn(f"{self._unwritten} records could not be written to {self._path}")
        if self._file is not None:
            self._file.close()
        self._file, self._pending = None, bytearray()


class _EventFile:
    """A TensorBoard event file of scalars: TFRecords of `Event` messages, encoded here.

    TensorBoard's own writer takes 90 µs for a row of 12 metrics (40 of them for a checksum in Python, in a thread that
    holds the interpreter) and 150 ms to import; this takes 15 and nothing.
    """

    _numbers = itertools.count()
    _flush_seconds = 5.0

    def __init__(
        self, folder: Path, clock: Callable[[], float], purge_from: int | None, warn: Callable[[str], None]
    ) -> None:
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(self._numbers)}"
        self._clock, self._due = clock, clock() + self._flush_seconds
        self._file = _Appender(folder / name, warn)
        self._tags: dict[tuple[str, str], bytes] = {}
        self._checksum = _Checksum()
        self._append(b"\x1a" + _sized(b"brain.Event:2"))
        if purge_from is not None:  # a SessionLog START tells TensorBoard to forget what came after this step
            self._append(b"\x10" + _varint(purge_from) + b"\x3a\x02\x08\x01")
        self.flush()

    def add(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        values = b"".join([self._scalar(kind, name, value) for name, value in metrics.items()])
        self._append(b"\x10" + _varint(step) + b"\x2a" + _sized(values))
        if self._clock() >= self._due:
            self.flush()

    def flush(self) -> None:
        self._file.flush()
        self._due = self._clock() + self._flush_seconds

    def close(self) -> None:
        self._file.close()

    def _scalar(self, kind: str, name: str, value: Any) -> bytes:
        start = self._tags.get((kind, name))
        if start is None:
            tag = b"\x0a" + _sized(f"{kind}/{name}".encode())
            start = self._tags[kind, name] = b"\x0a" + _varint(len(tag) + 5) + tag + b"\x15"
        try:
            return start + _pack_float(value)
        except OverflowError:  # beyond float32
            return start + _pack_float(math.copysign(math.inf, value))
        except struct.error:  # not a number
            return b""

    def _append(self, fields: bytes) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + fields
        size = struct.pack("<Q", len(event))
        self._file.add(b"".join((size, self._checksum(size), event, self._checksum(event))))


def _varint(number: int) -> bytes:
    groups = []
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*groups, number])


def _sized(data: bytes) -> bytes:
    return _varint(len(data)) + data


class _Checksum:
    """The masked CRC32C of a TFRecord, of data of at least 4 bytes.

    A CRC is linear over XOR, so it is the XOR of one table entry per byte: `table[distance from the end, byte]`.
    """

    def __init__(self) -> None:
        self._resize(512)

    def __call__(self, data: bytes) -> bytes:
        if len(data) > len(self._offsets):
            self._resize(1 << len(data).bit_length())
        entries = self._offsets[-len(data) :] + np.frombuffer(data, np.uint8)
        entries[:4] ^= 0xFF  # the register starts as all ones
        crc = int(np.bitwise_xor.reduce(self._table[entries])) ^ 0xFFFFFFFF
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    def _resize(self, size: int) -> None:
        first = np.arange(256, dtype=np.uint32)
        for _ in range(8):
            first = np.where(first & 1, (first >> 1) ^ np.uint32(0x82F63B78), first >> 1)
        rows = [first]
        while len(rows) < size:
            rows.append((rows[-1] >> 8) ^ first[rows[-1] & 0xFF])
        self._table, self._offsets = np.concatenate(rows), np.arange(size)[::-1] * 256
