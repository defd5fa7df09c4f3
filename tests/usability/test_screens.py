"""What people type, and the screen that they get, to the letter: the transcripts in `screens/` are what is expected.

A case is a `## title`, what is typed (`$` for a command, `>>>` for Python) and the screen, with the exit code of a
command that fails. Each runs in a copy of `workplace/`, in which `runs/first`, `runs/own` (of `my_envs.py`) and
`runs/sac` were trained. Titles that end in `(slow)` are slow tests. `UPDATE_SCREENS=1 pytest tests/usability` writes
what is shown now into the transcripts: read the difference as the person who typed it.
"""

from __future__ import annotations

import ast
import io
import os
import re
import shlex
import shutil
import sys
import traceback
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import gymnasium as gym
import pandas
import pytest
from typer.testing import CliRunner

from rl_training.cli import report
from rl_training.cli.main import app
from rl_training.config import spec as registry
from rl_training.config.train_config import TrainConfig
from rl_training.data import memory
from rl_training.tools import bench, doctor
from rl_training.tools.bench import Floor

HERE = Path(__file__).parent
FILES = sorted((HERE / "screens").glob("*.txt"))
CASE = re.compile(r"^## (?P<title>.+)\n(?P<typed>(?:(?:\$|>>>|\.\.\.) .*\n)+)(?P<screen>(?:(?!## ).*\n)*)", re.M)
VARYING = (  # what differs from machine to machine or from run to run
    (re.compile(r"\d{8}-\d{6}"), "<date>"),
    (re.compile(r"[\d,.]+(?= steps/s)"), "<speed>"),
    (re.compile(r"\b[\d.]+ (?:s|ms|min|h)\b"), "<time>"),
    (re.compile(r"[\d,.]+ µs"), "<time>"),
    (re.compile(r"(^ *\d+%  .*steps/s.*\n)+", re.M), "<progress>\n"),
    (re.compile(r"\d:\d\d:\d\d"), "<time>"),
    (re.compile(r"-?[\d.]+ ± [\d.]+"), "<return>"),
    (re.compile(r" +$", re.M), ""),
    (re.compile(r"(?<=return)( +)[\d.]+(?= over the last)"), r"\1<return>"),
    (re.compile(r"(?<=known: )a2c, appo, (?:[^;.]|\.\.\.)*"), "<algorithms>"),
    (re.compile(r"(?<=survives )[\d,]+ steps?|\d+ terminated, \d+ truncated in [\d,]+ steps?"), "<count>"),
)
TINY = "--total-timesteps 128 --num-envs 1 --eval-episodes 1 --set eval_interval=128"
TRAINED = (
    f"train ppo/cartpole {TINY} --set num_steps=64 --set minibatch_size=64 --name first",
    f"train --algo ppo --env my_envs:Walk {TINY} --set num_steps=64 --set minibatch_size=64 --name own",
    f"train sac/pendulum {TINY} --set learning_starts=64 --set batch_size=64 --set buffer_capacity=200 --name sac",
)


def cases() -> list[pytest.ParameterSet]:
    found = [(file, match) for file in FILES for match in CASE.finditer(file.read_text(encoding="utf-8"))]
    slow = {True: [pytest.mark.slow], False: []}
    return [
        pytest.param(file, match["typed"], match["screen"].rstrip(), id=f"{file.stem}: {match['title']}",
                     marks=slow[match["title"].endswith("(slow)")])
        for file, match in found
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workplace with its runs."""
    folder = tmp_path_factory.mktemp("usability") / "workplace"
    shutil.copytree(HERE / "workplace", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        for line in TRAINED:
            assert "finished" in run_command(line)
    return folder


@pytest.fixture
def workplace(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the current folder, in which nothing was imported yet."""
    shutil.copytree(trained, tmp_path / "w")
    monkeypatch.chdir(tmp_path / "w")
    monkeypatch.setattr(sys, "path", [name for name in sys.path if name != str(trained)])
    monkeypatch.setattr(doctor, "SECONDS", 0.05)
    monkeypatch.setattr(bench, "benchmark", measured_once)
    monkeypatch.setattr(memory, "available_memory", lambda: 8_000_000_000)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(report, "format_age", lambda changed: "2 d")
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setitem(sys.modules, "pandas", pandas)  # a case hides it
    for name in ("my_envs", "broken_envs", "my_loss"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, spec in list(gym.registry.items()):  # near names are of Gymnasium's own, whatever other tests registered
        if not str(spec.entry_point).startswith("gymnasium.envs."):
            monkeypatch.delitem(gym.registry, name)
    return tmp_path / "w"


def measured_once(config: TrainConfig) -> bench.Breakdown:
    """Made-up numbers in place of a measurement, which would differ every time."""
    chosen = {"device": "cpu", "accelerate": "none", "threads": 1, "vectorization": "native"}
    seconds = {"environment": 2.06, "act": 1.27, "store": 0.24, "learn": 6.01, "evaluate": 0.31, "rest": 0.13}
    return bench.Breakdown(
        config.model_copy(update=chosen), 401_408, 392, 10.02, seconds,
        Floor(4.2e-6, 1.1e-6, 6.3e-6), 41_300.0,
        (bench.Trial("num_envs=32 (other batches)", 1.34), bench.Trial("threads=2", 0.88)),
    )  # fmt: skip


def run_command(line: str) -> str:
    """The screen of a command of ours."""
    done = CliRunner().invoke(app, shlex.split(line))
    return done.output + (f"exit code {done.exit_code}\n" if done.exit_code else "")


def run_python(code: str) -> str:
    """The screen of a script, with values of expressions as an interpreter shows them; of an error its last line."""
    screen, names = io.StringIO(), {"__name__": "__main__"}
    sys.path.insert(0, os.getcwd())
    with redirect_stdout(screen), redirect_stderr(screen):
        try:
            for part in ast.parse(code).body:
                exec(compile(ast.Interactive([part]), "script", "single"), names)
        except Exception as error:
            vars(error).pop("__notes__", None)
            print(traceback.format_exception_only(error)[-1].strip())
    return screen.getvalue()


def show(typed: str, folder: Path) -> str:
    """Everything on the screen, with names in place of what varies."""
    marks = {line.partition(" ")[0] for line in typed.splitlines()}
    lines = [line[4 if line[0] != "$" else 2 :] for line in typed.splitlines()]
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
        if marks == {"$"}:
            screen = "".join(run_command(line.removeprefix("rl-training ")) for line in lines)
        else:
            screen = run_python("\n".join(lines))
    screen = screen.replace(f"{folder}/", "").replace(str(folder), ".")
    for pattern, name in VARYING:
        screen = pattern.sub(name, screen)
    return screen.strip("\n").rstrip()


@pytest.mark.parametrize(("file", "typed", "screen"), cases())
def test_what_is_typed_gives_the_screen(file: Path, typed: str, screen: str, workplace: Path) -> None:
    shown = show(typed, workplace)
    if "UPDATE_SCREENS" in os.environ:
        text = file.read_text(encoding="utf-8")
        head, found, rest = text.partition(f"\n{typed}")
        after = re.split(r"(?=^## )", rest, maxsplit=1, flags=re.M)[1:]
        file.write_text(f"{head}{found}{shown}\n\n{''.join(after)}".rstrip() + "\n", encoding="utf-8")
        return
    assert shown == screen
    assert "Traceback" not in shown
