"""What a run writes: metrics rows that survive a kill and a resume, TensorBoard events, one progress line."""

from __future__ import annotations

import errno
import io
import json
import math
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resume_cases import tiny
from rl_training import safe_files
from rl_training.errors import UserError
from rl_training.record.logger import RunLogger, format_duration
from rl_training.record.metrics_file import read_metrics
from rl_training.run.workflows import train


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def plain(text: str) -> str:
    """What a terminal shows of it, a line per redraw: without colors and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def make(folder: Path, **changes: Any) -> RunLogger:
    return RunLogger(folder, **{"console": False, "total_steps": 1000, **changes})


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_a_row_holds_step_kind_time_and_metrics(tmp_path: Path) -> None:
    clock = Clock()
    with closing(make(tmp_path / "new" / "run", clock=clock)) as logger:
        clock.now += 2.5
        logger.log(10, {"loss": 0.1, "episodes": 3})
        logger.log(20, {"return_mean": 1.5}, kind="eval")
    assert read_metrics(tmp_path / "new" / "run" / "metrics.jsonl") == [
        {"step": 10, "kind": "train", "time": 2.5, "loss": 0.1, "episodes": 3},
        {"step": 20, "kind": "eval", "time": 2.5, "return_mean": 1.5},
    ]


@pytest.mark.parametrize(
    ("value", "text", "read"),
    [
        (math.inf, '"inf"', math.inf),
        (-math.inf, '"-inf"', -math.inf),
        (np.float64("-inf"), '"-inf"', -math.inf),
        (np.float32("inf"), '"inf"', math.inf),
        (torch.tensor(math.inf), '"inf"', math.inf),
        (np.float32(0.5), "0.5", 0.5),
        (torch.tensor(0.5), "0.5", 0.5),
        (np.int64(3), "3.0", 3.0),
        (1e300, "1e+300", 1e300),
        (True, "true", True),
        (None, "null", None),
        ("budget", '"budget"', "budget"),
    ],
)
def test_every_value_keeps_the_file_valid_json(tmp_path: Path, value: Any, text: str, read: Any) -> None:
    with closing(make(tmp_path)) as logger:
        logger.log(1, {"x": value, "after": 2})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert f'"x": {text}, "after": 2' in line
    assert json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["x"] == read


def test_nan_comes_back(tmp_path: Path) -> None:
    with closing(make(tmp_path)) as logger:
        logger.log(1, {"x": math.nan})
    assert '"x": "nan"' in (tmp_path / "metrics.jsonl").read_text()
    assert math.isnan(read_metrics(tmp_path / "metrics.jsonl")[0]["x"])


def test_a_metric_cannot_hide_the_step(tmp_path: Path) -> None:
    with closing(make(tmp_path, clock=Clock())) as logger:
        logger.log(1, {"step": 99, "kind": 5.0, "time": 7.0})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "kind": "train", "time": 0.0}]


def test_a_row_is_in_the_file_at_once(tmp_path: Path) -> None:
    logger = make(tmp_path)
    logger.log(1, {"x": 1.0})
    assert len(read_metrics(logger.path)) == 1
    logger.close()
    logger.close()


def test_a_new_run_starts_a_new_file(tmp_path: Path) -> None:
    for step in (1, 2):
        with closing(make(tmp_path)) as logger:
            logger.log(step, {})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [2]


# ---- kills and resumes -----------------------------------------------------------------------------------------------


def write_rows(path: Path, steps: list[int], tail: bytes = b"") -> None:
    rows = [json.dumps({"step": step, "kind": "train", "time": float(step)}) + "\n" for step in steps]
    path.write_bytes("".join(rows).encode() + tail)


def test_reading_leaves_out_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 3, "kind": "train", "time": 1.0, "x": 1.5}'
    for length in range(len(whole)):
        write_rows(path, [1, 2], whole[:length])
        assert [row["step"] for row in read_metrics(path)] == [1, 2]
    write_rows(path, [1, 2], whole)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_reading_names_a_damaged_line_and_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n\n{"st\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged in line 3"):
        read_metrics(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match=r"nothing cannot be read \(No such file"):
        read_metrics(tmp_path / "nothing")


@pytest.mark.parametrize("tail", [b"", b'{"step": 4', b'{"step": 4}', b"\x00\x00", b'"text"', b"\xff{"])
@pytest.mark.parametrize(("resume_step", "kept"), [(2, [1, 2]), (0, []), (9, [1, 2, 3]), (None, [1, 2, 3])])
def test_a_resumed_run_has_every_step_once(
    tmp_path: Path, tail: bytes, resume_step: int | None, kept: list[int]
) -> None:
    write_rows(tmp_path / "metrics.jsonl", [1, 2, 3], tail)
    if tail == b'{"step": 4}' and resume_step in (9, None):
        kept = [*kept, 4]
    with closing(make(tmp_path, append=True, resume_step=resume_step)) as logger:
        logger.log(50, {"x": 1.0})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [*kept, 50]
    assert not list(tmp_path.glob(".*"))


def test_a_resumed_run_continues_the_clock(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics.jsonl", [1, 2, 3])
    clock = Clock()
    with closing(make(tmp_path, append=True, resume_step=2, clock=clock)) as logger:
        clock.now += 10
        logger.log(3, {})
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["time"] == 12.0


def test_appending_to_nothing_starts_a_file(tmp_path: Path) -> None:
    with closing(make(tmp_path, append=True, resume_step=5)) as logger:
        logger.log(6, {})
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_the_events(tmp_path: Path) -> None:
    with closing(make(tmp_path)) as logger:
        logger.log(0, {"loss": 0.5, "huge": 1e300, "low": -1e300, "none": None, "why": "x"})
        logger.log(2**40, {"loss": torch.tensor(0.25)})
        logger.log(7, {f"{number}" * 100: np.float32(number) for number in range(30)}, kind="é" * 100)
    scalars = read_scalars(tmp_path)
    assert scalars["train/loss"] == [(0, 0.5), (2**40, 0.25)]
    assert scalars["train/huge"] == [(0, math.inf)]
    assert scalars["train/low"] == [(0, -math.inf)]
    assert scalars["é" * 100 + "/" + "7" * 100] == [(7, 7.0)]
    assert len(scalars) == 33


def test_every_event_has_a_right_checksum(tmp_path: Path) -> None:
    reference = pytest.importorskip("tensorboard.compat.tensorflow_stub.pywrap_tensorflow").masked_crc32c
    with closing(make(tmp_path)) as logger:
        for size in range(40):
            logger.log(size, {"x" * number: float(number) for number in range(size)})
    (path,) = tmp_path.glob("events.out.tfevents.*")
    data, records = path.read_bytes(), 0
    while data:
        size = int.from_bytes(data[:8], "little")
        assert int.from_bytes(data[8:12], "little") == reference(data[:8])
        assert int.from_bytes(data[12 + size : 16 + size], "little") == reference(data[12 : 12 + size])
        data, records = data[16 + size :], records + 1
    assert records == 41


def test_tensorboard_forgets_what_a_resume_repeats(tmp_path: Path) -> None:
    with closing(make(tmp_path)) as logger:
        for step in (1, 2, 3, 4):
            logger.log(step, {"loss": 0.0})
    with closing(make(tmp_path, append=True, resume_step=2)) as logger:
        logger.log(3, {"loss": 1.0})
    assert read_scalars(tmp_path)["train/loss"] == [(1, 0.0), (2, 0.0), (3, 1.0)]


def test_events_reach_the_file_every_few_seconds(tmp_path: Path) -> None:
    clock = Clock()
    logger = make(tmp_path, clock=clock)
    logger.log(1, {"loss": 0.0})
    assert read_scalars(tmp_path) == {}
    clock.now += 6
    logger.log(2, {"loss": 0.0})
    assert read_scalars(tmp_path) == {"train/loss": [(1, 0.0), (2, 0.0)]}
    logger.close()


# ---- what cannot be written ------------------------------------------------------------------------------------------


def test_rows_and_events_wait_for_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is there once and whole afterwards; a full disk takes a part of a row before it refuses the rest."""
    full = False

    class Disk:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.file = open(*arguments, **options)  # noqa: SIM115

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, data: Any) -> int:
            if full and len(data) < 50:
                raise OSError(errno.ENOSPC, "No space left on device")
            return int(self.file.write(data[:20] if full else data))

    monkeypatch.setattr(safe_files, "open", Disk, raising=False)
    screen = io.StringIO()
    logger = make(tmp_path, console=True, stream=screen)
    for step in range(5):
        full = step in (1, 2, 3)
        logger.log(step, {"loss": float(step), "a": 1.0})
        logger._sinks["tensorboard"].flush()
    logger.close()
    assert screen.getvalue().count("cannot be written (No space left on device); training continues") == 2  # both files
    assert [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert read_scalars(tmp_path)["train/loss"] == [(step, float(step)) for step in range(5)]


def test_what_was_never_written_is_said_at_the_end(tmp_path: Path) -> None:
    screen = io.StringIO()
    logger = make(tmp_path, console=True, stream=screen, loggers=())
    logger._rows._file.close()
    logger._rows._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    logger.log(1, {"loss": 1.0})
    logger.log(2, {"loss": 1.0})
    logger.close()
    logger.close()
    assert screen.getvalue().count(f"2 records could not be written to {tmp_path / 'metrics.jsonl'}") == 1


def test_a_deleted_folder_begins_again(tmp_path: Path) -> None:
    screen = io.StringIO()
    logger = make(tmp_path / "run", console=True, stream=screen)
    logger.log(1, {"loss": 1.0})
    shutil.rmtree(tmp_path / "run")
    logger.log(2, {"loss": 2.0})
    logger.close()
    assert "metrics.jsonl was deleted; a new one is started" in screen.getvalue()
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [2]


def test_a_folder_without_room_for_events_still_gets_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if "tfevents" in path.name:
            raise OSError(errno.EACCES, "Permission denied")
        return open(path, *arguments, **options)

    monkeypatch.setattr(safe_files, "open", refuse, raising=False)
    with closing(make(tmp_path, console=True, stream=io.StringIO())) as logger:
        logger.log(1, {"loss": 1.0})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_a_signal_in_the_middle_of_a_line_breaks_nothing(tmp_path: Path) -> None:
    class Busy(io.StringIO):
        def write(self, text: str) -> int:
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    with closing(make(tmp_path, console=True, stream=Busy())) as logger:
        logger.message("stopping after this update")


def test_tensorboard_can_be_left_out(tmp_path: Path) -> None:
    with closing(make(tmp_path, loggers=())) as logger:
        logger.log(1, {"loss": 0.0})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


# ---- progress --------------------------------------------------------------------------------------------------------


def test_the_live_line_is_redrawn_in_place_at_most_four_times_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    clock, stream = Clock(), Terminal()
    logger = make(tmp_path, console=True, clock=clock, stream=stream)
    for call in range(100):  # 10 seconds
        logger.progress(call * 10, 50.0, 3.0, 21.5, {"policy_loss": 0.123456})
        clock.now += 0.1
    lines = plain(stream.getvalue()).split("\r")[1:]
    assert 30 <= len(lines) <= 41
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")  # a kill leaves the cursor
    logger.close()
    assert plain(stream.getvalue()).endswith("\n")


def test_the_last_line_is_that_of_the_last_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines come every 5 seconds, and a run may end 4 seconds after one."""
    train(tiny("a2c", tmp_path, eval_episodes=0), console=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if "steps/s" in line]
    assert [line.split()[1] for line in lines] == ["8/128", "128/128"]


def test_the_last_line_is_not_repeated(tmp_path: Path) -> None:
    stream, clock = io.StringIO(), Clock()
    logger = make(tmp_path, console=True, stream=stream, clock=clock)
    for last in (False, False, True, True):
        logger.progress(10, 50.0, 3.0, 21.5, last=last)
    logger.progress(20, 50.0, 3.0, 21.5, last=True)
    clock.now += 6
    logger.progress(20, 50.0, 3.0, 21.5, doing="evaluating")
    logger.progress(20, 50.0, 3.0, 21.5, last=True)
    lines = stream.getvalue().splitlines()
    assert [(line.split()[1][:3], "evaluating" in line) for line in lines] == [
        ("10/", False), ("20/", False), ("20/", True), ("20/", False),
    ]  # fmt: skip
    logger.close()


def test_the_live_line_says_what_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    logger = make(tmp_path, console=True, total_steps=100_000, stream=stream)
    losses = {"policy_loss": torch.tensor(0.123456), "value_loss": 2.0, "entropy": math.nan, "fourth": 1.0}
    logger.progress(25_000, 1234.4, 60.8, 21.53, losses)
    bar, line = plain(stream.getvalue()).rpartition("\r")[2].split("  ", 1)
    assert bar == "━━━━━╺" + "━" * 14
    assert line.split("  ") == [
        "25%", "25,000/100,000", "1,234 steps/s", "eta 0:01:01", "return 21.53", "policy_loss 0.123", "value_loss 2",
        "entropy nan",
    ]  # fmt: skip


@pytest.mark.parametrize("columns", [20, 60])
def test_the_live_line_fits_the_terminal_and_erases_a_longer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    clock, stream = Clock(), Terminal()
    logger = make(tmp_path, console=True, clock=clock, stream=stream)
    logger.progress(999, 1e9, 0.0, 1234.5, {"loss": 1.0})
    clock.now += 1
    logger.progress(1, 1, 999.0, None)
    logger.message("word " * 30)
    *_, first, second, _ = plain(stream.getvalue()).split("\r")
    assert len(first) <= columns
    assert len(second) <= columns
    assert stream.getvalue().count("\r\x1b[2K") == 3  # what was there is erased
    assert "word " * 30 in plain(stream.getvalue())  # and a message is not broken up


def test_a_message_stands_above_the_live_line(tmp_path: Path) -> None:
    stream = Terminal()
    logger = make(tmp_path, console=True, stream=stream)
    logger.message("before")
    assert stream.getvalue() == "before\n"
    logger.progress(1, 1.0, 999.0, 0.0)
    live = plain(stream.getvalue()).split("\r")[1]
    logger.message("saved to [run]")
    assert plain(stream.getvalue()).endswith(f"\r{live}\rsaved to [run]\n{live}")


def test_the_live_line_of_a_run_that_ended_does_nothing_any_more(tmp_path: Path) -> None:
    stream = Terminal()
    logger = make(tmp_path, console=True, stream=stream)
    logger.progress(1000, 1.0, 0.0, 0.0, doing="evaluating")
    assert "evaluating" in plain(stream.getvalue())
    logger.close()
    last = plain(stream.getvalue()).split("\r")[-1]
    assert "1,000/1,000  1 steps/s" in last
    assert "evaluating" not in last


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_without_a_terminal_there_is_a_plain_line_every_five_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: Any
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    clock, stream = Clock(), stream()
    logger = make(tmp_path, console=True, clock=clock, stream=stream)
    for step in range(96):  # 12 seconds
        logger.progress(step, 10.0, 100.0, 1.0)
        clock.now += 0.125
    logger.message("note")
    logger.close()
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines if "steps/s" in line] == ["0/1,000", "40/1,000", "80/1,000"]
    assert lines[-1] == "note"
    assert "\r" not in stream.getvalue()


def test_console_false_is_silent(tmp_path: Path) -> None:
    stream = Terminal()
    logger = make(tmp_path, console=False, stream=stream)
    logger.progress(1, 1.0, 999.0, 0.0)
    logger.message("text")
    assert not logger.progress_due
    logger.close()
    assert stream.getvalue() == ""


def test_a_warning_without_a_terminal_is_pythons(tmp_path: Path) -> None:
    with closing(make(tmp_path)) as logger, pytest.warns(UserWarning, match="^no ends$"):
        logger.message("warning: no ends")


def test_a_narrow_line_leaves_out_whole_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a number reads as another number."""
    for columns in range(40, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        stream = Terminal()
        make(tmp_path, console=True, stream=stream).progress(500, 10.0, 50.0, 1234.5, {"loss": 0.125, "q_loss": 0.25})
        line = plain(stream.getvalue()).rpartition("\r")[2]
        assert ("━" in line) == (columns >= 80)  # a narrow terminal has no room for a bar
        shown = line.lstrip("━╺╸ ").rstrip()
        assert columns < 55 or "eta" in shown
        assert "50%  500/1,000  10 steps/s  eta 0:00:50  return 1234  loss 0.125  q_loss 0.25".startswith(shown)
        assert shown.split("  ")[-1] in ("10 steps/s", "eta 0:00:50", "return 1234", "loss 0.125", "q_loss 0.25")


def test_a_terminal_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    clock, stream = Clock(), Terminal()
    logger = make(tmp_path, console=True, clock=clock, stream=stream)
    logger.progress(1, 1.0, 999.0, 0.0)
    stream.close()
    clock.now += 1
    logger.progress(2, 1.0, 998.0, 0.0)
    logger.message("text")
    logger.log(3, {"x": 1.0})
    logger.close()
    assert len(read_metrics(logger.path)) == 1


def test_an_ascii_terminal_gets_ascii(tmp_path: Path) -> None:
    stream = Terminal()
    stream.encoding = "latin-1"  # type: ignore[misc]
    make(tmp_path, console=True, stream=stream).progress(500, 0.0, math.inf, None)
    assert stream.getvalue().isascii()
    assert "---------  50%  500/1,000" in plain(stream.getvalue())
    assert "eta -:--:--" in stream.getvalue()


@pytest.mark.parametrize("total_steps", [0, 1, 10])
def test_a_finished_or_empty_budget_is_whole(tmp_path: Path, total_steps: int) -> None:
    stream = io.StringIO()
    make(tmp_path, console=True, total_steps=total_steps, stream=stream).progress(12, 5.0, 0.0, None)
    assert stream.getvalue().startswith("100%")
    assert "eta 0:00:00" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00:00"),
        (59.6, "0:01:00"),
        (3599.4, "0:59:59"),
        (3661, "1:01:01"),
        (360_000, "100:00:00"),
        (-5, "0:00:00"),
        (math.nan, "-:--:--"),
        (math.inf, "-:--:--"),
    ],
)
def test_durations_read_as_hours_minutes_seconds(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
