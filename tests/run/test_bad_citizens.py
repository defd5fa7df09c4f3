"""Environments that misbehave x train (sync, async), eval, doctor: each ends in time, is named, and leaves nothing.

`python tests/run/test_bad_citizens.py` plays the whole table and prints it as Markdown, for docs/reliability.md.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import env_zoo
from rl_training import play as play_module
from rl_training.config.train_config import TrainConfig
from rl_training.envs import workers
from rl_training.envs.engines import make_engine
from rl_training.envs.factory import read_recipe
from rl_training.envs.probe import probe_spaces
from rl_training.envs.stepper import Stepper
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.run.learner import read_checkpoint
from rl_training.run.workflows import evaluate_checkpoint, train
from rl_training.tools import doctor

ENV = "env_zoo:Misbehaves"
LIMIT = 120.0  # seconds for one command, its start and a stall of worker_timeout included
SILENT = 10.0  # worker_timeout of what stalls; a loaded machine needs seconds to start a worker
PATIENCE = 30.0  # seconds in which a run obeys one SIGTERM inside an environment

WRONG = {  # what the run says, in every command that learns of it
    "raises in reset": "raised RuntimeError: no more episodes",
    "raises in step": "raised RuntimeError: the simulator broke",
    "raises what no pickle holds": "raised CannotBePickled",
    "sys.exit": r"called sys\.exit\(0\)|raised SystemExit: 0",
    "sys.exit in close": r"called sys\.exit\(0\)|raised SystemExit: 0",
    "wrong shape": r"returned an observation of shape \(1, 2\)",
    "wrong dtype": "returned an observation of dtype complex64",
    "scalar": r"returned an observation of shape \(\)",
    "None": "returned None as an observation",
    "changing spaces": r"returned an observation of shape \(3,\)",
    "NaN": "NaN or an? infinity",
    "NaN reward": r"NaN or an infinity|reward .*nan",
    "wrong mask": "action_mask'] of env_zoo:Misbehaves has 3 entries",
}
DIES = {"os._exit": 3, "segfault": -signal.SIGSEGV, "SIGKILL": -signal.SIGKILL}  # and the code of its process
TOLD = {"os._exit": "exited with code 3", "segfault": "segmentation fault", "SIGKILL": "killed by signal 9"}
FINE = [
    "info is None", "ragged info", "never ends", "slow", "torch with two threads", "threads", "own random generator",
]  # fmt: skip
FAULTS = [*WRONG, *DIES, "stalls", *FINE]
COMMANDS = ["train sync", "train async", "eval", "doctor"]
UNSEEN = {("NaN", "eval"), ("NaN reward", "eval"), ("wrong mask", "eval")}  # an evaluation goes on


class Outcome(NamedTuple):
    """How a command ended: with its exit code, what it said, and after how many SIGTERMs."""

    code: int
    text: str
    seconds: float
    signals: int


def play(fault: str, command: str, folder: Path, checkpoint: Path) -> Outcome:
    """Run one command line on an environment with that fault."""
    scratch, mark = folder / "scratch", folder / "mark"
    scratch.mkdir()
    name, _, vectorization = command.partition(" ")
    silence = SILENT if fault == "stalls" else LIMIT
    evaluates = fault == "sys.exit in close" and name == "train"
    words = {
        "train": f"train --algo a2c --env {ENV} --total-timesteps 160 --num-envs 2 --device cpu "
        f"--eval-episodes {int(evaluates)} --set vectorization={vectorization} "
        f"--output-dir {folder / 'runs'} --set algo_kwargs.num_steps=8 --set worker_timeout={silence}",
        "eval": f"eval --checkpoint {checkpoint} --num-episodes 30",
        "doctor": f"doctor --env {ENV} --algo a2c --set worker_timeout={silence}",
    }[name]  # fmt: skip
    path = os.pathsep.join([env_zoo.FOLDER, *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {
        **os.environ, "PYTHONPATH": path, "TMPDIR": str(scratch), "ZOO_FAULT": fault, "ZOO_MARK": str(mark),
        "ZOO_AFTER": "3" if name == "eval" or evaluates else "30", "COLUMNS": "400",
    }  # fmt: skip
    begun, signals = time.monotonic(), 0
    process = subprocess.Popen(
        [sys.executable, "-m", "rl_training", *words.split()], env=environ, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        if (fault == "stalls" and command in ("train sync", "eval")) or (fault, command) == ("never ends", "eval"):
            while not mark.exists() and process.poll() is None:
                time.sleep(0.05)
            while process.poll() is None and signals < 2:
                process.terminate()
                signals += 1
                wait(process, PATIENCE)
        text, _ = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
        process.communicate()
    assert [name for name in os.listdir(scratch) if not name.startswith("torchinductor")] == []
    assert processes_with(str(mark)) == []
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "pym-", "rl_training"))]
    return Outcome(process.returncode, text, time.monotonic() - begun, signals)


def wait(process: subprocess.Popen[str], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def processes_with(mark: str) -> list[str]:
    """Processes whose variables hold `mark`: those of one command, wherever they went."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"ZOO_MARK={mark}".encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def judge(fault: str, command: str, outcome: Outcome, folder: Path) -> str:
    """Check a cell; returns its text in the table."""
    code, text = outcome.code, outcome.text
    in_process = command in ("train sync", "eval")
    name = command.split()[0]
    if name == "train":
        (latest,) = folder.glob("runs/*/checkpoints/latest.ckpt")
        died = fault in DIES and in_process  # where nothing can be saved but what was before
        assert read_checkpoint(latest)["run"]["step"] >= (0 if died else 32), "what was learned is kept"
    if fault in DIES and in_process:
        assert code == DIES[fault], text
        if fault == "segfault":
            assert "env_zoo.py" in text, "faulthandler says where"
        return f"the process dies ({code})"
    assert "Traceback" not in text, text
    if outcome.signals:
        assert code in (1, 143, -signal.SIGTERM), text
        assert outcome.signals == 1, "one is enough"
        return f"ends at SIGTERM ({code})"
    if fault in FINE or (fault, command) in UNSEEN:
        assert code == 0, text
        warned = name == "doctor" and "!" in text
        return "done, warns" if warned else "done"
    if fault == "sys.exit in close" and name == "train":  # the evaluation counts, and the run is over
        assert code == 0, text
        assert re.search(f"warning: while closing, the environment {ENV} {WRONG[fault]}", text), text
        return "done, warns (0)"
    expected = WRONG.get(fault) or TOLD.get(fault) or f"gave no answer for {SILENT:g} seconds"
    assert re.search(expected, text), text
    assert ENV in text
    assert code == (2 if fault == "wrong mask" and name == "train" else 1), text
    return f"named ({code})" if name != "doctor" else "found (1)"


