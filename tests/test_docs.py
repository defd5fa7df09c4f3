"""The guides: quick tests parse every command, slow ones run all commands and code with small budgets."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from rl_training.cli.exits import WRONG_INPUT
from rl_training.cli.main import app
from rl_training.errors import Terminated

ROOT = Path(__file__).parents[1]
GUIDES = ("README.md", *(f"docs/{name}.md" for name in (
    "index", "start", "your_environment", "continue", "offline", "dreamer", "from_sb3", "troubleshooting",
)))  # fmt: skip
FENCE = re.compile(r"^```(\w+)(?: title=\"(.+?)\")?\n(.*?)^```", re.M | re.S)
OTHER_PROGRAMS = ("pip", "tensorboard", "make")
MY_ENVS = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class MyEnv(CartPoleEnv):
    def __init__(self, size=1, render_mode=None):
        super().__init__(render_mode=render_mode)

gym.register("MyEnv-v0", entry_point=MyEnv, max_episode_steps=50)
"""


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in that language."""
    return [found[3] for found in FENCE.finditer((ROOT / page).read_text(encoding="utf-8")) if found[1] == language]


def commands(page: str) -> list[str]:
    """Our commands on a page, without comments."""
    lines = [line.partition("  #")[0].strip() for block in blocks(page, "bash") for line in block.splitlines()]
    return [line for line in lines if line and line.split()[0] not in OTHER_PROGRAMS]


EVERY_COMMAND = [(page, line) for page in GUIDES for line in commands(page)]


@pytest.mark.parametrize(("page", "line"), EVERY_COMMAND, ids=[line[12:60] for _, line in EVERY_COMMAND])
def test_a_command_of_the_guides_exists_with_these_options(page: str, line: str) -> None:
    program, *words = shlex.split(line)
    assert program == "rl-training"
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):  # a group
        command = command.commands[words.pop(0)]
    command.make_context(command.name, words)  # raises for an option that is not there


# recipes for clusters and services ------------------------------------------------------------------------------------

(SLURM,) = blocks("docs/continue.md", "sh")
(SYSTEMD,) = blocks("docs/continue.md", "ini")


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (143, True)])
def test_the_slurm_recipe_requeues_a_run_that_a_signal_stopped(tmp_path: Path, code: int, requeued: bool) -> None:
    for name, body in {"srun": f"exit {code}", "scontrol": f'echo "$@" >> {tmp_path}/said'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.slurm").write_text(SLURM)
    subprocess.run(["bash", "-n", tmp_path / "train.slurm"], check=True)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    assert subprocess.run(["bash", tmp_path / "train.slurm"], env=env).returncode == code
    said = tmp_path / "said"
    assert (said.read_text() if said.exists() else "") == ("requeue 7\n" if requeued else "")
    assert Terminated().code == 143


def test_the_recipes_run_a_command_that_may_be_repeated() -> None:
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's keys have capitals
    unit.read_string(SYSTEMD)
    service = unit["Service"]
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", str(WRONG_INPUT))
    (line,) = (line.removeprefix("srun ") for line in SLURM.splitlines() if line.startswith("srun "))
    for words in (shlex.split(service["ExecStart"]), shlex.split(line)):
        assert Path(words[0]).name == "rl-training"
        assert {"--name", "--continue"} <= set(words)
        command: Any = typer.main.get_command(app)
        command.commands[words[1]].make_context(words[1], words[2:])
    assert {"--requeue", "--signal=TERM@120"} <= set(re.findall(r"^#SBATCH (\S+)", SLURM, re.M))


def test_the_first_box_for_users_of_stable_baselines3_is_about_predict() -> None:
    text = (ROOT / "docs" / "from_sb3.md").read_text(encoding="utf-8")
    first = text.partition("!!! ")
    assert first[0].count("\n") == 2, "before anything else"
    assert "action = model.predict(obs)" in first[2].partition("## ")[0]


# everything once, as a reader would type it --------------------------------------------------------------------------


def shortened(text: str) -> str:
    """With budgets of a few hundred steps."""
    return re.sub(r"\b\d{2,3}_?000\b|\b[2-9]_000\b", "400", text)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment of the reader's own."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "my_envs.py").write_text(MY_ENVS)
    return folder


def run(words: list[str], folder: Path) -> str:
    """What a process of ours prints; it must succeed."""
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{folder}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in GUIDES if blocks(page, "python")])
def test_the_python_of_a_guide_runs(page: str, workplace: Path) -> None:
    for number, block in enumerate(blocks(page, "python")):
        script = workplace / f"block_{number}.py"
        block = block.replace("SAC(MyEnv)", "SAC('Pendulum-v1')")  # the reader's own has discrete actions
        script.write_text("from my_envs import MyEnv\nif __name__ == '__main__':\n" + indent(shortened(block)))
        run([sys.executable, str(script)], workplace)


def indent(code: str) -> str:
    """Inside of a main guard: environments of functions are made in fresh interpreters."""
    return "".join(f"    {line}" for line in code.splitlines(keepends=True))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in GUIDES if commands(page)])
def test_the_commands_of_a_guide_run(page: str, workplace: Path) -> None:
    env_id = "Pendulum-v1" if page.endswith("offline.md") else "CartPole-v1"
    ours = [sys.executable, "-m", "rl_training"]
    first = [*ours, "train", "--algo", "sac" if env_id == "Pendulum-v1" else "ppo", "--env", env_id]
    run([*first, "--total-timesteps", "400", "--output-dir", "runs"], workplace)
    for line in commands(page):
        newest = max((workplace / "runs").glob("*/checkpoints/best.ckpt"), key=os.path.getmtime).parents[1]
        line = shortened(line).replace("RUN", str(newest.relative_to(workplace)))
        words = [*ours, *shlex.split(line)[1:]]
        if words[3] in ("train", "bench") and "--total-timesteps" not in words:
            words += ["--total-timesteps", "400"]
        if "runs/*" in words:
            at = words.index("runs/*")
            words[at : at + 1] = map(str, (workplace / "runs").iterdir())
        run(words, workplace)


# the worked example ---------------------------------------------------------------------------------------------------


def test_the_algorithm_of_the_worked_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "add_an_algorithm.md").read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        if found[2]:
            (tmp_path / found[2]).write_text(found[3])
    monkeypatch.syspath_prepend(str(tmp_path))
    from importlib.metadata import EntryPoint

    from rl_training.runtime import spec
    from rl_training.runtime.workflows import train

    point = EntryPoint("better", "better_trainer:SPECS", spec.ENTRY_POINT_GROUP)
    monkeypatch.setattr(spec, "entry_points", lambda group: [point])
    monkeypatch.setattr(spec, "_plugins", None)
    config = {**yaml.safe_load((tmp_path / "cartpole.yaml").read_text()), "output_dir": tmp_path}
    metrics = train({**config, "total_timesteps": 640}, console=False).metrics
    assert metrics["updates"] >= 10
    assert metrics["policy_loss"] > 0  # log-probabilities are negative, and no advantage is
