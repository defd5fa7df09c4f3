"""The output of a run while it trains: `metrics.jsonl`, its `loggers` (TensorBoard, wandb, MLflow), a progress line."""

from __future__ import annotations

import itertools
import math
import os
import socket
import struct
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from rl_training.errors import first_line, printable
from rl_training.record.json_lines import json_line, wants_json
from rl_training.record.metrics_file import Appender, format_row, tagged_numbers, trim_rows
from rl_training.safe_files import refuse_link

if TYPE_CHECKING:
    from rich.progress import Progress
    from tensorboard.compat.proto.event_pb2 import Event

_LIVE_SECONDS, _PLAIN_SECONDS = 0.25, 5.0
_BAR, _NARROW = 20, 80  # columns of the bar, and of a terminal that has no room for one
_WARNING = "warning: "


class RunLogger:
    """The metrics file, the terminal and the `loggers` of one run; a logger that fails is left out, with one warning.

    `append` continues the files of a resumed run. It drops rows after `resume_step`, which will be written again, rows
    that were written only because the run ended (`last`), and a half-written last line. Rows that cannot be written (a
    full disk) wait until they can, with one warning; this never ends a run.
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
        elapsed = trim_rows(self.path, resume_step) if append else 0.0
        self._clock, self._start = clock, clock() - elapsed
        self._stream = (stream or sys.stderr) if console else None
        dumb = os.environ.get("TERM") in ("dumb", "unknown")  # such a terminal cannot move its cursor
        self._json = wants_json()
        self._live = self._stream is not None and self._stream.isatty() and not dumb and not self._json
        self._line: Progress | None = None
        self._doing, self._shown = "", -1  # the step of the progress line
        self._total, self._due = total_steps, -math.inf if self._stream else math.inf
        self._warned: set[str] = set()
        self._rows = Appender(self.path, self._warn, fresh=not append)
        purge_from = resume_step + 1 if append and resume_step is not None else None
        makers: dict[str, Callable[[], Any]] = {
            "tensorboard": partial(EventFile, folder, clock, purge_from, self._warn),
            "wandb": partial(WandbRun, folder.resolve(), config or {}),
            "mlflow": partial(MLflowRun, folder.resolve(), config or {}),
        }
        self._sinks: dict[str, Any] = {}
        for name in loggers:
            if (sink := self._try(name, makers[name])) is not None:
                self._sinks[name] = sink

    def log(self, step: int, metrics: Mapping[str, Any], *, kind: str = "train", last: bool = False) -> None:
        """Append one row; values are numbers (numpy scalars and 0-dim tensors too).

        `last` marks a row that is not due but written because the run ends here; a resume drops it.
        """
        head: dict[str, Any] = {"step": step, "kind": kind, "time": round(self._clock() - self._start, 4)}
        if last:
            head["last"] = True
        row = {**head, **metrics, **head}  # a metric named "step" must not hide the step
        self._rows.write(format_row(row))
        self._rows.flush()
        for name, sink in list(self._sinks.items()):
            self._try(name, partial(sink.add, step, kind, metrics))

    def _try(self, name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # a server, a package or a disk can fail in any way
            self._sinks.pop(name, None)
            self._warn(f"{name} failed ({first_line(error)}); the run continues without it")
            return None

    def _warn(self, text: str) -> None:
        if text not in self._warned:  # once each
            self._warned.add(text)
            self.message(f"{_WARNING}{text}")

    @property
    def progress_due(self) -> bool:
        """Whether `progress` would draw now, for callers whose arguments are expensive to compute."""
        return self._clock() >= self._due

    def progress(
        self, step: int, steps_per_second: float, seconds_left: float, return_mean: float | None,
        losses: Mapping[str, Any] | None = None, doing: str = "", *, last: bool = False,
    ) -> None:  # fmt: skip
        """Redraw the live line of a terminal, at most 4 times a second, or print a plain line every 5 seconds.

        The `last` one of a run is always shown, unless the line before it says the same.
        """
        now = self._clock()
        if self._stream is None or (step == self._shown and not self._doing if last else now < self._due):
            return
        self._shown = step
        self._due, self._doing = now + (_LIVE_SECONDS if self._live else _PLAIN_SECONDS), doing
        if self._json:
            facts: dict[str, Any] = {"step": step, "total": self._total, "steps_per_second": steps_per_second}
            facts |= {"seconds_left": seconds_left, "return_mean": return_mean, "doing": doing or None}
            self._print(json_line("progress", **facts, **(losses or {})))
            return
        share = min(1.0, step / self._total) if self._total > 0 else 1.0
        parts = [f"{math.floor(100 * share):3d}%", f"{step:,}/{self._total:,}", *([doing] if doing else [])]
        parts += [f"{steps_per_second:,.0f} steps/s", f"eta {format_duration(seconds_left)}"]
        parts += [] if return_mean is None else [f"return {float(return_mean):.4g}"]
        parts += [f"{name} {float(value):.3g}" for name, value in itertools.islice((losses or {}).items(), 3)]
        self._print("  ".join(parts), step)

    def message(self, text: str) -> None:
        """Print a separate line above the live line; without a terminal, `warning: ...` becomes a Python warning."""
        if self._stream is None and text.startswith(_WARNING):
            warnings.warn(text.removeprefix(_WARNING), stacklevel=3)
        if self._json:
            kind = "warning" if text.startswith(_WARNING) else "message"
            text = json_line(kind, message=printable(text.removeprefix(_WARNING)))
        self._print(text)

    def close(self) -> None:
        """Finish the files and the live line, and report what could not be written; closing twice is harmless."""
        self._rows.close()
        while self._sinks:
            name, sink = self._sinks.popitem()
            self._try(name, sink.close)
        if self._line is not None:
            with suppress(OSError, ValueError):
                ended = self._line.tasks[0].description.replace(f"  {self._doing}  ", "  ") if self._doing else None
                self._line.update(self._line.task_ids[0], description=ended)  # it is no longer doing anything
                self._line.stop()
        self._line, self._stream, self._due = None, None, math.inf

    def _print(self, text: str, step: int | None = None) -> None:
        """Print a separate line, or the progress line of this step."""
        if self._stream is None:
            return
        text = printable(text)
        try:
            if self._live and self._line is None and step is not None:
                self._line = _start_line(self._stream, self._total)
            if self._line is None:
                print(text, file=self._stream, flush=True)
            elif step is None:
                self._line.console.print(text, soft_wrap=True)
            else:
                bar = _BAR + 1 if len(self._line.columns) > 1 else 0
                while len(text) > self._line.console.width - bar and "  " in text.strip():
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
    columns = [text] if console.width < _NARROW else [BarColumn(_BAR), text]  # the text has the share too
    line = Progress(  # without a thread, and without redirecting other output
        *columns, console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    )
    line.add_task("", total=total)
    line.start()
    console.show_cursor()  # a killed run must not leave a terminal without one
    return line


class SilentLogger(RunLogger):
    """A logger that does nothing, for a process whose run another process logs."""

    progress_due = False

    def __init__(self) -> None:
        pass

    def log(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    progress = message = log

    def close(self) -> None:
        """Nothing to close."""


class WandbRun:
    """Weights & Biases: offline, in the run's folder, unless WANDB_MODE or a WANDB_API_KEY says otherwise."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self._run = wandb.init(
            project="rl-training", name=folder.name, id=folder.name, resume="allow", dir=str(folder), mode=mode,
            config=dict(config), tags=config.get("tags"), settings=wandb.Settings(silent=True),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")

    def add(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Add the metrics that are numbers."""
        self._run.log({**dict(tagged_numbers(kind, metrics)), "step": step})

    def close(self) -> None:
        """End the run there."""
        self._run.finish()


class MLflowRun:
    """MLflow: in the file `mlflow.db` next to the run's folder, unless MLFLOW_TRACKING_URI is set."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric = Metric
        refuse_link(folder.parent / "mlflow.db")
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.parent / 'mlflow.db'}")
        experiment = self._client.get_experiment_by_name("rl-training")
        number = self._client.create_experiment("rl-training") if experiment is None else experiment.experiment_id
        found = self._client.search_runs([number], f"tags.folder = '{folder.name}'")  # of a run that is resumed
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        tags = {"folder": folder.name, "tags": ", ".join(config.get("tags", ()))}
        self._run = self._client.create_run(number, run_name=folder.name, tags=tags).info.run_id
        for name, value in config.items():
            self._client.log_param(self._run, name, str(value)[:500])

    def add(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Add the metrics that are numbers."""
        now = int(time.time() * 1000)
        numbers = [self._metric(name, value, now, step) for name, value in tagged_numbers(kind, metrics)]
        self._client.log_batch(self._run, numbers)

    def close(self) -> None:
        """End the run there."""
        self._client.set_terminated(self._run)


def format_duration(seconds: float) -> str:
    """`h:mm:ss`, or dashes when the duration is not known."""
    if not math.isfinite(seconds):
        return "-:--:--"
    minutes, second = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


class EventFile:
    """A TensorBoard event file of scalars.

    TensorBoard's own `EventFileWriter` has a thread that ends at the first failed write, where an `Appender` waits
    for the disk. Its `RecordWriter` alone takes 0.13 s to import, and 85 µs for a row of 12 metrics instead of 5 µs.
    """

    _numbers = itertools.count()
    _flush_seconds = 5.0

    def __init__(
        self, folder: Path, clock: Callable[[], float], purge_from: int | None, warn: Callable[[str], None]
    ) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(self._numbers)}"
        self._clock, self._make_event, self._checksum = clock, Event, _Checksum()
        self._file = Appender(folder / name, warn)
        self._append(Event(file_version="brain.Event:2"))
        if purge_from is not None:  # tells TensorBoard to forget everything after this step
            self._append(Event(step=purge_from, session_log=SessionLog(status=SessionLog.START)))
        self.flush()

    def add(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Add the metrics that are numbers."""
        event = self._make_event(step=step)
        add_value = event.summary.value.add
        for name, value in tagged_numbers(kind, metrics):
            add_value(tag=name, simple_value=value)
        self._append(event)
        if self._clock() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Write all waiting events."""
        self._file.flush()
        self._due = self._clock() + self._flush_seconds

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, event: Event) -> None:
        event.wall_time = time.time()
        data = event.SerializeToString()
        size = len(data).to_bytes(8, "little")
        self._file.write(b"".join((size, self._checksum(size), data, self._checksum(data))))


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
