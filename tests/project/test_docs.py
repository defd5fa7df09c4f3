"""The guides: quick tests parse every command, slow ones run all commands and code with small budgets."""

from __future__ import annotations

import ast
import configparser
import importlib
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml

from rl_training.cli.main import app
from rl_training.cli.screen import WRONG_INPUT
from rl_training.config import spec
from rl_training.config.spec import get_algorithm_spec
from rl_training.config.train_config import list_presets, load_config, read_reached
from rl_training.errors import Terminated, UserError
from rl_training.run.workflows import resume_training, train
from rl_training.tools.tune import search_space

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import compare_defaults as defaults  # noqa: E402

GUIDES = ("README.md", *(f"docs/{name}.md" for name in (
    "index", "start", "your_environment", "continue", "offline", "dreamer", "from_sb3", "troubleshooting", "callbacks",
    "change_a_loss", "goals",
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


@pytest.mark.parametrize("package", ["stable_baselines3", "sb3_contrib"])
def test_every_class_of_stable_baselines3_has_its_line(package: str) -> None:
    folder = Path(pytest.importorskip(package).__file__).parent
    cells = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "from_sb3.md").read_text(encoding="utf-8"), re.M)
    told = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}
    files = [path for path in folder.rglob("*.py") if path.name != "type_aliases.py"]
    classes = {
        node.name
        for path in files
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not node.name.endswith("Samples")
    }
    assert len(classes) > 20
    assert classes <= told


# everything once, as a reader would type it --------------------------------------------------------------------------


def shortened(text: str) -> str:
    """With budgets of a few hundred steps."""
    return re.sub(r"\b\d{2,3}_?000\b|\b[2-9]_000\b", "400", text)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment of the reader's own, and the files that the guides print."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "my_envs.py").write_text(MY_ENVS)
    for page in GUIDES:
        for _, title, text in FENCE.findall((ROOT / page).read_text(encoding="utf-8")):
            if title.endswith(".py"):
                (folder / title).write_text(text)
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


# the worked examples --------------------------------------------------------------------------------------------------

AUTHORS_PAGE = "docs/add_an_algorithm.md"
TITLED = {found[2]: found[3] for found in FENCE.finditer((ROOT / AUTHORS_PAGE).read_text("utf-8")) if found[2]}


