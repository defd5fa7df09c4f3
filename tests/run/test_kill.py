"""Real runs that are killed or asked to stop: a valid checkpoint is always there, and resuming works."""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from resume_cases import StopAt, assert_same_run, rows_of, tiny
from rl_training.algorithms.a2c import A2C
from rl_training.cli.screen import run_to_exit_code
from rl_training.collect.worker_collector import WorkerCollector
from rl_training.config.train_config import load_config
from rl_training.envs.stepper import Stepper
from rl_training.envs.workers import Workers
from rl_training.record import checkpoints as checkpointing
from rl_training.record.checkpoints import load_checkpoint
from rl_training.record.metrics_file import read_metrics
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import evaluate_checkpoint, resume_training, train
from worker_cases import assert_same_end, workers

pytestmark = pytest.mark.slow
LIMIT = 120  # seconds; a process that takes longer hangs
# Says "ready" at the first update, and "asked" when a signal has been heard.
SCRIPT = """
import sys
from rl_training.config.train_config import load_config
from rl_training.run.run import Callback
from rl_training.run.workflows import resume_training, train

class Tell(Callback):
    told = False
    def on_update(self, run):
        if not self.told:
            self.told = True
            print("ready", flush=True)
        if {slow_stop!r} and run.stop.signal is not None:
            print("asked", flush=True)
            sys.stdin.read()  # as long as an update may take
    def on_end(self, run):
        print(run.stop_reason, run.step, flush=True)

what, path = sys.argv[1:]
train(load_config(path), callbacks=[Tell()], console=False) if what == "train" else resume_training(
    path, callbacks=[Tell()], console=False)
print("all done", flush=True)
"""
ENDS = {signal.SIGINT: -signal.SIGINT, signal.SIGTERM: 143}  # of a Python script; the first is Python's own


