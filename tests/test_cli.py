"""The command line: every command's happy path, one sentence and exit code 2 on wrong input, no traceback unasked."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from resume_cases import rows_of
from rl_training.cli.main import app
from rl_training.cli.options import apply_settings
from rl_training.cli.screen import describe, describe_warning, larger_budget, mean_interval, run_to_exit_code
from rl_training.errors import Terminated, UserError
from rl_training.run.workflows import train

TINY = ["--config", "ppo/cartpole", "--total-timesteps", "256", "--num-envs", "2", "--eval-episodes", "2",
        "--set", "num_steps=64", "--set", "minibatch_size=64"]  # fmt: skip
CRASHING = """
import gymnasium as gym
import numpy as np

class Crashing(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        raise ZeroDivisionError("the pole\\nfell off")
"""


def invoke(*words: str, input: str | None = None) -> Any:
    return CliRunner().invoke(app, list(words), input=input)


def succeed(*words: str, input: str | None = None) -> str:
    result = invoke(*words, input=input)
    assert result.exit_code == 0, result.output
    return result.stdout


def command(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rl_training", *words], cwd=folder, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one tiny run."""
    folder = tmp_path_factory.mktemp("trained")
    result = CliRunner().invoke(app, ["train", *TINY, "--output-dir", str(folder)])
    assert result.exit_code == 0, result.output
    return next(folder.iterdir())


@pytest.fixture
def checkpoint(trained: Path) -> str:
    return str(trained / "checkpoints" / "latest.ckpt")


# ---- the commands --------------------------------------------------------------------------------


def test_train_says_what_came_out_and_what_to_run_next() -> None:
    out = succeed("train", *TINY, "--output-dir", "out")
    run = next(Path("out").iterdir())
    assert "over 2 evaluation episodes" in out
    assert "steps/s" in out
    assert f"rl-training eval --checkpoint {run}/checkpoints/latest.ckpt" in out
    assert f"rl-training resume --checkpoint {run}/checkpoints/latest.ckpt" in out
    assert (run / "metrics.jsonl").is_file()


def test_train_by_algorithm_and_environment_starts_from_the_defaults_of_the_algorithm() -> None:
    succeed("train", "--algo", "ppo", "--env", "CartPole-v1", "--total-timesteps", "1e2", "--set", "num_steps=16",
            "--set", "learning_rate=1e-4", "--set", "algo_kwargs.gamma=0.9", "--set", "env_kwargs.max_episode_steps=50",
            "--set", "early_stopping.threshold=475", "--set", "eval_interval=1000", "--seed", "7")  # fmt: skip
    config = yaml.safe_load(next(Path("runs").glob("*/config.yaml")).read_text())
    assert (config["num_envs"], config["total_timesteps"], config["seed"]) == (8, 100, 7)
    assert (config["algo_kwargs"]["learning_rate"], config["algo_kwargs"]["gamma"]) == (1e-4, 0.9)
    assert config["algo_kwargs"]["early_stopping"]["threshold"] == 475
    wrappers = {"normalize_observation": True, "normalize_reward": True}  # auto, as decided
    assert config["env_kwargs"] == {"max_episode_steps": 50, "wrappers": wrappers}


def test_seeds_run_in_turn_and_end_in_a_table_with_mean_and_interval() -> None:
    out = succeed("train", *TINY, "--seeds", "3,4")
    assert len(list(Path("runs").iterdir())) == 2
    assert "mean over 2 seeds" in out
    assert "95 % interval" in out


def test_import_registers_an_environment_of_the_working_directory() -> None:
    Path("my_cli_envs.py").write_text(
        "import gymnasium as gym\n"
        "gym.register('MyCart-v0', entry_point='gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=20)\n"
    )
    tiny = ["--total-timesteps", "64", "--set", "num_steps=8"]
    out = succeed("train", "--algo", "ppo", "--env", "MyCart-v0", "--import", "my_cli_envs", *tiny)
    for line in out.splitlines()[-2:]:  # the commands to run next
        name, *words = shlex.split(line)
        assert name == "rl-training"
        assert words[3:5] == ["--import", "my_cli_envs"]
        succeed(*words)


def test_eval_shows_mean_and_every_return(checkpoint: str) -> None:
    out = succeed("eval", "--checkpoint", checkpoint, "--num-episodes", "3")
    assert "over 3 evaluation episodes, deterministic" in out
    assert succeed("eval", "--checkpoint", checkpoint, "--num-episodes", "3") == out
    assert "sampled" in succeed("eval", "--checkpoint", checkpoint, "--stochastic", "--seed", "5")


def test_eval_takes_a_run_folder_for_its_newest_checkpoint(trained: Path) -> None:
    assert "latest.ckpt" in succeed("eval", "--checkpoint", str(trained), "--num-episodes", "1")


def test_resume_goes_on_to_a_larger_budget_in_a_new_folder(checkpoint: str) -> None:
    result = invoke("resume", "--checkpoint", checkpoint, "--total-timesteps", "512", "--output-dir", "more")
    assert result.exit_code == 0, result.output
    assert "resumed at step" in result.stdout
    assert "the budget is now 512 steps" in result.stderr
    assert len(list(Path("more").glob("*/checkpoints/latest.ckpt"))) == 1


def test_resume_of_a_finished_run_says_that_nothing_was_left(checkpoint: str) -> None:
    out = succeed("resume", "--checkpoint", checkpoint, "--output-dir", "again")
    assert "the budget is used up; give a larger one, such as --total-timesteps" in out


@pytest.mark.parametrize(
    ("reason", "option"),
    [
        ("max_seconds", "--set max_seconds=25"), ("max_updates", "--set max_updates=14"), ("SIGINT", ""),
        ("total_timesteps", "--total-timesteps 200"), ("early_stopping", "--total-timesteps 200"),
    ],
)  # fmt: skip
def test_the_next_command_gives_more_of_the_budget_that_was_spent(reason: str, option: str) -> None:
    metrics = {"stop_reason": reason, "train_seconds": 12.3, "updates": 7, "global_step": 100}
    assert larger_budget(metrics) == option


def test_resume_changes_more_than_the_budget_only_by_force(checkpoint: str) -> None:
    words = ["resume", "--checkpoint", checkpoint, "--output-dir", "forced", "--set", "ent_coef=0.01"]
    refused = invoke(*words)
    assert refused.exit_code == 2
    assert "algo_kwargs.ent_coef" in refused.stderr
    assert "hidden_sizes" not in refused.stderr
    forced = invoke(*words, "--force")
    assert forced.exit_code == 0, forced.output
    assert "algo_kwargs.ent_coef" in forced.stderr


def test_predict_prints_json_for_one_observation_and_for_a_batch(checkpoint: str) -> None:
    assert json.loads(succeed("predict", "--checkpoint", checkpoint, "--obs", "[0, 0, 0.1, 0]")) in (0, 1)
    batch = [[0, 0, 0.1, 0], [0, 0, -0.1, 0]]
    expected = json.loads(succeed("predict", "--checkpoint", checkpoint, "--obs", json.dumps(batch)))
    assert len(expected) == 2
    Path("obs.json").write_text(json.dumps(batch))
    np.save("obs.npy", np.array(batch))
    for given in ("obs.json", "obs.npy"):
        assert json.loads(succeed("predict", "--checkpoint", checkpoint, "--obs", given)) == expected
    assert json.loads(succeed("predict", "--checkpoint", checkpoint, "--obs", "-", input=json.dumps(batch))) == expected
    assert json.loads(succeed("predict", "--checkpoint", checkpoint, "--obs", "[0, 0, 0, 0]", "--stochastic")) in (0, 1)


def test_predict_obeys_a_mask_and_refuses_a_wrong_one(checkpoint: str) -> None:
    succeed("train", "--algo", "ppo", "--env", "env_zoo:Masked", "--output-dir", "masked", "--total-timesteps", "16",
            "--eval-episodes", "0", "--num-envs", "1", "--set", "num_steps=8", "--set", "minibatch_size=8")  # fmt: skip
    masked = str(next(Path("masked").iterdir()))

    def predict(obs: str, mask: str, path: str = masked) -> Any:
        return invoke("predict", "--checkpoint", path, "--obs", obs, "--action-mask", mask)

    Path("masks.json").write_text("[[0, 1, 0, 0, 0], [0, 0, 0, 0, 1]]")
    assert predict("[0, 0]", "[0, 0, 0, 1, 0]").stdout == "3\n"
    assert predict("[[0, 0], [0, 0]]", "masks.json").stdout == "[1, 4]\n"
    for mask, expected in (("[1,", "--action-mask: '[1,' is not valid JSON; a mask looks like [1, 0, 1]."),
                           ("[1, 0]", "2 entries; its action space needs 5"), ("[0, 0, 0, 0, 0]", "every action"),
                           ("nothing.npy", "--action-mask nothing.npy cannot be read")):  # fmt: skip
        result = predict("[0, 0]", mask)
        check_one_sentence(result.exit_code, result.stderr, expected)
    result = predict("[0, 0, 0, 0]", "[1, 0]", checkpoint)
    check_one_sentence(result.exit_code, result.stderr, "CartPole-v1 has no action masks")


def test_list_shows_every_registered_algorithm() -> None:
    from rl_training.experiment.registry import list_algorithm_specs

    out = succeed("list")
    for spec in list_algorithm_specs():
        assert spec.name in out
        assert str(spec.year) in out
    assert max(map(len, out.splitlines())) <= 80  # without a terminal; in one it has that one's width


@pytest.mark.parametrize("words", [["config", "--schema"], ["train", "--help"]])
def test_a_reader_that_ends_early_is_no_error(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ours = [sys.executable, "-m", "rl_training", *words]
    done = subprocess.run(ours, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert done.stderr == ""


def test_list_says_what_each_preset_reached() -> None:
    from rl_training.config.train_config import list_presets, read_reached

    shown = {words[0]: words[1:] for line in succeed("list").splitlines() if len(words := line.split()) > 1}
    reached = read_reached()
    assert reached.keys() <= set(list_presets())
    assert shown["ppo/cartpole"] == ["500", "in", "99,003", "steps", "(5", "seeds)"]
    assert shown["dreamer/cartpole_pixels"] == ["untrained"]
    assert {name for name in list_presets() if shown[name] != ["untrained"]} == reached.keys()


def test_config_prints_what_a_run_would_use() -> None:
    shown = yaml.safe_load(succeed("config", "--config", "configs/ppo/cartpole.yaml", "--set", "gamma=0.5"))
    assert shown["algo_kwargs"]["gamma"] == 0.5
    assert shown["algo_kwargs"]["clip_coef"] == 0.2
    assert shown["threads"] == "auto"  # which an environment decides, and none is made
    Path("mine.yaml").write_text(yaml.safe_dump(shown))
    assert yaml.safe_load(succeed("config", "--config", "mine.yaml")) == shown
    assert "ppo/cartpole" in succeed("config", "--list").splitlines()


LINE = "--set learning_rate=0.01 replaces learning_rate_schedule (linear, 0.001 to 0.0)\n"


def test_a_number_that_is_set_replaces_its_schedule_and_says_so() -> None:
    words = ["config", "--config", "ppo/cartpole", "--set", "learning_rate=1e-2"]
    result = invoke(*words)
    kwargs = yaml.safe_load(result.stdout)["algo_kwargs"]
    assert (kwargs["learning_rate"], "learning_rate_schedule" in kwargs, result.stderr) == (0.01, False, LINE)
    both = invoke(*words, "--set", "learning_rate_schedule.end=5e-4")
    assert yaml.safe_load(both.stdout)["algo_kwargs"]["learning_rate_schedule"]["end"] == 5e-4
    assert both.stderr == ""
    trained = invoke("train", *TINY, "--set", "learning_rate=1e-2", "--seeds", "1,2")
    assert trained.stderr.count(LINE) == 1
    for path in Path("runs").glob("*/metrics.jsonl"):
        assert {row["learning_rate"] for row in rows_of(path.parent) if "learning_rate" in row} <= {0.01}


def test_resume_with_a_number_replaces_its_schedule_by_force(checkpoint: str) -> None:
    words = ["resume", "--checkpoint", checkpoint, "--output-dir", "on", "--total-timesteps", "512",
             "--set", "learning_rate=3e-4"]  # as stored: what is scheduled is not it
    refused = invoke(*words)
    assert refused.exit_code == 2
    assert "learning_rate_schedule" in refused.stderr
    forced = invoke(*words, "--force")
    assert forced.exit_code == 0, forced.output
    assert "changed by --force: algo_kwargs.learning_rate_schedule is gone (was {" in forced.stderr
    config = yaml.safe_load(next(Path("on").glob("*/config.yaml")).read_text())
    assert "learning_rate_schedule" not in config["algo_kwargs"]


def test_config_schema_knows_the_hyper_parameters_of_an_algorithm() -> None:
    general = json.loads(succeed("config", "--schema"))
    assert "ppo" in general["properties"]["algo"]["enum"]
    assert general["additionalProperties"] is False
    schema = json.loads(succeed("config", "--schema", "--algo", "ppo"))
    fields = schema["properties"]["algo_kwargs"]["properties"]
    assert {"clip_coef", "learning_rate_schedule"} <= set(fields)
    assert "schedules" not in fields
    wanted = set(_references(schema))
    assert wanted <= {f"#/$defs/{name}" for name in schema["$defs"]}
    assert "#/$defs/Schedule" in wanted


def _references(part: Any) -> list[str]:
    if isinstance(part, dict):
        own = [part["$ref"]] if "$ref" in part else []
        return own + [found for value in part.values() for found in _references(value)]
    return [found for value in part for found in _references(value)] if isinstance(part, list) else []


def test_help_and_version_answer() -> None:
    assert "train" in succeed()
    assert "--checkpoint" in succeed("resume", "--help")
    assert succeed("--version").startswith("rl-training ")


def test_cli_exports_load_config() -> None:
    from rl_training.cli import load_config
    from rl_training.config import train_config as config

    assert load_config is config.load_config


# ---- wrong input --------------------------------------------------------------------------------

PPO = ["train", "--config", "ppo/cartpole"]
NAMED = ["train", "--algo", "ppo", "--env", "CartPole-v1"]
WRONG = {
    "command": (["trian"], "did you mean 'train'?"),
    "option": ([*PPO, "--total-timestep", "5"], "did you mean '--total-timesteps'?"),
    "global option": (["--debugg", "list"], "did you mean '--debug'?"),
    "no value": (["train", "--config"], "--config"),
    "extra word": ([*PPO, "now"], "now"),
    "nothing to train": (["train"], "give a preset such as ppo/cartpole"),
    "no environment": (["train", "--algo", "ppo"], "--env is missing"),
    "two sources": ([*PPO, "--algo", "ppo"], "so --algo cannot be given too"),
    "two presets": ([*PPO, "dqn/cartpole"], "'dqn/cartpole' and --config ppo/cartpole were both given"),
    "algorithm as a preset": (["train", "--config", "dqn"], "give one of its presets (dqn/"),
    "algorithm as a word": (["train", "ppo"], "'ppo' is an algorithm; give one of its presets (ppo/"),
    "set of a wrapper": ([*PPO, "--set", "normalize_observation=true"],
                         "did you mean 'env_kwargs.wrappers.normalize_observation'?"),
    "set of a limit": ([*PPO, "--set", "max_episode_steps=5"], "did you mean 'env_kwargs.max_episode_steps'?"),
    "set of a short name": ([*PPO, "--set", "lr=1e-3"], "did you mean 'learning_rate'?"),
    "wrapper as an argument": ([*PPO, "--set", "env_kwargs.normalize_reward=true"],
                               "did you mean 'env_kwargs.wrappers.normalize_reward'?"),
    "argument that no one takes": ([*PPO, "--set", "env_kwargs.gravitas=1"],
                                   "env_kwargs: unknown key 'gravitas'; CartPole-v1 does not take it."),
    "field as a hyper-parameter": ([*PPO, "--set", "algo_kwargs.num_envs=2"], "did you mean 'num_envs'?"),
    "preset": (["train", "--config", "ppo/cartpol"], "did you mean 'ppo/cartpole'?"),
    "algorithm": (["train", "--algo", "pppo", "--env", "CartPole-v1"], "did you mean 'ppo'?"),
    "environment": (["train", "--algo", "ppo", "--env", "CartPol-v1"], "did you mean 'CartPole-v1'?"),
    "seed": ([*PPO, "--seed", "x"], "seed is 'x'"),
    "seeds": ([*PPO, "--seeds", "1,,2"], "--seeds"),
    "seed too large": ([*PPO, "--seeds", "1,4294967296"], "from 0 to 4294967295"),
    "seed twice": ([*PPO, "--seeds", "1,1"], "each seed may be given only once"),
    "seed and seeds": ([*PPO, "--seed", "1", "--seeds", "2"], "both given"),
    "bound": ([*PPO, "--num-envs", "0"], "num_envs is 0"),
    "backend": ([*PPO, "--execution-backend", "spark"], "local_sync"),
    "device": ([*PPO, "--device", "tpu"], "device is 'tpu'"),
    "set without value": ([*PPO, "--set", "gamma"], "KEY=VALUE"),
    "set of a typo": ([*PPO, "--set", "learning_rat=1"], "did you mean 'learning_rate'?"),
    "set of nothing known": ([*PPO, "--set", "qqq=1"], "config --schema"),
    "set out of bounds": ([*NAMED, "--set", "gamma=2"], "gamma is 2"),
    "set of broken yaml": ([*NAMED, "--set", "gamma=[1"], "not valid YAML"),
    "set inside a number": ([*NAMED, "--set", "num_envs.x=1"], "has no parts"),
    "module": ([*PPO, "--import", "no_such_module_here"], "cannot be imported"),
    "no checkpoint": (["eval"], "eval needs --checkpoint"),
    "missing checkpoint": (["eval", "--checkpoint", "nothing.ckpt"], "does not exist"),
    "schema of nothing": (["config", "--schema", "--algo", "zzz"], "not a registered algorithm"),
    "doctor without environment": (["doctor", "--algo", "ppo"], "--env is missing"),
    "bench budget": (["bench", "--config", "ppo/cartpole", "--total-timesteps", "-4"], "at least 1"),
}  # fmt: skip


def check_one_sentence(code: int, stderr: str, expected: str) -> None:
    assert code == 2, stderr
    lines = stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert expected in lines[0]
    assert "Traceback" not in stderr


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_input_is_one_sentence_and_leaves_no_run(name: str) -> None:
    words, expected = WRONG[name]
    result = invoke(*words)
    check_one_sentence(result.exit_code, result.stderr, expected)
    assert result.stdout == ""
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("gamma: 0.9", "mine.yaml: unknown key 'gamma'; did you mean 'algo_kwargs.gamma'?"),
        ("lr: 0.9", "mine.yaml: unknown key 'lr'; did you mean 'algo_kwargs.learning_rate'?"),
        ("clip_coef_schedule: {start: 1}", "did you mean 'algo_kwargs.clip_coef_schedule'?"),
        ("frame_stack: 4", "did you mean 'env_kwargs.wrappers.frame_stack'?"),
        ("num_env: 4", "did you mean 'num_envs'?"),
        ("algo_kwargs: {max_episode_steps: 4}", "did you mean 'env_kwargs.max_episode_steps'?"),
        ("algo_kwargs: {gama: 4}", "algo_kwargs: unknown key 'gama'; did you mean 'gamma'?"),
        ("env_kwargs: {wrappers: {gamma: 4}}", "env_kwargs.wrappers: unknown key 'gamma'; known:"),
    ],
)
def test_a_key_in_the_wrong_place_of_a_file_gets_its_full_path(line: str, expected: str) -> None:
    Path("mine.yaml").write_text(f"algo: ppo\nenv_id: CartPole-v1\ntotal_timesteps: 100\n{line}\n")
    for words in (["train", "mine.yaml"], ["config", "mine.yaml"]):
        result = invoke(*words)
        check_one_sentence(result.exit_code, result.stderr, expected)
    with pytest.raises(UserError) as refused:
        train("mine.yaml")
    assert expected in str(refused.value)


def test_a_preset_may_be_a_word_of_its_own() -> None:
    assert succeed("config", "ppo/cartpole") == succeed("config", "--config", "ppo/cartpole")
    assert "ppo on CartPole-v1" in succeed("train", *TINY[1:])
    assert yaml.safe_load(succeed("config", "ppo", "--env", "Acrobot-v1"))["env_id"] == "Acrobot-v1"


@pytest.mark.parametrize(
    ("obs", "expected"),
    [
        ("[1,", "not valid JSON"), ("[1, 2]", "shape"), ("nothing.npy", "cannot be read"),
        ("nothing.json", "cannot be read"), ("broken.npy", "not a .npy file"), ("pickle.npy", "not a .npy file"),
        ("[" * 100_000, "not valid JSON"), ('["a", 0, 0, 0]', "obs"), ("[NaN, 0, 0, 0]", "NaN"),
    ],
)  # fmt: skip
def test_a_wrong_observation_is_one_sentence(checkpoint: str, obs: str, expected: str) -> None:
    Path("broken.npy").write_bytes(b"not an array")
    np.save("pickle.npy", np.array([{"a": 1}]), allow_pickle=True)
    result = invoke("predict", "--checkpoint", checkpoint, "--obs", obs)
    check_one_sentence(result.exit_code, result.stderr, expected)


@pytest.mark.parametrize(
    "options", [["--num-episodes", "0"], ["--num-episodes", "many"], ["--render", "--record-video", "videos"]]
)
def test_wrong_eval_options_are_one_sentence(checkpoint: str, options: list[str]) -> None:
    result = invoke("eval", "--checkpoint", checkpoint, *options)
    check_one_sentence(result.exit_code, result.stderr, options[0])


def test_a_video_without_moviepy_leaves_no_folder(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_training.run.evaluation.find_spec", lambda name: None)
    result = invoke("eval", "--checkpoint", checkpoint, "--record-video", "videos")
    check_one_sentence(result.exit_code, result.stderr, "rl-training[video]")
    assert not Path("videos").exists()


def test_debug_shows_the_traceback_before_or_after_the_command() -> None:
    wrong = ["train", "--algo", "no", "--env", "x"]
    for words in (["--debug", *wrong], [*wrong, "--debug"]):
        result = invoke(*words)
        assert result.exit_code == 2
        assert "Traceback" in result.stderr
        assert "UserError" in result.stderr


# ---- failed runs --------------------------------------------------------------------------------


def test_an_environment_that_raises_ends_the_run_with_1_and_one_sentence() -> None:
    Path("crashing_env.py").write_text(CRASHING)
    result = invoke("train", "--algo", "ppo", "--env", "crashing_env:Crashing")
    assert result.exit_code == 1
    *_, sentence, hint = result.stderr.strip().splitlines()
    assert sentence.startswith("error: the environment crashing_env:Crashing raised ZeroDivisionError: the pole (")
    assert "the pole (crashing_env.py, line 14); fix" in sentence
    assert hint == "run with --debug for the traceback"
    assert "Traceback" not in result.stderr


def test_a_training_failure_keeps_its_own_words() -> None:
    from rl_training.errors import TrainingFailure

    assert describe(TrainingFailure("the tensor 'w' is not finite.")) == (1, "the tensor 'w' is not finite.")


def test_a_second_interrupt_is_130_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    def terminated() -> None:
        raise Terminated

    assert [run_to_exit_code(interrupted), run_to_exit_code(terminated)] == [130, 143]
    assert "Traceback" not in capsys.readouterr().err


# ---- runs that a signal stops -------------------------------------------------------------------

SIGNALS = """
import signal
from gymnasium.envs.classic_control import CartPoleEnv

class Signals(CartPoleEnv):
    steps = 0

    def __init__(self, number):
        super().__init__()
        self.number = number

    def step(self, action):
        Signals.steps += 1
        in_a_run = signal.getsignal(self.number) not in (signal.SIG_DFL, signal.default_int_handler)
        if Signals.steps > 40 and in_a_run:
            Signals.steps = 0
            signal.raise_signal(self.number)
        return super().step(action)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_with_128_and_its_number(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("signals.py").write_text(SIGNALS)
    monkeypatch.delitem(sys.modules, "signals", raising=False)
    words = ["--algo", "a2c", "--env", "signals:Signals", "--set", f"env_kwargs.number={int(number)}"]
    result = invoke("train", *words, "--num-envs", "1", "--eval-episodes", "0", "--seeds", "1,2", "--name", "x")
    assert result.exit_code == 128 + number, result.output
    assert [path.name for path in Path("runs").iterdir()] == ["x-s1"]
    result = invoke("resume", "--checkpoint", "runs/x-s1", "--env", "signals:Signals")
    assert result.exit_code == 128 + number, result.output
    assert result.stdout.count("rl-training resume") == 1


# ---- pieces --------------------------------------------------------------------------------


def test_set_reads_yaml_and_leaves_what_it_was_given_alone() -> None:
    data = {"algo": "ppo", "algo_kwargs": {"gamma": 0.5}}
    given = ["hidden_sizes=[8, 8]", "tags=[a, b]", "env_kwargs.wrappers.frame_stack=2", "gamma=1e-1"]
    changed = apply_settings(data, given)
    assert changed["algo_kwargs"] == {"gamma": 0.1, "hidden_sizes": [8, 8]}
    assert changed["tags"] == ["a", "b"]
    assert changed["env_kwargs"] == {"wrappers": {"frame_stack": 2}}
    assert data == {"algo": "ppo", "algo_kwargs": {"gamma": 0.5}}
    with pytest.raises(UserError, match="has no parts"):
        apply_settings({"algo": "ppo", "seed": 3}, ["seed.x=1"])


def test_interval_is_students_t() -> None:
    assert mean_interval([4.0]) == (4.0, None)
    mean, half = mean_interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.303 / 3**0.5)


# ---- as real commands --------------------------------------------------------------------------------


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "import rl_training\n"
        "from rl_training.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "heavy = {'torch', 'gymnasium', 'pydantic', 'numpy', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout


def test_module_runs_as_a_command(tmp_path: Path) -> None:
    done = command("config", "--config", "ppo/cartpole", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["algo"] == "ppo"


def test_a_real_command_refuses_wrong_input_with_one_sentence(tmp_path: Path) -> None:
    done = command("train", "--config", "ppo/cartpole", "--num-envs", "no", folder=tmp_path)
    check_one_sentence(done.returncode, done.stderr, "num_envs is 'no'")
    assert list(tmp_path.iterdir()) == []


def test_warnings_of_gymnasium_are_plain_lines() -> None:
    said = "\x1b[33mWARN: The environment CartPole-v0 is out of date.\x1b[0m"
    assert describe_warning(DeprecationWarning(said)) == "warning: The environment CartPole-v0 is out of date."
    assert describe_warning(UserWarning("survival bias")) == "warning: survival bias"