@pytest.fixture
def author(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the page, installed with the entry points of the page."""
    for title, text in TITLED.items():
        (tmp_path / title).write_text(text)
        monkeypatch.delitem(sys.modules, Path(title).stem, raising=False)
    project = configparser.ConfigParser()
    project.read(tmp_path / "pyproject.toml")
    points = project[f'project.entry-points."{spec.ENTRY_POINT_GROUP}"'].items()
    lines = [f"{name} = {yaml.safe_load(value)}" for name, value in points]
    info = tmp_path / "examples-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: examples\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{spec.ENTRY_POINT_GROUP}]", *lines]))
    modules = yaml.safe_load(project["tool.setuptools"]["py-modules"])
    assert {f"{module}.py" for module in modules} == {title for title in TITLED if title.endswith(".py")}
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(spec, "_plugins", None)
    return tmp_path


def test_the_algorithm_of_the_worked_example_trains(author: Path) -> None:
    config = yaml.safe_load((author / "cartpole.yaml").read_text())
    metrics = train({**config, "total_timesteps": 640}, console=False).metrics
    assert metrics["updates"] >= 10
    assert metrics["policy_loss"] > 0  # log-probabilities are negative, and no advantage is


def test_the_replay_algorithm_of_the_worked_example_trains_and_resumes_exactly(author: Path) -> None:
    small = {"learning_starts": 20, "batch_size": 8, "hidden_sizes": [8], "prioritized": True, "n_step": 2}
    given = yaml.safe_load((author / "pendulum.yaml").read_text())
    config = {**given, "total_timesteps": 60, "eval_episodes": 0, "algo_kwargs": small}
    whole = train(config, console=False).metrics
    assert whole["updates"] == 40
    half = train({**config, "algo_kwargs": {**small, "max_updates": 10}}, console=False)
    rest = resume_training(half.checkpoint_path, changes={"algo_kwargs": {"max_updates": None}}, console=False).metrics
    assert (rest["updates"], rest["critic_loss"], rest["alpha"]) == (40, whole["critic_loss"], whole["alpha"])
    with pytest.raises(UserError, match="dropped_quantiles is 25; it must be below num_quantiles"):
        train({**config, "algo_kwargs": {"dropped_quantiles": 25}}, console=False)


def test_the_replay_algorithm_of_the_worked_example_computes_what_its_paper_says(author: Path) -> None:
    """The pool of all critics is truncated, not each critic; the loss is a mean over everything."""
    truncated: Any = importlib.import_module("truncated")
    kept = truncated.truncate(torch.tensor([[[1.0, 2.0, 6.0]], [[0.0, 3.0, 4.0]]]), dropped=1)
    targets = 0.5 + 0.99 * (kept - 0.2 * -1.5)
    torch.testing.assert_close(targets, torch.tensor([[0.797, 1.787, 2.777, 3.767]]))
    quantiles = torch.tensor([[[0.5, 1.5, 2.5]], [[0.0, 1.0, 2.0]]])
    assert truncated.quantile_errors(quantiles, targets).mean().item() == pytest.approx(0.324288, abs=1e-6)


def test_the_managed_class_of_the_worked_example_learns_as_printed(author: Path) -> None:
    (block,) = (block for block in blocks(AUTHORS_PAGE, "python") if ".learn(" in block)
    names: dict[str, Any] = {}
    exec(block, names)
    assert get_algorithm_spec("better").class_name in names


def test_tune_searches_what_the_page_says_for_an_algorithm_that_has_no_entry(author: Path) -> None:
    text = " ".join((ROOT / AUTHORS_PAGE).read_text(encoding="utf-8").split())
    said = re.search(r"`rl-training tune` searches (.+?) of an algorithm", text)
    assert said
    space = search_space(load_config({"algo": "truncated", "env_id": "X", "total_timesteps": 10}))
    assert re.findall(r"`(\w+)`", said[1]) == list(space)


@pytest.mark.parametrize("name", ["better", "truncated"])
def test_the_author_of_a_worked_example_imports_at_most_14_names(name: str) -> None:
    imported = [
        alias.name
        for title, text in TITLED.items() if name in title
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("rl_training.")
        for alias in node.names
    ]  # fmt: skip
    assert 5 < len(imported) <= 14, imported


# ---- numbers of the README, from the files that they come from -------------------------------------------------------

NUMBER = re.compile(r"(?<![\w-])\d[\d,]*(?:\.\d+)?")


def recorded(name: str) -> Any:
    text = (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else text


def replay_speed(side: str, algo: str) -> float:
    """The faster number of threads in compare_replay.log, the mean of two rounds."""
    found = re.findall(rf"round \d: {side} +{algo} +(\d) thread\(s\) +([\d,]+) steps", recorded("compare_replay.log"))
    speeds = {threads: [float(v.replace(",", "")) for t, v in found if t == threads] for threads, _ in found}
    return max(statistics.fmean(values) for values in speeds.values())


def worker_speed(peer: str, row: str) -> float:
    """The median in the table of docs/results/workers.md that compares with this library; raw numbers were not kept."""
    text = (ROOT / "docs" / "results" / "workers.md").read_text(encoding="utf-8")
    table = text.partition(f"| ratio to {peer} |")[2].partition("\n\n")[0]
    return float(next(line for line in table.splitlines() if row in line).split("|")[3].replace(",", ""))


def default_scores(algo: str, side: str) -> dict[str, float]:
    """The normalized score of every environment that the defaults were not chosen on."""
    settings = defaults.load_settings()
    scores: dict[str, list[float]] = {}
    for record in defaults.read_records(ROOT / "results" / "defaults").values():
        reports = settings["environments"][record["env"]]["half"] == "report"
        if reports and (record["algo"], record["side"], record["label"]) == (algo, side, "default"):
            scores.setdefault(record["env"], []).append(defaults.normalized(settings, record))
    return {env: statistics.fmean(values) for env, values in scores.items()}


def default_return(algo: str, side: str, env: str) -> float:
    records = defaults.read_records(ROOT / "results" / "defaults").values()
    wanted = (algo, side, env, "default")
    return statistics.fmean(
        record["final"]
        for record in records
        if (record["algo"], record["side"], record["env"], record["label"]) == wanted
    )


def without_taxi(side: str) -> list[float]:
    scores = default_scores("ppo", side)
    return [statistics.fmean(scores.values()), statistics.fmean(v for env, v in scores.items() if env != "Taxi-v4")]


def device_speed(line: str) -> float:
    """Millions of steps per second, the last such line of the log."""
    return float(re.findall(rf"^{line} +([\d,]+)", recorded("device_envs.log"), re.M)[-1].replace(",", "")) / 1e6


def sac_on_halfcheetah() -> list[float]:
    finals = [run["eval"][-1][1] for run in recorded("halfcheetah_gpu.json")["runs"] if run["algo"] == "sac"]
    return [statistics.fmean(finals), statistics.stdev(finals)]


def sides_of(algo: str) -> tuple[list[float], list[float]]:
    halves = [
        [statistics.fmean(default_scores(algo, side).values()), default_return(algo, side, "HalfCheetah-v5")]
        for side in ("ours", "sb3")
    ]
    return halves[0], halves[1]


# the start of a row -> the first numbers of its second and of its third cell
MEASURED: dict[str, Callable[[], tuple[list[float], list[float]]]] = {
    "PPO on CartPole, steps/s": lambda: next(
        ([row["ours"]], [row["theirs"]]) for row in recorded("compare_sb3.json")["speeds"] if row["name"] == "ppo"
    ),
    "DQN, SAC, TD3": lambda: (
        [replay_speed("ours", algo) for algo in ("dqn", "sac", "td3")],
        [replay_speed("theirs", algo) for algo in ("dqn", "sac", "td3")],
    ),
    "IMPALA with two": lambda: ([worker_speed("RLlib", "`local_async`")], [worker_speed("RLlib", "| RLlib")]),
    "APPO with two": lambda: (
        [worker_speed("Sample Factory", "`local_async`")], [worker_speed("Sample Factory", "| Sample Factory")]
    ),
    "SAC on HalfCheetah-v5, one": lambda: ([recorded("device_loop.json")[0]["steps_per_second"]], []),
    "SAC on HalfCheetah-v5 after": lambda: (sac_on_halfcheetah(), []),
    "PPO on Breakout": lambda: ([recorded("breakout_gpu.json")["evaluation"]["mean"]], []),
    "PPO with 4,096": lambda: (
        [device_speed("auto highest ppo 4096 steps/s"), device_speed("compile highest ppo 4096 steps/s")], []
    ),
    "PPO with default": lambda: (without_taxi("ours"), without_taxi("sb3")),
    "TD3 with default": lambda: sides_of("td3"),
}  # fmt: skip


IN_README = (
    "PPO on CartPole, steps/s", "DQN, SAC, TD3", "SAC on HalfCheetah-v5 after", "PPO with default", "TD3 with default",
)  # fmt: skip
SHOWN = [("docs/results.md", row) for row in MEASURED] + [("README.md", row) for row in IN_README]


@pytest.mark.parametrize(("page", "row"), SHOWN)
def test_a_number_of_the_comparisons_is_what_its_file_says(page: str, row: str) -> None:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    cells = next(line for line in lines if line.startswith(f"| {row}")).split("|")[2:4]
    for cell, expected in zip(cells, MEASURED[row](), strict=True):
        shown = NUMBER.findall(cell)[: len(expected)]
        assert len(shown) == len(expected)
        for text, value in zip(shown, expected, strict=True):
            rounding = 0.51 * 10.0 ** -len(text.partition(".")[2])
            assert float(text.replace(",", "")) == pytest.approx(value, abs=max(rounding, 0.006 * value)), text


def test_the_readme_counts_the_presets_that_have_results() -> None:
    presets, reached = list_presets(), read_reached()
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    with_results = sum(name in reached for name in presets)
    said = f"Of the {len(presets)} presets, {with_results} have a recorded result"
    assert said in text
    assert f"shows the other {len(presets) - with_results} as untrained" in text
    every, measured = ({name.split("/")[0] for name in names} for names in (presets, reached))
    missing = ", ".join(f"`{name}`" for name in sorted(every - measured))
    told = f" (not yet: {missing})" if missing else ""
    some = "All" if measured == every else f"{len(measured)} of the"
    assert f"{some} {len(every)} algorithms have a preset with a recorded learning test on" in text
    assert f"on three to five seeds{told}." in text
    assert all(max(one["seeds"] for name, one in reached.items() if name.startswith(f"{algo}/")) >= 3
               for algo in measured)  # fmt: skip


def test_the_readme_has_one_screen_before_install_and_six_rows_each_with_a_caveat() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.partition("## Install")[0].splitlines()) <= 25
    table = text.partition("| Measured here |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) == 6
    assert all(". " in line.split("|")[3] for line in table)  # the numbers, then what to know
    assert "steps/s" not in text.replace(next(line for line in table if "PPO on CartPole" in line), "").replace(
        next(line for line in table if "DQN, SAC" in line), ""
    ), "one figure for the speed of a run"


def test_the_front_page_has_the_numbers_of_the_readme() -> None:
    readme, front = ((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/index.md"))
    table = front.partition("## Next to other libraries")[2].partition("\n\n[")[0]
    found = NUMBER.findall(re.sub(r"TD3|HalfCheetah-v5|Stable-Baselines3", "", table))
    assert len(found) == 6
    assert set(found) <= {number.strip(",") for number in NUMBER.findall(readme)}


def test_the_result_on_breakout_stands_where_the_page_says() -> None:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert "](performance.md#ppo-on-breakout" in text
    assert "### PPO on Breakout" in (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    gates = (ROOT / "docs" / "results" / "gates.md").read_text(encoding="utf-8")
    assert "ppo/breakout_atari` with 64 environments, 399 per game" in gates
