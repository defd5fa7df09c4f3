"""A file is data: whatever a config, checkpoint or data set names, reading and using it runs no code of its choice.

Every attack tries to leave a canary, a file that exists only if something was called that should not have been.
"""

from __future__ import annotations

import os
import pickle
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import rl_training
from resume_cases import tiny
from rl_training.cli.main import app
from rl_training.config.train_config import TrainConfig, load_config
from rl_training.envs.factory import is_provided, make_env, read_recipe
from rl_training.errors import UserError
from rl_training.record.checkpoints import load_checkpoint, save_checkpoint
from rl_training.run.workflows import evaluate_checkpoint, resume_training, train

CANARY = "canary"
ATTACKS: dict[str, dict[str, Any]] = {
    "os:system": {"command": f"touch {CANARY}"},
    "os:mkdir": {"path": CANARY},
    "subprocess:Popen": {"args": ["touch", CANARY]},
    "subprocess:getoutput": {"cmd": f"touch {CANARY}"},
    "builtins:open": {"file": CANARY, "mode": "w"},
    "builtins:exec": {},
    "pathlib:Path": {},
    "logging:FileHandler": {"filename": CANARY},
    "runpy:run_path": {"path_name": "attack.py"},
    "gymnasium:make": {"id": "CartPole-v1"},
    "attack:make": {},  # a module of the working directory
    "attack:Env-v0": {},  # as Gymnasium reads it: import the module, then make the id
    "installed.program:Env": {},  # a module that could be imported
    "installed.program:Env-v0": {},
    "installed.__main__:Env": {},
}
ATTACK = f"open({CANARY!r}, 'w').close()\n"
MINE = """
from pathlib import Path
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

def make(**kwargs):
    return gym.wrappers.TimeLimit(CartPoleEnv(**kwargs), 20)

class Short(CartPoleEnv):
    pass
"""
PPO = ["--algo", "ppo", "--total-timesteps", "64", "--eval-episodes", "1", "--set", "num_steps=16"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a console command has it: the working directory is not searched for modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("attack.py").write_text(ATTACK)
    Path("mine.py").write_text(MINE)
    package = tmp_path / "site" / "installed"
    package.mkdir(parents=True)
    for name in ("program", "__main__"):
        (package / f"{name}.py").write_text(f"open({str(tmp_path / CANARY)!r}, 'w').close()\n")
    sys.path.append(str(package.parent))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("attack", "mine", "installed")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of a rollout, a replay and a model learner."""
    folder = tmp_path_factory.mktemp("runs")
    return {name: train(tiny(name, folder), console=False).checkpoint_path for name in ("ppo", "dqn", "dreamer")}


def invoke(*words: Any) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def succeed(*words: Any) -> str:
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def refuse(*words: Any) -> str:
    result = invoke(*words)
    assert result.exit_code == 2, (words, result.output)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error:")
    assert not Path(CANARY).exists(), words
    return lines[0]


def edit(source: Path, target: str, **fields: Any) -> Path:
    tree = load_checkpoint(source)
    tree["config"].update(fields)
    return save_checkpoint(target, tree, durable=False)


# ---- what a file names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", ATTACKS)
def test_no_command_calls_what_a_file_names(env_id: str, runs: dict[str, Path]) -> None:
    names = {"env_id": env_id, "env_kwargs": ATTACKS[env_id]}
    config = Path("evil.yaml")
    config.write_text(yaml.safe_dump({**tiny("ppo", Path("out")).model_dump(mode="json"), **names}))
    evil = {name: edit(path, f"{name}.ckpt", **names) for name, path in runs.items()}
    gail = tiny("gail", Path("out"), kwargs={"expert_dataset_kind": "checkpoint", "expert_checkpoint": "ppo.ckpt"})
    Path("gail.yaml").write_text(yaml.safe_dump(gail.model_dump(mode="json")))
    sentences = [
        refuse("train", "--config", config),
        refuse("bench", "--config", config, "--total-timesteps", 16),
        refuse("eval", "--checkpoint", evil["ppo"]),
        refuse("eval", "--imagine", "--checkpoint", evil["dreamer"]),
        refuse("resume", "--checkpoint", evil["dqn"], "--total-timesteps", 200),
        refuse("resume", "--checkpoint", evil["ppo"], "--force", "--set", "gamma=0.5"),
        refuse("dataset", "collect", "--checkpoint", evil["dqn"], "--num-steps", 5, "--output", "x"),
        refuse("train", "--config", "gail.yaml"),
    ]
    assert all(f"env_id {env_id!r} comes from a file" in sentence for sentence in sentences)
    if is_provided(env_id.partition(":")[0]):  # it is loaded, and it is not an environment
        assert all("is not a gymnasium.Env class" in sentence for sentence in sentences)
        assert all(f"--env {env_id} or --import" in sentence for sentence in sentences)
    else:
        assert all(f"add --import {env_id.partition(':')[0]} (in Python" in sentence for sentence in sentences)
    succeed("config", "--config", config)
    succeed("predict", "--checkpoint", evil["ppo"], "--obs", "[0, 0, 0, 0]")
    succeed("dataset", "collect", "--checkpoint", evil["dqn"], "--from-replay", "--output", "replay.npz")
    succeed("dataset", "check", "--path", "replay.npz")
    refuse("dataset", "convert", "replay.npz", "evil/replay-v0")
    for use in (
        lambda: train(load_config(str(config)), console=False),
        lambda: train(load_config(load_config(config)).model_copy(update={"seed": 1}), console=False),
        lambda: rl_training.PPO(config).learn(),
        lambda: rl_training.PPO.load(evil["ppo"]).evaluate(),
        lambda: rl_training.PPO.load(evil["ppo"]).resume(total_timesteps=200),
        lambda: evaluate_checkpoint(evil["ppo"]),
        lambda: resume_training(evil["ppo"], total_timesteps=200, console=False),
    ):
        with pytest.raises(UserError):
            use()
    assert not Path(CANARY).exists()
    assert not Path("out").exists()


def test_a_class_of_an_environment_may_stand_in_a_file(runs: dict[str, Path]) -> None:
    cart = "gymnasium.envs.classic_control:CartPoleEnv"
    moved = edit(runs["ppo"], "moved.ckpt", env_id=cart, env_kwargs={"max_episode_steps": 9}, output_dir="elsewhere")
    succeed("eval", "--checkpoint", moved, "--num-episodes", "1")


@pytest.mark.parametrize("network", ["attack:Net", "installed.program:Net", "installed.__main__:N", "torch.nn:Nothing"])
def test_no_command_imports_the_network_that_a_file_names(network: str, runs: dict[str, Path]) -> None:
    params = {**load_checkpoint(runs["ppo"])["config"]["algo_kwargs"], "network": network}
    evil = edit(runs["ppo"], "net.ckpt", algo_kwargs=params)
    config = {**tiny("ppo", Path("out")).model_dump(mode="json"), "algo_kwargs": {"network": network}}
    Path("net.yaml").write_text(yaml.safe_dump(config))
    sentences = [
        refuse("train", "--config", "net.yaml"),
        refuse("eval", "--checkpoint", evil),
        refuse("predict", "--checkpoint", evil, "--obs", "[0, 0, 0, 0]"),
        refuse("export", "--checkpoint", evil),
        refuse("resume", "--checkpoint", evil, "--total-timesteps", 200),
    ]
    wanted = "has no class" if network == "torch.nn:Nothing" else f"add --import {network.partition(':')[0]}"
    assert all(wanted in sentence for sentence in sentences)
    with pytest.raises(UserError, match=wanted):
        rl_training.PPO.load(evil)
    assert not Path("out").exists()


def test_a_program_is_never_imported_for_a_file_even_if_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "installed.__main__", sys)
    assert not is_provided("installed.__main__")
    assert not is_provided("__main__")
    assert is_provided("gymnasium.envs.box2d")  # in Gymnasium's registry, loaded or not


def test_a_loaded_module_may_stand_in_a_file_and_workers_import_it(runs: dict[str, Path], tmp_path: Path) -> None:
    moved = edit(runs["ppo"], "moved.ckpt", env_id="mine:Short", env_kwargs={"max_episode_steps": 9})
    sys.path.append(str(tmp_path))
    with pytest.raises(UserError, match="import mine first, or give env='mine:Short'"):
        evaluate_checkpoint(moved, num_episodes=1)
    import mine  # type: ignore[import-not-found]  # noqa: F401

    evaluate_checkpoint(moved, num_episodes=1)
    recipe = read_recipe("mine:Short", {})
    del sys.modules["mine"]  # as in a worker process, which has the recipe and not the module
    make_env(pickle.loads(pickle.dumps(recipe))).close()


# ---- what the user names --------------------------------------------------------------------------------------------


def next_commands(out: str) -> list[list[str]]:
    commands = [shlex.split(line) for line in out.splitlines() if line.startswith("  rl-training ")]
    assert [words[1] for words in commands] == ["eval", "resume"]
    return [words[1:] for words in commands]


@pytest.mark.parametrize("env_id", ["mine:make", "mine:Short"])
def test_a_function_that_the_user_names_works_and_so_do_the_commands_that_are_printed(env_id: str) -> None:
    for words in next_commands(succeed("train", *PPO, "--env", env_id)):
        sys.modules.pop("mine")
        sys.path[:] = [entry for entry in sys.path if entry != os.getcwd()]
        out = succeed(*words)
        assert words[3:5] == ["--env", env_id]
    assert ["--env", env_id] == next_commands(out)[0][3:5]
    checkpoint = next(Path("runs").glob("*/checkpoints/latest.ckpt"))
    succeed("dataset", "collect", "--checkpoint", checkpoint, "--env", env_id, "--num-steps", 5, "--output", "x.npz")
    succeed("dataset", "check", "--path", "x.npz", "--env", env_id)
    succeed("eval", "--checkpoint", checkpoint, "--import", "mine")
    wanted = "--env mine:make or --import mine" if env_id == "mine:make" else "return"
    assert wanted in (refuse if env_id == "mine:make" else succeed)("eval", "--checkpoint", checkpoint)
    del sys.modules["mine"]
    assert "add --import mine" in refuse("eval", "--checkpoint", checkpoint)
    assert "add --import mine" in refuse("resume", "--checkpoint", checkpoint)


def test_importing_a_module_names_its_functions_for_a_config_too() -> None:
    Path("mine.yaml").write_text(yaml.safe_dump(tiny("ppo", Path("out"), env_id="mine:make").model_dump(mode="json")))
    assert "add --import mine" in refuse("train", "--config", "mine.yaml")
    for words in next_commands(succeed("train", "--config", "mine.yaml", "--import", "mine")):
        assert words[3:5] == ["--import", "mine"]
        succeed(*words)
    succeed("train", "--config", "ppo/cartpole", *PPO[2:], "--set", "minibatch_size=16", "--set", "env_id=mine:make")


def test_python_code_names_what_it_writes(tmp_path: Path) -> None:
    sys.path.append(str(tmp_path))
    fields = {**tiny("ppo", tmp_path).model_dump(mode="json"), "env_id": "mine:make"}
    train(TrainConfig(**fields), console=False)
    ppo = rl_training.PPO(fields)
    ppo.learn()
    ppo.evaluate(1)
    ppo.resume(total_timesteps=256)
    path = ppo.save("mine.ckpt")
    with pytest.raises(UserError, match="in Python env='mine:make'"):
        rl_training.PPO.load(path).evaluate(1)
    rl_training.PPO.load(path, env="mine:make").evaluate(1)
    evaluate_checkpoint(path, env="mine:make", num_episodes=1)


def test_a_policy_of_a_callable_is_evaluated_and_resumed_under_the_users_own_name(tmp_path: Path) -> None:
    sys.path.append(str(tmp_path))
    import mine

    checkpoint = train(tiny("ppo", tmp_path, env_id="custom"), env=lambda: mine.make(), console=False).checkpoint_path
    assert "'custom' is not registered" in refuse("eval", "--checkpoint", checkpoint)
    assert "was made for observations" in refuse("eval", "--checkpoint", checkpoint, "--env", "Pendulum-v1")
    succeed("eval", "--checkpoint", checkpoint, "--env", "CartPole-v1", "--num-episodes", 1)
    out = succeed("resume", "--checkpoint", checkpoint, "--env", "CartPole-v1", "--total-timesteps", 200)
    assert next_commands(out)[0][3:5] == ["--env", "CartPole-v1"]
    moved = ["--set", "env_id=mine:make", "--force", "--total-timesteps", 300]
    sys.path.remove(str(tmp_path))
    for words in next_commands(succeed("resume", "--checkpoint", checkpoint, *moved)):
        succeed(*words)


# ---- the working directory ------------------------------------------------------------------------------------------

STRAYS = ("yaml", "grp", "numpy", "torch", "gymnasium", "rich", "typer", "pydantic", "tensorboard", "minari", "ale_py")
COMMANDS = """
import sys, os
from rl_training.cli.main import app
for line in sys.stdin.read().splitlines():
    if line.startswith("bench"):
        from rl_training.tools import bench
        bench.settings_to_try = lambda result: {}
        bench.PACE_SECONDS = bench.MOST_SECONDS = 0.01
    try:
        app(line.split())
    except SystemExit as end:
        print(line, "->", end.code)
        assert end.code == 0, line
    assert os.getcwd() not in sys.path and "" not in sys.path, line
"""


def test_a_stray_module_in_the_working_directory_never_runs(runs: dict[str, Path], tmp_path: Path) -> None:
    folder, script = tmp_path / "here", tmp_path / "there" / "command.py"
    folder.mkdir()
    script.parent.mkdir()
    script.write_text(COMMANDS)
    for name in STRAYS:
        (folder / f"{name}.py").write_text(f"open({CANARY!r}, 'w').close()\nraise ImportError('stray {name}')\n")
    config = folder / "c.yaml"
    config.write_text(yaml.safe_dump(tiny("ppo", Path("out")).model_dump(mode="json")))
    lines = [
        "train --config c.yaml", "train --config c.yaml --set vectorization=async",
        "bench --config c.yaml --total-timesteps 16", "config --config c.yaml", "list", "config --list", "doctor",
        f"eval --checkpoint {runs['ppo']}", f"resume --checkpoint {runs['ppo']}",
        f"predict --checkpoint {runs['ppo']} --obs [0,0,0,0]",
        f"dataset collect --checkpoint {runs['dqn']} --num-steps 5 --output x.npz", "dataset check --path x.npz",
        "dataset collect --env CartPole-v1 --random --num-steps 5 --output y.npz",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(rl_training.__file__).parents[1])])}
    done = subprocess.run([sys.executable, script], input="\n".join(lines), cwd=folder, env=environment, text=True,
                          capture_output=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run([sys.executable, "-m", "rl_training", "config", "--list"], cwd=folder,
                          env=environment, text=True, capture_output=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (folder / CANARY).exists()


def test_a_module_that_the_user_imports_is_found_last() -> None:
    Path("yaml.py").write_text(ATTACK)
    succeed("config", "--config", "ppo/cartpole", "--import", "mine")
    assert sys.path[-1] == os.getcwd()
    assert not Path(CANARY).exists()


# ---- what a checkpoint contains -------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["(", "((.+)+)+Z", "gamma|.*"])
def test_a_key_of_a_checkpoint_is_no_pattern(key: str, runs: dict[str, Path]) -> None:
    params = load_checkpoint(runs["ppo"])["config"]["algo_kwargs"]
    evil = edit(runs["ppo"], "keys.ckpt", algo_kwargs={**params, key: 1})
    assert repr(key) in refuse("resume", "--checkpoint", evil, "--set", f"learning_rate={'1' * 40}")
