"""Run folders that a stranger made: `runs`, `compare` and `report` neither hang on them nor obey their text."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from limits import limited
from rl_training.cli.main import app
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
