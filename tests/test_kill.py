"""Real runs that are killed or asked to stop: a valid checkpoint is always there, and resuming works."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resume_cases import StopAt, assert_same_run, rows_of, tiny
from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.experiment.config import load_config
from rl_training.experiment.logging import read_metrics
from rl_training.runtime.workflows import evaluate_checkpoint, resume_training, train

pytestmark = pytest.mark.slow
LIMIT = 120  # seconds; a process that takes longer hangs
# Says "ready" at the first update, and "asked" when a signal has been heard.
SCRIPT = """
import sys
from rl_training.experiment.config import load_config
from rl_training.runtime.run import Callback
from rl_training.runtime.workflows import resume_training, train

class Tell(Callback):
    told = False
    def on_update(self, run):
        if not self.told:
            self.told = True
            print("ready", flush=True)
        if {slow_stop!r} and run._signal is not None:
            print("asked", flush=True)
            sys.stdin.read()  # as long as an update may take

what, path = sys.argv[1:]
result = train(load_config(path), callbacks=[Tell()], console=False) if what == "train" else resume_training(
    path, callbacks=[Tell()], console=False)
print(result.metrics["stop_reason"], result.metrics["global_step"], flush=True)
"""


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
    assert (process.returncode, err) == (0, "")
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
    assert process.returncode != 0
    assert err.rstrip().endswith("KeyboardInterrupt")
    (latest,) = tmp_path.glob("runs/*/checkpoints/latest.ckpt")
    assert_sound(latest)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_ctrl_c_reaches_every_process_and_the_run_still_ends_well(tmp_path: Path, vectorization: str) -> None:
    """A terminal sends SIGINT to the whole group, the environments' processes too."""
    process = start("train", long_config(tmp_path, vectorization=vectorization, checkpoint_interval=0))
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("SIGINT")
    (latest,) = tmp_path.glob("runs/*/checkpoints/latest.ckpt")
    assert assert_sound(latest) > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_ends_with_0_at_the_first_signal(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "rl_training", "train", "--config", str(long_config(tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "steps/s" not in (line := process.stderr.readline()):  # the first line of progress: it is training
            assert line, "the command ended by itself"
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    assert "stopping after this update" in err
    assert "Traceback" not in out + err
    (latest,) = tmp_path.glob("runs/*/checkpoints/latest.ckpt")
    assert assert_sound(latest) > 0