def make_checkpoint(folder: Path) -> Path:
    """A policy of the walk without a fault."""
    os.environ.pop("ZOO_FAULT", None)
    config = TrainConfig(
        algo="a2c", env_id=ENV, total_timesteps=16, output_dir=str(folder), eval_episodes=0, device="cpu",
        algo_kwargs={"num_steps": 8},
    )  # fmt: skip
    return train(config, console=False).checkpoint_path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("good"))


QUICK = [("segfault", "train async"), ("sys.exit", "train sync")]
CELLS = [
    pytest.param(fault, command, marks=() if (fault, command) in QUICK else pytest.mark.slow)
    for fault in FAULTS
    for command in COMMANDS
]


@pytest.mark.parametrize(("fault", "command"), CELLS)
def test_a_bad_citizen_ends_in_time_and_is_named(fault: str, command: str, tmp_path: Path, checkpoint: Path) -> None:
    judge(fault, command, play(fault, command, tmp_path, checkpoint), tmp_path)


# ---- in this process -------------------------------------------------------------------------------------------------


def step_until_it_fails(monkeypatch: pytest.MonkeyPatch, fault: str, vectorization: str) -> None:
    monkeypatch.setenv("ZOO_FAULT", fault)
    monkeypatch.setenv("ZOO_AFTER", "7")
    recipe = read_recipe(ENV, {})
    spaces = probe_spaces(recipe)
    stepper = Stepper(make_engine(recipe, spaces, 2, 0, vectorization), spaces, 2)
    rng = np.random.default_rng(0)
    try:
        stepper.start()
        for _ in range(30):
            stepper.step(spaces.random_actions(rng, 2, stepper.masks))
    finally:
        stepper.close()


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_step_is_the_same_sentence_in_sync(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((EnvironmentFailure, UserError), match=WRONG[fault]) as error:
        step_until_it_fails(monkeypatch, fault, "sync")
    assert ENV in str(error.value)


@pytest.mark.parametrize("fault", ["raises what no pickle holds", "scalar", "wrong mask", "SIGKILL"])
def test_a_wrong_step_names_its_worker_in_async(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((EnvironmentFailure, UserError), match={**WRONG, **TOLD}[fault]) as error:
        step_until_it_fails(monkeypatch, fault, "async")
    assert ENV in str(error.value)
    assert re.search(r"\(worker [12] of 2\)", str(error.value))


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("fault", ["info is None", "ragged info"])
def test_infos_are_the_environments_own_affair(
    fault: str, vectorization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_until_it_fails(monkeypatch, fault, vectorization)


@pytest.mark.parametrize("fault", ["stalls", "segfault", "sys.exit", "raises in step", "slow"])
def test_doctor_looks_in_a_process_of_its_own_first(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_FAULT", fault)
    monkeypatch.setattr(workers, "LEAVE_SECONDS", 0.1)
    found = doctor.check_process(read_recipe(ENV, {}), timeout=2.0 if fault == "stalls" else LIMIT)
    status = {"stalls": "fail", "segfault": "fail", "slow": "ok"}.get(fault, "warn")
    assert (found.name, found.status) == ("process", status)
    assert fault == "slow" or ENV in found.detail
    assert "doctor --env" not in found.detail


@pytest.mark.parametrize("fault", ["sys.exit", "wrong shape", "None", "wrong dtype", "sys.exit in close"])
def test_an_evaluation_names_it_too(fault: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_FAULT", fault)
    monkeypatch.setenv("ZOO_AFTER", "3")
    with pytest.raises(EnvironmentFailure, match=WRONG[fault]):
        evaluate_checkpoint(checkpoint, num_episodes=2)


@pytest.fixture
def _brief_closing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(play_module, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(play_module, "LEAST_CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(workers, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(workers, "LEAVE_SECONDS", 0.05)
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    yield
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)) == before


class Closes:
    """Notes where its `close` was called, and what an alarm would have done."""

    def close(self) -> None:
        self.thread, self.handler = threading.current_thread(), signal.getsignal(signal.SIGALRM)


@pytest.mark.usefixtures("_brief_closing")
@pytest.mark.parametrize(
    ("vectorization", "said"),
    [
        ("sync", r"raised TimeoutError: its close did not return in time \(0\.05 seconds\) \(\S*env_zoo\.py, line"),
        ("async", r"gave no answer for 0\.05 seconds \(the limit for close\)"),
    ],
)
def test_a_run_does_not_wait_for_an_environment_that_never_closes(
    vectorization: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TrainConfig(
        algo="a2c", env_id="env_zoo:NeverCloses", total_timesteps=24, output_dir=str(tmp_path), eval_episodes=2,
        num_envs=2, device="cpu", vectorization=vectorization, algo_kwargs={"num_steps": 6},
    )  # fmt: skip
    result = train(config, console=True)
    assert result.metrics["stop_reason"] == "total_timesteps"
    assert result.metrics["eval_episodes"] == 2
    text = " ".join(capsys.readouterr().err.split())
    assert re.search(f"warning: while closing, the environment env_zoo:NeverCloses {said}", text), text


@pytest.mark.usefixtures("_brief_closing")
def test_environments_after_one_that_never_closes_are_closed() -> None:
    never = env_zoo.NeverCloses()
    never.t = 1
    first, second = Closes(), Closes()
    assert isinstance(play_module.close_all([never, first, never, second]), TimeoutError)
    assert first.thread is second.thread is threading.main_thread(), "a renderer is closed in the thread that made it"


@pytest.mark.usefixtures("_brief_closing")
def test_closing_leaves_the_alarm_of_a_run_that_was_asked_to_stop() -> None:
    previous = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 1000.0, 50.0)
    try:
        assert play_module.close_all([closes := Closes()]) is None
        assert signal.getitimer(signal.ITIMER_REAL) == (pytest.approx(1000.0, abs=60.0), 50.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
    assert closes.handler is signal.SIG_IGN


if __name__ == "__main__":
    print("| environment |", " | ".join(COMMANDS), "|\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as root:
        good = make_checkpoint(Path(root) / "good")
        for number, fault in enumerate(FAULTS):
            cells = []
            for command in COMMANDS:
                folder = Path(root) / f"{number} {command}".replace(" ", "_")
                folder.mkdir()
                outcome = play(fault, command, folder, good)
                try:
                    cells.append(f"{judge(fault, command, outcome, folder)}, {outcome.seconds:.0f} s")
                except AssertionError as error:
                    print(fault, command, error, file=sys.stderr, flush=True)
                    cells.append(f"**wrong** ({outcome.code})")
            print(f"| {fault} | {' | '.join(cells)} |", flush=True)
