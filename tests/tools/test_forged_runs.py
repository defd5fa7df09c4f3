"""Run folders that a stranger made: `runs`, `compare` and `report` neither hang on them nor obey their text."""

from __future__ import annotations

import io
import json
import os
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from limits import limited
from rl_training.cli.main import app
from rl_training.cli.screen import describe, describe_warning
from rl_training.errors import EnvironmentFailure, TrainingFailure, UserError
from rl_training.record.logger import RunLogger
from rl_training.safe_files import open_regular, read_regular
from run_records import write_run


def invoke(*words: str, seconds: float = 20) -> Any:
    with limited(seconds=seconds):
        result = CliRunner().invoke(app, list(words))
    assert "Traceback" not in result.output
    return result


def put_in_place(path: Path, kind: str) -> None:
    """Something that is not a file, where a file is expected."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to a pipe":
        os.mkfifo(path.with_name("pipe"))
        path.symlink_to("pipe")
    elif kind == "device":
        path.symlink_to("/dev/zero")  # reading it never ends
    elif kind == "socket":
        short = Path(os.path.relpath(path))  # a socket's path has at most 107 bytes
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(short))
    else:
        path.mkdir()


IRREGULAR = ("pipe", "link to a pipe", "device", "socket", "folder")


@pytest.mark.parametrize("kind", IRREGULAR)
def test_only_regular_files_are_opened(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    put_in_place(tmp_path / "file", kind)
    for read in (open_regular, read_regular):
        with limited(seconds=5), pytest.raises(OSError):
            read("file")
    (tmp_path / "text").write_bytes(b"words")
    (tmp_path / "link").symlink_to("text")
    assert read_regular("link") == b"words"


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "device", "socket"])
@pytest.mark.parametrize("file", ["metrics.jsonl", "manifest.json", "end.json", ".lock"])
def test_what_is_not_a_file_does_not_stop_a_command(
    file: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs"), [1.0, 2.0, 3.0], algo="a2c")
    put_in_place(write_run(Path("runs"), [1.0, 2.0, 3.0]) / file, kind)
    listed = invoke("runs")
    assert listed.exit_code == 0, listed.output
    assert "a2c" in listed.stdout
    assert "ppo-CartPole-v1-s0-1" in listed.output
    for words in (["compare"], ["report", "--no-episode"]):
        result = invoke(*words, "runs")
        if file == "metrics.jsonl":
            assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
            assert "metrics.jsonl cannot be read (it is not a regular file)" in result.stderr
        else:
            assert result.exit_code == 0, result.output


# ---- damaged runs ----------------------------------------------------------------------------------------------------


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | values))


DAMAGED: dict[str, Any] = {
    "a null return": lambda run: write_rows(run, {"step": 1, "eval_return_mean": None}),
    "a word as a return": lambda run: write_rows(run, {"step": 1, "episode_return_mean": "[/]"}),
    "a list as a return": lambda run: write_rows(run, {"step": 1, "eval_return_mean": [1.0]}),
    "a huge return": lambda run: write_rows(run, {"step": 1, "eval_return_mean": 10**400}),
    "a huge step": lambda run: write_rows(run, {"step": 10**400, "eval_return_mean": 1.0}),
    "a huge budget": lambda run: edit_config(run, total_timesteps=10**400),
    "a budget of words": lambda run: edit_config(run, total_timesteps="many"),
    "no algorithm": lambda run: edit_config(run, algo=None),
    "a config that is no YAML": lambda run: (run / "config.yaml").write_text("{"),
    "a folder for metrics": lambda run: put_in_place(run / "metrics.jsonl", "folder"),
}


def write_rows(folder: Path, *rows: dict[str, Any]) -> None:
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_run_is_named_and_hides_no_other(damage: str, tmp_path: Path) -> None:
    write_run(tmp_path, [1.0, 2.0], algo="a2c")
    DAMAGED[damage](write_run(tmp_path, [1.0, 2.0]))
    result = invoke("runs", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "a2c-CartPole-v1-s0-0" in result.stdout
    line = next(line for line in result.stdout.splitlines() if "ppo-CartPole-v1-s0-1" in line)
    assert "cannot be read" in line


def test_a_folder_of_damaged_runs_alone_is_no_folder_without_runs(tmp_path: Path) -> None:
    edit_config(write_run(tmp_path, [1.0]), total_timesteps=None)
    result = invoke("runs", str(tmp_path))
    assert (result.exit_code, "ppo-CartPole-v1-s0-0" in result.stdout) == (0, True)


@pytest.mark.parametrize("words", [["runs"], ["compare"], ["report", "--no-episode"], ["plot"]])
def test_markup_in_a_run_is_text(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for algo in ("[/]", "[bold"):
        for seed in range(2):
            edit_config(write_run(Path("runs"), [1.0, 2.0, 3.0], algo="x", seed=seed), algo=algo, env_id="[/red]")
    result = invoke(*words, "runs")
    assert result.exit_code == 0, result.output
    assert words[0] in ("report", "plot") or {"[/]", "[bold", "[/red]"} <= set(result.stdout.replace(":", "").split())


# ---- terminal escapes ------------------------------------------------------------------------------------------------

ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b31m\x08\x7f\r\u202e"  # title, clear, color, back, delete, return, right to left


def check_plain(text: str) -> None:
    assert "title" in text  # the harmless part of it is there
    assert not set(text) & set(ESCAPES) - set("]0;title[2J31m")


def test_no_command_prints_the_escapes_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for algo in ("a", "b"):
        run = write_run(Path("runs"), [1.0, 2.0, 3.0])
        edit_config(run, algo=f"{algo}{ESCAPES}", env_id=ESCAPES)
        run.rename(run.with_name(f"{algo}{ESCAPES}"))
    stopped = write_run(Path("runs"), [1.0], budget=9_000)
    edit_config(stopped, env_id=ESCAPES)
    stopped.rename(stopped.with_name(f"c{ESCAPES}"))
    formats = (["compare", "--format", name] for name in ("csv", "json", "latex", "markdown"))
    for words in (["runs"], ["compare"], ["plot"], *formats):
        result = invoke(*words, "runs")
        assert result.exit_code == 0, result.output
        check_plain(result.output)
    for algo in "ab":
        edit_config(Path("runs") / f"{algo}{ESCAPES}", **{f"x{ESCAPES}": algo, "algo": "ppo"})
    check_plain(invoke("compare", "runs").output)
    refused = [invoke("compare", "runs", "--by", f"no{ESCAPES}"), invoke("train", "--config", f"no{ESCAPES}")]
    write_rows(Path("runs") / f"a{ESCAPES}", {"step": None}, {"step": 2})
    refused.append(invoke("compare", "runs"))
    Path("bad.yaml").write_text(yaml.safe_dump({"algo": ESCAPES, "env_id": "x"}))
    refused.append(invoke("train", "--config", "bad.yaml"))
    for result in refused:
        assert result.exit_code == 2
        check_plain(result.output)


def test_errors_warnings_and_progress_lines_are_printable(tmp_path: Path) -> None:
    for error in (UserError(ESCAPES), EnvironmentFailure(ESCAPES), TrainingFailure(ESCAPES), ValueError(ESCAPES)):
        check_plain(describe(error)[1])
    check_plain(describe_warning(f"\x1b[33mWARN: {ESCAPES}\x1b[0m"))
    stream = io.StringIO()
    with closing(RunLogger(tmp_path, total_steps=100, loggers=(), stream=stream)) as logger:
        logger.message(f"first: {ESCAPES}")
        logger.progress(1, 1.0, 1.0, None, {ESCAPES: 1.0})
    for line in stream.getvalue().splitlines():
        check_plain(line)
    assert stream.getvalue().count("title") == 2


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "folder"])
def test_a_data_set_that_is_not_a_file_is_one_sentence(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    put_in_place(Path("data.npz"), kind)
    result = invoke("dataset", "check", "--path", "data.npz")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "data.npz cannot be read as npz" in result.stderr