def start(what: str, path: Path, *, slow_stop: bool = False, wait: bool = True) -> subprocess.Popen[str]:
    """A run in a process of its own, at its first update unless told not to wait for that."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("{slow_stop!r}", repr(slow_stop)), what, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    if not wait:
        return process
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "ready\n", process.communicate(timeout=LIMIT)[1]
    return process


def long_config(folder: Path, **fields: Any) -> Path:
    """A run without an end, which writes as often as it can."""
    plain = {"total_timesteps": 10**9, "checkpoint_interval": 8, "eval_episodes": 1, "num_envs": 2, **fields}
    kwargs = {"eval_interval": 64, **plain.pop("kwargs", {})}
    config = tiny(plain.pop("algo", "a2c"), folder / "runs", kwargs=kwargs, **plain)
    path = folder / "config.yaml"
    path.write_text(config.model_dump_json())  # JSON is YAML
    return path


def assert_sound(latest: Path) -> int:
    """The checkpoint loads and evaluates, and its rows are readable; returns its step."""
    tree = load_checkpoint(latest)
    read_metrics(latest.parent.parent / "metrics.jsonl")
    load_config(latest.parent.parent / "config.yaml")
    evaluate_checkpoint(latest, num_episodes=1)
    return int(tree["run"]["step"])


def test_fifty_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    """The run is killed and resumed, killed and resumed, every second time while it may still be starting."""
    rng = random.Random(7)
    config = long_config(tmp_path)
    process = start("train", config)
    (latest,) = tmp_path.glob("runs/*/checkpoints/latest.ckpt")
    reached = 0
    for number in range(50):
        with pytest.raises(subprocess.TimeoutExpired):  # somewhere in the middle of something
            process.wait(timeout=rng.uniform(0.0, 3.0 if number % 2 else 0.4))
        process.kill()
        assert process.wait(timeout=LIMIT) == -signal.SIGKILL
        step = assert_sound(latest)
        assert step >= reached
        reached = step
        process = start("resume", latest, wait=bool(number % 2))
    process.kill()
    process.wait(timeout=LIMIT)
    result = resume_training(latest, callbacks=[StopAt(reached + 100)], console=False)
    assert result.metrics["global_step"] > reached
    assert result.run_dir == latest.parent.parent
    names = {path.name for path in latest.parent.iterdir()}
    assert {name for name in names if not name.startswith("step_")} == {"latest.ckpt", "best.ckpt"}
    assert not list(result.run_dir.glob(".*")), "something temporary is left"
    steps = [row["step"] for row in rows_of(result.run_dir)]
    assert steps == sorted(steps)


def test_a_killed_and_resumed_run_is_the_run_that_was_never_killed(tmp_path: Path) -> None:
    rng = random.Random(11)
    config = long_config(tmp_path, total_timesteps=40_000, checkpoint_interval=400, kwargs={"num_steps": 20})
    process = start("train", config)
    (latest,) = tmp_path.glob("runs/*/checkpoints/latest.ckpt")
    for _ in range(3):
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=rng.uniform(0.05, 0.3))
        process.kill()
        process.wait(timeout=LIMIT)
        process = start("resume", latest)
    process.kill()
    process.wait(timeout=LIMIT)
    resumed = resume_training(latest, console=False)
    assert_same_run(train(load_config(config), console=False), resumed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_update_with_a_checkpoint(tmp_path: Path, number: signal.Signals) -> None:
    process = start("train", long_config(tmp_path, checkpoint_interval=0))
    process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == ENDS[number]
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT), err
    reason, step = out.split()
    assert reason == number.name
    (latest,) = tmp_path.glob("runs/*/checkpoints/latest.ckpt")
    assert assert_sound(latest) == int(step) > 0
    assert read_metrics(latest.parent.parent / "metrics.jsonl")[-1]["step"] == int(step)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(tmp_path: Path, number: signal.Signals) -> None:
    process = start("train", long_config(tmp_path), slow_stop=True)
    process.send_signal(number)
    assert process.stdout is not None
    assert process.stdout.readline() == "asked\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == ENDS[number]
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT), err
    (latest,) = tmp_path.glob("runs/*/checkpoints/latest.ckpt")
    assert_sound(latest)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_ctrl_c_reaches_every_process_and_the_run_still_ends_well(tmp_path: Path, vectorization: str) -> None:
    """A terminal sends SIGINT to the whole group, the environments' processes too."""
    process = start("train", long_config(tmp_path, vectorization=vectorization, checkpoint_interval=0))
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == -signal.SIGINT
    assert err.count("Traceback") == 1, "only the run itself prints one"
    assert out.startswith("SIGINT")
    (latest,) = tmp_path.glob("runs/*/checkpoints/latest.ckpt")
    assert assert_sound(latest) > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_ends_with_128_and_the_signal(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "rl_training", "train", "--config", str(long_config(tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "steps/s" not in (line := process.stderr.readline()):  # the first line of progress: it is training
            assert line, "the command ended by itself"
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + number, err
    assert "stopping after this update" in err
    assert "Traceback" not in out + err
    (latest,) = tmp_path.glob("runs/*/checkpoints/latest.ckpt")
    assert assert_sound(latest) > 0


# ---- a signal at a random moment -------------------------------------------------------------------------------------

SIGNALS = int(os.environ.get("RL_TRAINING_SIGNALS", "48"))  # one for each cell of the table below
INTERVAL = 64  # steps between checkpoints
PHASES = ("collecting", "learning", "evaluating", "saving")
SENT = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
Cell = tuple[signal.Signals, str, str, str]
CELLS: list[Cell] = list(itertools.product(SENT, ("process", "group"), PHASES, ("sync", "async")))


def before_every(owner: Any, name: str, call: Callable[[], Any]) -> None:
    """Have a method call something first, in this process for good."""
    original = getattr(owner, name)

    def called(*arguments: Any, **options: Any) -> Any:
        call()
        return original(*arguments, **options)

    setattr(owner, name, called)


class Marker(Callback):
    """Tells the parent when a phase is reached for the n-th time, and keeps its step where the parent can read it.

    With `hold` it waits there for the signal; without, training continues meanwhile.
    """

    def __init__(self, phase: str, occurrence: int, hold: bool, tell: int, step: mmap.mmap) -> None:
        self.phase, self.left, self.hold, self.tell, self.step = phase, occurrence, hold, tell, step
        self.run: Run | None = None

    def on_start(self, run: Run) -> None:
        self.run = run
        learner = type(run.session.algorithm)
        places: dict[str, tuple[Any, str]] = {
            "collecting": (Stepper, "step"), "learning": (learner, "learn"), "evaluating": (CartPoleEnv, "step"),
            "saving": (checkpointing._Writer, "_append"),
        }  # fmt: skip
        before_every(*places[self.phase], self.reach)

    def reach(self) -> None:
        assert self.run is not None
        if self.phase == "evaluating" and self.run.phase != "evaluation":
            return
        self.left -= 1
        if self.left == 0:
            os.write(self.tell, b"x")
            while self.hold and self.run.stop.signal is None:
                time.sleep(0.001)

    def on_update(self, run: Run) -> None:
        self.step[:8] = run.step.to_bytes(8, "little")


def start_forked(work: Callable[[int], Any], log: Path) -> tuple[int, int]:
    """The work in a forked process (importing torch again would take most of the time), as a command; pid and pipe."""
    told, tell = os.pipe()
    process = os.fork()
    if process:
        os.close(tell)
        return process, told
    code = 99
    try:
        os.setsid()
        file = os.open(log, os.O_CREAT | os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run_to_exit_code(lambda: work(tell), debug=True)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """What the condition gives once it gives something; a process that never does hangs."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.005)
    raise AssertionError(f"{what} took more than {LIMIT} seconds")


def session_members(session: int) -> list[int]:
    """Living processes of a session: workers lead groups of their own."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, sid = path.read_text().rpartition(")")[2].split()[:4]
            if int(sid) == session and state != "Z":
                members.append(int(path.parent.name))
    return members


def signal_one(folder: Path, cell: Cell, rng: random.Random) -> str:
    """One run that gets one signal, then a resume; returns its exit code and what was lost, in words."""
    sent, target, phase, vectorization = cell
    algo, hold = rng.choice(["a2c", "dqn"]), rng.random() < 0.5
    config = tiny(
        algo, folder, num_envs=2, vectorization=vectorization, total_timesteps=10**9, checkpoint_interval=INTERVAL,
        eval_episodes=1, kwargs={"eval_interval": 48},
    )  # fmt: skip
    occurrence = rng.randint(1, 400 if phase == "saving" else 60)
    where = f"{folder.name}: {sent.name} to the {target}, {phase}, {vectorization}, {algo}, {hold}, {occurrence}"
    log, step = folder.with_suffix(".txt"), mmap.mmap(-1, 8)
    marker = functools.partial(Marker, phase, occurrence, hold, step=step)
    process, told = start_forked(lambda tell: train(config, callbacks=[marker(tell)], console=True), log)
    try:
        assert os.read(told, 1) == b"x", f"{where}: {log.read_text()}"
        if not hold:
            time.sleep(rng.uniform(0.0, 0.02))  # any moment will do
        (os.killpg if target == "group" else os.kill)(process, sent)
        _, status = wait_for(lambda: (done := os.waitpid(process, os.WNOHANG))[0] and done, where)
        wait_for(lambda: not session_members(process), f"{where}: the end of its other processes")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        os.close(told)
    code = os.waitstatus_to_exitcode(status)
    assert code == (-sent if sent == signal.SIGKILL else 128 + sent), f"{where}: {code}\n{log.read_text()}"
    (latest,) = folder.glob("*/checkpoints/latest.ckpt")
    saved, reached = load_checkpoint(latest)["run"], int.from_bytes(step[:8], "little")
    lost = max(0, reached - saved["step"])
    assert lost <= (INTERVAL + 16 if sent == signal.SIGKILL else 0), f"{where}: {saved['step']} of {reached}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if saved["abandoned"] else "error")
        resumed = resume_training(latest, callbacks=[StopAt(saved["step"] + 16)], console=False)
    assert resumed.metrics["global_step"] > saved["step"], where
    assert resumed.run_dir == latest.parents[1], where
    assert not list(resumed.run_dir.rglob(".*")), where
    return f"exit {code}, {'up to one interval' if lost else 'nothing'} lost{', abandoned' * saved['abandoned']}"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_signals_at_random_moments(tmp_path: Path) -> None:
    """Nothing that was learned is lost by one signal, at most one interval by a kill; no process is left."""
    rng = random.Random(5)
    outcomes: dict[Cell, Counter[str]] = defaultdict(Counter)
    for number in range(SIGNALS):
        cell = CELLS[number % len(CELLS)]
        outcomes[cell][signal_one(tmp_path / str(number), cell, rng)] += 1
    if "RL_TRAINING_SIGNALS" in os.environ:
        for (sent, *rest), counts in outcomes.items():
            told = "; ".join(f"{count} x {what}" for what, count in sorted(counts.items()))
            print(f"| {sent.name} | {' | '.join(rest)} | {told} |")


# ---- learners with workers -------------------------------------------------------------------------------------------

LEARNER_KILLS = 20
PLACES: dict[str, tuple[Any, str]] = {
    "asking": (Workers, "ask"), "waiting": (Workers, "ready"), "taking": (WorkerCollector, "_take"),
    "learning": (A2C, "learn"), "evaluating": (CartPoleEnv, "step"), "saving": (checkpointing._Writer, "_append"),
}  # fmt: skip  # what a learner's own process calls


def kill_here(left: Iterator[int], tell: int) -> None:
    """The next SIGKILL of this process, if it is its turn; first it says whether it, or a worker, has named memory."""
    if next(left):
        return
    maps = "".join(Path(f"/proc/{member}/maps").read_text() for member in session_members(os.getpid()))
    named = [line for line in maps.splitlines() if "/dev/shm/" in line and not line.endswith("(deleted)")]
    os.write(tell, b"named" if named else b"none")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_twenty_kills_of_a_learner_with_workers_change_nothing(tmp_path: Path) -> None:
    """Killed at a random place and resumed, again and again: no worker and no shared memory is left, and the end is
    the same."""
    config = workers(
        "a2c", tmp_path / "killed", total_timesteps=200 * 24, checkpoint_interval=48, eval_episodes=1,
        kwargs={"eval_interval": 96},
    )  # fmt: skip
    rng = random.Random(3)
    for number in range(LEARNER_KILLS):
        latest = next(tmp_path.glob("killed/*/checkpoints/latest.ckpt"), None)
        name, turn = rng.choice(list(PLACES)), rng.randrange(20)
        turn *= 20 if name == "saving" else 1

        def work(tell: int, latest: Path | None = latest, name: str = name, turn: int = turn) -> Any:
            left = itertools.count(turn, -1)
            before_every(*PLACES[name], lambda: kill_here(left, tell))
            return train(config, console=False) if latest is None else resume_training(latest, console=False)

        where, log = f"kill {number}, {name}, {turn}", tmp_path / f"{number}.txt"
        process, told = start_forked(work, log)
        assert os.read(told, 9) == b"none", f"{where}: {log.read_text()}"
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
        wait_for(lambda process=process: not session_members(process), f"{where}: the end of its workers")
        os.close(told)
    (latest,) = tmp_path.glob("killed/*/checkpoints/latest.ckpt")
    assert 0 < load_checkpoint(latest)["run"]["step"] < config.total_timesteps
    whole = train(config.model_copy(update={"output_dir": str(tmp_path / "whole")}), console=False)
    assert_same_end(whole, resume_training(latest, console=False))
