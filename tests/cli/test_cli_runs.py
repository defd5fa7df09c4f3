"""Several seeds side by side, named folders, `runs`, and shell completion."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import rl_training
from resume_cases import StopAt, rows_of, tiny
from rl_training.cli.grid import read_grid
from rl_training.cli.main import app
from rl_training.cli.report import format_age, summarize_runs
from rl_training.cli.screen import print_seeds
from rl_training.errors import UserError
from rl_training.record.json_lines import json_line
from rl_training.run.folder import locked
from rl_training.run.run import Run
from rl_training.run.workflows import resume_training, train
from rl_training.tools import processes

OPERATE = (Path(__file__).parents[2] / "docs" / "operate.md").read_text(encoding="utf-8")
TINY = ["ppo/cartpole", "--total-timesteps", "256", "--num-envs", "2", "--eval-episodes", "2",
        "--set", "num_steps=64", "--set", "minibatch_size=64"]  # fmt: skip
LISTENS = """
import sys
import gymnasium as gym
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

class Tells(CartPoleEnv):
    steps = 0
    def step(self, action):
        Tells.steps += 1
        if Tells.steps == 100:
            open(f"started-{id(self)}", "w").close()
        return super().step(action)
"""
FAILS_ONCE = """
import os
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

class Fails(CartPoleEnv):
    def step(self, action):
        try:
            os.close(os.open("token", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return super().step(action)
        raise ZeroDivisionError("the pole")
"""


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ---- side by side ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_seeds_side_by_side_give_what_they_give_in_turn() -> None:
    for jobs in ("1", "2"):
        result = invoke("train", *TINY, "--seeds", "3,4", "--jobs", jobs, "--output-dir", f"out{jobs}",
                        "--name", "mine")  # fmt: skip
        assert result.exit_code == 0, result.output
        assert "mean over 2 seeds" in result.stdout
    for seed in (3, 4):
        alone, beside = (rows_of(Path(f"out{jobs}/mine-s{seed}")) for jobs in (1, 2))
        assert alone == beside


@pytest.mark.slow
def test_a_seed_that_fails_is_told_and_the_others_go_on() -> None:
    Path("fails_once.py").write_text(FAILS_ONCE)
    words = ["train", "--algo", "ppo", "--env", "fails_once:Fails", *TINY[1:], "--seeds", "3,4", "--jobs", "2"]
    done = subprocess.run([sys.executable, "-m", "rl_training", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stdout.count("raised ZeroDivisionError: the pole") == 1
    assert "mean over 1 seed" in done.stdout


def seeds_table(*ends: dict[str, Any]) -> str:
    """What `train --seeds` prints after runs that ended like this."""
    console = Console(file=io.StringIO(), width=160)
    common = {"global_step": 100, "train_seconds": 1.0, "stop_reason": "total_timesteps"}
    runs = [(seed, SimpleNamespace(metrics=common | end, run_dir=Path("runs"))) for seed, end in enumerate(ends, 1)]
    print_seeds(console, runs, "ppo [/] on CartPole-v1")
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_stopped_run_is_not_part_of_the_mean_over_seeds() -> None:
    done = {"eval_return_mean": 10.0, "eval_return_std": 0.0}
    stopped = {"episode_return_mean": 90.0, "stop_reason": "SIGINT"}
    text = seeds_table(done, done, stopped)
    assert "mean over 2 seeds 10.0" in text
    assert "unfinished and left out: seed 3 (stopped by Ctrl-C)" in text
    assert "90.0 in training" in text  # another measure than the others
    assert "mean over" not in seeds_table(stopped, stopped)
    assert "unfinished: seed 1 (stopped by Ctrl-C), seed 2 (stopped by Ctrl-C)" in seeds_table(stopped, stopped)


def test_an_interval_of_few_seeds_beyond_what_was_seen_says_so() -> None:
    text = seeds_table(*({"eval_return_mean": value} for value in (354.0, 408.0, 500.0)))
    line = next(line for line in text.splitlines() if "mean over 3 seeds" in line)
    assert "95 % interval 237.3 to 604.1 (Student's t, 3 seeds only, reaches above the highest return, 500.0)" in line
    many = seeds_table(*({"eval_return_mean": 10.0 + seed} for seed in range(8)))
    assert "(Student's t)" in many


# ---- a grid ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("gamma=0.9,0.99", [["0.9"], ["0.99"]]),
        ("hidden_sizes=[8],[16,16]", [["[8]"], ["[16,16]"]]),
        ("env_kwargs={a: 1, b: 2},{a: 3}", [["{a: 1, b: 2}"], ["{a: 3}"]]),
    ],
)
def test_values_of_a_grid_are_between_commas_outside_lists(setting: str, values: list[list[str]]) -> None:
    fixed, combinations = read_grid([setting, "num_steps=8", "optimizer=adam"])
    assert fixed == ["num_steps=8", "optimizer=adam"]
    assert [list(one.values()) for one in combinations] == values


def test_a_grid_runs_every_combination_on_every_seed_and_ends_with_one_table() -> None:
    result = invoke("train", *TINY, "--grid", "--set", "gamma=0.9,0.99", "--set", "hidden_sizes=[8],[4,4]", "--seeds",
                    "1,2", "--name", "mine")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "4 combinations of gamma x hidden_sizes, 2 seeds each, 8 runs in runs/mine" in result.stdout
    folders = sorted(path.name for path in Path("runs/mine").iterdir())
    assert len(folders) == 8
    assert folders[0] == "gamma-0.9-hidden_sizes-4-4-s1"
    table = [line.split() for line in result.stdout.splitlines() if re.match(r"0\.99? ", line)]
    assert sorted(row[:3] for row in table) == [["0.9", "[4,4]", "2"], ["0.9", "[8]", "2"], ["0.99", "[4,4]", "2"],
                                                ["0.99", "[8]", "2"]]  # fmt: skip
    means = [float(row[3]) for row in table]
    assert means == sorted(means, reverse=True)
    frame = rl_training.load_runs("runs/mine")
    ended = frame[frame.kind == "eval"].groupby(["config.gamma", "config.hidden_sizes", "seed"])["return"].last()
    assert means[0] == pytest.approx(ended.groupby(level=[0, 1]).mean().max(), abs=0.06)
    assert "rl-training compare runs/mine --by gamma,hidden_sizes" in result.stdout
    assert invoke("compare", "runs/mine", "--by", "gamma,hidden_sizes").exit_code == 0


@pytest.mark.slow
def test_a_grid_side_by_side_continues_what_is_missing() -> None:
    words = ["train", *TINY, "--grid", "--set", "gamma=0.9,0.99", "--jobs", "2", "--name", "mine", "--continue"]
    first = invoke(*words)
    assert first.exit_code == 0, first.output
    assert "gamma=0.99, seed 0: done" in first.stdout
    kept = rows_of(Path("runs/mine/gamma-0.9-s0"))
    shutil.rmtree("runs/mine/gamma-0.99-s0")
    assert invoke(*words).exit_code == 0
    assert rows_of(Path("runs/mine/gamma-0.9-s0")) == kept
    assert Path("runs/mine/gamma-0.99-s0").is_dir()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--grid"], "--grid needs a setting with several values, such as --set learning_rate=1e-3,3e-4"),
        (["--grid", "--set", "gamma=0.9,0.9"], "each value of a grid may be given only once"),
        (["--grid", "--set", "gamma=0.9,"], "and none is empty"),
        (["--grid", "--set", "gamma=0.9,high"], "gamma is 'high'; it should be a number"),
        (["--set", "gamma=0.9,0.99"], "it should be a number. To try each of them, add --grid."),
        (["--jobs", "2"], "--jobs is 2, but there is one run; give several --seeds"),
        (["--seeds", "1,2", "--jobs", "0"], "--jobs is '0'"),
        (["--name", "a/b"], "name is 'a/b'; it must be a word of letters"),
    ],
)
def test_wrong_options_are_one_sentence(words: list[str], said: str) -> None:
    result = invoke("train", *TINY, *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not Path("runs").exists()


def ended(number: int | None) -> dict[str, Any]:
    """What a process says at the end of its run, which this signal stopped."""
    metrics = {"global_step": 8, "train_seconds": 1.0, "stop_reason": "any"}
    return {"state": "any", "metrics": metrics, "run_dir": Path("run"), "signal": number}


@pytest.mark.parametrize(
    ("says", "heard", "code"),
    [
        ([ended(None), ended(None)], None, 0),
        ([ended(None), ended(signal.SIGTERM)], None, 143),
        ([{"error": UserError("wrong.")}, ended(None)], None, 2),
        ([ended(None)], signal.SIGTERM, 143),  # the second run is not started
        ([ended(signal.SIGINT)], signal.SIGINT, 130),
    ],
)
def test_the_exit_code_of_parallel_runs_says_how_they_ended(
    monkeypatch: pytest.MonkeyPatch, says: list[dict[str, Any]], heard: int | None, code: int
) -> None:
    """The processes are not real; a signal comes right after the first one has started."""
    left, passed_on = list(says), []

    def start(*_: Any) -> Any:
        here, there = multiprocessing.Pipe(duplex=False)
        there.send(("ended", left.pop(0)))
        there.close()
        if heard is not None:
            signal.raise_signal(heard)
        return here, SimpleNamespace(pid=-7, join=lambda seconds: None, kill=lambda: None)

    monkeypatch.setattr(processes, "start", start)
    monkeypatch.setattr(processes.os, "kill", lambda *arguments: passed_on.append(arguments))
    result = invoke("train", *TINY, "--seeds", "1,2", "--jobs", "2")
    assert result.exit_code == code, result.output
    assert (left, passed_on) == ([], [] if heard is None else [(-7, heard)])


@pytest.mark.slow
def test_a_signal_stops_every_run_and_starts_no_other() -> None:
    Path("listens.py").write_text(LISTENS)
    words = ["train", "--algo", "ppo", "--env", "listens:Tells", "--total-timesteps", "1e9", "--seeds", "1,2,3"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rl_training", *words, "--jobs", "2"], stdout=subprocess.PIPE, text=True
    )
    while len(list(Path().glob("started-*"))) < 2:
        assert process.poll() is None
        os.sched_yield()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert out.count("stopped at step") == 2
    rows = summarize_runs(Path("runs"))[0]
    assert {(row["state"], row["step"] > 0) for row in rows} == {("stopped", True)}


# ---- what became of runs ---------------------------------------------------------------------------------------------


def states() -> dict[str, str]:
    return {row["run"]: row["state"] for row in summarize_runs(Path("runs"))[0]}


def test_runs_are_listed_with_what_became_of_them() -> None:
    folder = Path("runs")
    done = train(tiny("a2c", folder, name="good", kwargs={"eval_interval": 64}), console=False)
    stopped = train(tiny("a2c", folder, name="half"), callbacks=[StopAt(64)], console=False)
    with pytest.raises(ZeroDivisionError):
        train(tiny("ppo", folder, name="bad"), callbacks=[Raises()], console=False)
    assert states() == {"good": "done", "half": "stopped", "bad": "failed"}
    result = invoke("runs")
    assert result.exit_code == 0, result.output
    row = next(line.split() for line in result.stdout.splitlines() if "good" in line)
    best = done.metrics["eval_return_mean"]
    assert {"good", "done", "a2c", "CartPole-v1", "128"} <= set(row)
    assert {f"{best:.1f}"} <= set(row)
    (good,) = (one for one in json.loads(invoke("runs", "--json").stdout) if one["run"] == "good")
    assert good["last_return"] == best <= good["best_return"]
    assert (good["state"], good["step"], good["total_timesteps"], good["seed"]) == ("done", 128, 128, 3)
    with locked(stopped.run_dir):
        assert states()["half"] == "running"
    resume_training(stopped.checkpoint_path, console=False)
    assert states()["half"] == "done"
    (done.run_dir / "end.json").unlink()  # of a run before there was one
    assert states()["good"] == "done"


def test_before_the_first_run_a_program_gets_an_empty_list() -> None:
    assert invoke("runs", "--json").stdout == "[]\n"
    assert invoke("runs", "nope", "--json").exit_code == 2


def test_a_damaged_run_is_a_problem_in_json() -> None:
    train(tiny("a2c", Path("runs"), name="good"), console=False)
    shutil.copytree("runs/good", "runs/bad")
    Path("runs/bad/config.yaml").write_text("algo: 3")
    good, bad = json.loads(invoke("runs", "--json").stdout)
    assert (good["run"], good["state"]) == ("good", "done")
    assert bad["problem"].startswith("bad cannot be read: ")
    Path("empty").mkdir()
    assert invoke("runs", "empty", "--json").stdout == "[]\n"  # a program asks again
    assert isinstance(good["total_timesteps"], int)
    table = OPERATE.partition("| Key |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.M)))) == good.keys()


def test_a_log_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_TRAINING_LOG", "xml")
    for words in (["train", *TINY], ["runs"]):
        refused = invoke(*words)
        assert refused.exit_code == 2
        assert refused.stderr == "error: RL_TRAINING_LOG is 'xml'; it must be json or text.\n"
    with pytest.raises(UserError, match="RL_TRAINING_LOG is 'xml'"):
        train(tiny("a2c", Path("runs")))
    assert not Path("runs").exists()
    monkeypatch.setenv("RL_TRAINING_LOG", "text")
    assert invoke("list").exit_code == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_a_signal_stopped_is_not_finished(signum: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_TRAINING_LOG", "json")
    tick = Run.tick

    def stop(run: Run) -> None:
        tick(run)
        os.kill(os.getpid(), signum)

    monkeypatch.setattr(Run, "tick", stop)
    done = invoke("train", *TINY)
    assert done.exit_code == 128 + signum
    (said,) = map(json.loads, done.stdout.splitlines())
    assert (said["event"], said["metrics"]["stop_reason"]) == ("stopped", signal.Signals(signum).name)


def test_everything_that_a_run_says_is_a_line_of_json_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_TRAINING_LOG", "json")
    monkeypatch.setattr("rl_training.record.logger._PLAIN_SECONDS", 0.0)
    done = invoke("train", *TINY, "--set", "learning_rate=0.001", "--set", "clip_value_loss=false")
    assert done.exit_code == 0, done.output
    said = [json.loads(line) for line in done.stderr.splitlines()]
    assert {"message", "progress"} <= {line["event"] for line in said}
    progress = [line for line in said if line["event"] == "progress"]
    assert progress[-1]["total"] == 256
    assert {"time", "step", "steps_per_second", "seconds_left", "return_mean", "loss"} <= progress[-1].keys()
    (finished,) = map(json.loads, done.stdout.splitlines())
    assert finished["event"] == "finished"
    assert finished["metrics"]["stop_reason"] == "total_timesteps"
    assert Path(finished["checkpoint"]).is_file()
    several = invoke("train", *TINY, "--seeds", "1,2")
    assert [json.loads(line)["seed"] for line in several.stdout.splitlines()] == [1, 2]
    wrong = invoke("train", "ppo/cartpol")
    (error,) = map(json.loads, wrong.stderr.splitlines())
    assert (error["event"], error["exit_code"]) == ("error", 2)
    assert "did you mean 'ppo/cartpole'?" in error["message"]


def test_a_number_that_json_lacks_is_null() -> None:
    line = json.loads(json_line("x", a=float("nan"), b=[float("inf"), 1], c={"d": Path("e")}, f=None, g=True))
    assert {k: line[k] for k in "abcfg"} == {"a": None, "b": [None, 1], "c": {"d": "e"}, "f": None, "g": True}


def test_a_killed_run_is_not_running() -> None:
    done = train(tiny("a2c", Path("runs"), name="one"), callbacks=[StopAt(64)], console=False)
    (done.run_dir / "end.json").unlink()
    for process in (2**22 + 1, os.getpid()):  # one that is not there, and one that took its number
        holder = {"process": process, "host": os.uname().nodename, "started": ""}
        (done.run_dir / ".lock").write_text(json.dumps(holder))
        assert states() == {"one": "stopped"}
    (done.run_dir / ".lock").write_text(json.dumps({**holder, "host": "elsewhere"}))
    assert states() == {"one": "running"}


class Raises:
    """A callback that breaks."""

    def on_update(self, run: Any) -> None:
        raise ZeroDivisionError("no")


def test_a_folder_without_runs_is_one_sentence() -> None:
    result = invoke("runs", "nothing")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "nothing contains no runs" in result.stderr


def test_an_age_has_one_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_000_000.0)
    ages = [format_age(1_000_000.0 - ago) for ago in (-5, 0, 59, 60, 3599, 7200, 200_000)]
    assert ages == ["0 s", "0 s", "59 s", "1 min", "59 min", "2 h", "2 d"]


# ---- completion ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("rl-training tr", "train"), ("rl-training train ppo/cart", "ppo/cartpole"),
        ("rl-training train --algo rlp", "rlpd"),
    ],
)  # fmt: skip
def test_a_shell_completes_commands_presets_and_algorithms(typed: str, expected: str) -> None:
    words = {"_RL_TRAINING_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    script = "import sys\nfrom rl_training.cli.main import app\ntry: app([])\n"
    script += "finally: assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **words}, capture_output=True, text=True, timeout=60
    )
    assert expected in done.stdout.split(), done.stderr
