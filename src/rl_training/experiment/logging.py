"""What a run writes while it trains: `metrics.jsonl`, records for its `loggers`, and a progress line on a terminal."""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from rl_training.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress
    from tensorboard.compat.proto.event_pb2 import Event

_LIVE_SECONDS, _PLAIN_SECONDS = 0.25, 5.0
_MOST_PENDING = 1 << 24  # bytes of rows or events that wait while the disk is full
_WARNING = "warning: "
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_encode_row = json.JSONEncoder(allow_nan=False, default=float).encode  # default: numpy scalars and 0-dim tensors


class RunLogger:
    """The metrics file, the terminal and the `loggers` of one run: TensorBoard's event file, wandb, mlflow.

    `append` continues the files of a resumed run. It drops rows after `resume_step`, which will be written again, rows
    that were written only because the run ended (`last`), and a half-written last line. What cannot be written (a full
    disk) waits until it can, with one warning; this never ends a run.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str], *, console: bool = True, total_steps: int, append: bool = False,
        resume_step: int | None = None, loggers: Sequence[str] = ("tensorboard",),
        config: Mapping[str, Any] | None = None, stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        elapsed = _trim_rows(self.path, resume_step) if append and self.path.exists() else 0.0
        self._clock, self._start = clock, clock() - elapsed
        self._stream = (stream or sys.stderr) if console else None
        dumb = os.environ.get("TERM") in ("dumb", "unknown")  # it cannot move its cursor
        self._live = self._stream is not None and self._stream.isatty() and not dumb
        self._line: Progress | None = None
        self._doing = ""
        self._total, self._due = total_steps, -math.inf if self._stream else math.inf
        self._warned: set[str] = set()
        self._rows = _Appender(self.path, self._warn, fresh=not append)
        purge_from = resume_step + 1 if append and resume_step is not None else None
        self._sinks: list[_EventFile | _Service] = []
        if "tensorboard" in loggers:
            self._sinks.append(_EventFile(folder, clock, purge_from, self._warn))
        self._sinks += [_Service(name, folder, config or {}, self._warn) for name in SERVICES if name in loggers]

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def log(self, step: int, metrics: Mapping[str, Any], *, kind: str = "train", last: bool = False) -> None:
        """Append one row; values are numbers (numpy scalars and 0-dim tensors too).

        `last` marks a row that is not due but written because the run ends here; a resume drops it.
        """
        head: dict[str, Any] = {"step": step, "kind": kind, "time": round(self._clock() - self._start, 4)}
        if last:
            head["last"] = True
        row = {**head, **metrics, **head}  # a metric named "step" must not hide the step
        try:
            text = _encode_row(row)
        except ValueError:  # a value that is not finite, which JSON cannot represent
            text = _encode_row({key: _spell(value) for key, value in row.items()})
        self._rows.write(text.encode("ascii") + b"\n")
        self._rows.flush()
        for sink in self._sinks:
            sink.add(step, kind, metrics)

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
        workers: Sequence[str] = (), doing: str = "",
    ) -> None:  # fmt: skip
        """Redraw the live line of a terminal, at most 4 times a second, or print a plain line every 5 seconds."""
        now = self._clock()
        if now < self._due or self._stream is None:
            return
        self._due, self._doing = now + (_LIVE_SECONDS if self._live else _PLAIN_SECONDS), doing
        self._print(self._describe(step, steps_per_second, return_mean, losses or {}, workers, doing), step)

    def message(self, text: str) -> None:
        """Print a separate line above the live line; without a terminal, `warning: ...` becomes a Python warning."""
        if self._stream is None and text.startswith(_WARNING):
            warnings.warn(text.removeprefix(_WARNING), stacklevel=3)
        self._print(text)

    def close(self) -> None:
        """Finish the files and the live line, and say what could not be written; closing twice is harmless."""
        self._rows.close()
        for sink in self._sinks:
            sink.close()
        if self._line is not None:
            with suppress(OSError, ValueError):
                ended = self._line.tasks[0].description.replace(f"  {self._doing}  ", "  ") if self._doing else None
                self._line.update(self._line.task_ids[0], description=ended)  # it does nothing anymore
                self._line.stop()
        self._line, self._stream, self._due = None, None, math.inf

    def _describe(
        self, step: int, rate: float, return_mean: float | None, losses: Mapping[str, Any], workers: Sequence[str],
        doing: str,
    ) -> str:  # fmt: skip
        left = (self._total - step) / rate if rate > 0 else math.inf
        share = min(1.0, step / self._total) if self._total > 0 else 1.0
        parts = [f"{math.floor(100 * share):3d}%", f"{step:,}/{self._total:,}", *([doing] if doing else [])]
        parts += [f"{rate:,.0f} steps/s", f"eta {format_duration(left)}"]
        parts += [] if return_mean is None else [f"return {float(return_mean):.4g}"]
        parts += [*workers]
        parts += [f"{name} {float(value):.3g}" for name, value in itertools.islice(losses.items(), 3)]
        return "  ".join(parts)

    def _print(self, text: str, step: int | None = None) -> None:
        """Print a separate line, or the progress line of this step."""
        if self._stream is None:
            return
        try:
            if self._live and self._line is None and step is not None:
                self._line = _start_line(self._stream, self._total)
            if self._line is None:
                print(text, file=self._stream, flush=True)
            elif step is None:
                self._line.console.print(text, soft_wrap=True)
            else:
                while len(text) > self._line.console.width - 21 and "  " in text:
                    text = text.rpartition("  ")[0]  # whole parts only: half a number reads as another number
                self._line.update(self._line.task_ids[0], completed=step, description=text, refresh=True)
        except (OSError, ValueError):  # a terminal that went away must not end a run
            self._stream, self._line, self._due = None, None, math.inf
        except RuntimeError:  # the message of a signal in the middle of another one
            return


def _start_line(stream: TextIO, total: int) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="crop"))
    console = Console(file=stream, force_terminal=True, force_jupyter=False, markup=False, highlight=False)
    line = Progress(  # without a thread, and without redirecting other output
        BarColumn(20), text, console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    )
    line.add_task("", total=total)
    line.start()
    console.show_cursor()  # a killed run must not leave a terminal without one
    return line


class SilentLogger(RunLogger):
    """For a process whose run is logged by another one."""

    progress_due = False

    def __init__(self) -> None:
        pass

    def log(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    progress = message = log

    def close(self) -> None:
        """Nothing to close."""


def format_duration(seconds: float) -> str:
    """`h:mm:ss`, or dashes when the duration is not known."""
    if not math.isfinite(seconds):
        return "-:--:--"
    minutes, second = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`; a last line cut off by a kill is left out."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a run's metrics.jsonl.") from None
    rows = [parse_row(line) for line in lines]
    for number, row in enumerate(rows[:-1], start=1):
        if row is None and lines[number - 1].strip():
            raise UserError(f"{path} is damaged in line {number}, which is not a row of metrics; remove that line.")
    return [{key: _unspell(value) for key, value in row.items()} for row in rows if row is not None]


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The row in a line, or None if there is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _trim_rows(path: Path, last_step: int | None) -> float:
    """Drop rows after `last_step`, rows marked `last`, and lines that are not rows; returns the last row's time."""
    kept, elapsed = path.with_name(f".{path.name}.tmp"), 0.0  # one writer: a leftover file is overwritten
    try:
        with open(path, "rb") as source, open(kept, "wb") as target:
            for line in source:
                row = parse_row(line)
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
    """A file to which records are appended; what cannot be written waits for the next flush.

    It is unbuffered, so that a worker process inherits no half-full buffer.
    """

    def __init__(self, path: Path, warn: Callable[[str], None], *, fresh: bool = True) -> None:
        self._path, self._warn, self._mode = path, warn, "wb" if fresh else "ab"
        self._file: Any = None
        self._pending, self._unwritten = bytearray(), 0
        self.flush()

    def write(self, record: bytes) -> None:
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
    """A TensorBoard event file of scalars.

    TensorBoard's own writer has a thread that ends at the first failed write, where an `_Appender` waits for the disk.
    It also takes 0.1 s to import, and its checksum 100 µs for a row of 12 metrics.
    """

    _numbers = itertools.count()
    _flush_seconds = 5.0

    def __init__(
        self, folder: Path, clock: Callable[[], float], purge_from: int | None, warn: Callable[[str], None]
    ) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(self._numbers)}"
        self._clock, self._make_event, self._checksum = clock, Event, _Checksum()
        self._file = _Appender(folder / name, warn)
        self._append(Event(file_version="brain.Event:2"))
        if purge_from is not None:  # tells TensorBoard to forget what came after this step
            self._append(Event(step=purge_from, session_log=SessionLog(status=SessionLog.START)))
        self.flush()

    def add(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        event = self._make_event(step=step)
        add_value = event.summary.value.add
        for name, value in _numbers(kind, metrics):
            add_value(tag=name, simple_value=value)
        self._append(event)
        if self._clock() >= self._due:
            self.flush()

    def flush(self) -> None:
        self._file.flush()
        self._due = self._clock() + self._flush_seconds

    def close(self) -> None:
        self._file.close()

    def _append(self, event: Event) -> None:
        event.wall_time = time.time()
        data = event.SerializeToString()
        size = len(data).to_bytes(8, "little")
        self._file.write(b"".join((size, self._checksum(size), data, self._checksum(data))))


def _numbers(kind: str, metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The metrics that are numbers, under the name `kind/metric`."""
    for name, value in metrics.items():
        try:
            yield f"{kind}/{name}", float(value)
        except (TypeError, ValueError):
            continue


class _Service:
    """A tracking service next to the run's own files; if it fails, the run warns once and continues without it."""

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        self.name, self._warn, self._client = name, warn, None
        self._client = self._try(lambda: SERVICES[name](folder.resolve(), config))

    def add(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        client, numbers = self._client, dict(_numbers(kind, metrics))
        if client is not None and numbers:
            self._try(lambda: client.add(step, numbers))

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            self._try(client.close)

    def _try(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # a server, a package or a disk can fail in any way
            self._client = None
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._warn(f"{self.name} failed ({reason}); the run goes on without it")
            return None


class _Wandb:
    """Weights & Biases: offline, in the run's folder, unless WANDB_MODE or a WANDB_API_KEY says otherwise."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self._run = wandb.init(
            project="rl-training", name=folder.name, id=folder.name, resume="allow", dir=str(folder), mode=mode,
            config=dict(config), settings=wandb.Settings(silent=True),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, "step": step})

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """MLflow: in the file `mlflow.db` next to the run's folder, unless MLFLOW_TRACKING_URI is set."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric = Metric
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.parent / 'mlflow.db'}")
        experiment = self._client.get_experiment_by_name("rl-training")
        number = self._client.create_experiment("rl-training") if experiment is None else experiment.experiment_id
        found = self._client.search_runs([number], f"tags.folder = '{folder.name}'")  # of a run that is resumed
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(number, run_name=folder.name, tags={"folder": folder.name}).info.run_id
        for name, value in config.items():
            self._client.log_param(self._run, name, str(value)[:500])

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._run, [self._metric(name, value, now, step) for name, value in numbers.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run)


SERVICES: dict[str, Callable[[Path, Mapping[str, Any]], Any]] = {"wandb": _Wandb, "mlflow": _MLflow}


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
