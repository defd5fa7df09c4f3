"""Exported policies: the same actions as `predict`, from the environment's own observations, without the package."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import env_zoo
from registry_contract import AnyKind, kind_config
from resume_cases import SPECS, tiny
from rl_training.cli.main import app
from rl_training.cli.screen import mean_interval
from rl_training.config.train_config import load_config, parse_yaml
from rl_training.errors import TrainingFailure, UserError
from rl_training.run.learner import load_policy
from rl_training.run.workflows import TrainResult, evaluate_checkpoint, train
from rl_training.tools import export as exporting
from rl_training.tools.export import ExportedPolicy, assemble, example_inputs, export_policy

SLOW = pytest.mark.slow


def trained(config: Any, env: Any = None) -> TrainResult:
    return train(config, env=env, console=False)


@pytest.mark.parametrize(
    ("algo", "action", "observation"),
    [
        pytest.param("ppo", "multi_binary", "image", marks=SLOW), ("sac", "continuous", "vector"),
        ("fqf", "discrete", "vector"), ("discrete_sac", "multi_discrete", "vector"), ("pqn", "discrete", "image"),
        pytest.param("td3", "continuous", "image", marks=SLOW),
    ],
)  # fmt: skip
def test_the_program_takes_any_number_of_rows(algo: str, action: str, observation: str, tmp_path: Path) -> None:
    checkpoint = trained(kind_config(algo, tmp_path, action, observation)).checkpoint_path
    made, policy = export_policy(checkpoint, "torch"), load_policy(checkpoint)
    program = torch.export.load(made.path).module()
    for rows in (1, 7):  # it was traced with 2
        inputs = example_inputs(ExportedPolicy(load_policy(checkpoint)), rows, np.random.default_rng(rows))
        (actions,) = program(*map(torch.from_numpy, inputs.values()))
        wanted = policy.predict(inputs["obs"])
        assert actions.numpy().dtype == wanted.dtype
        np.testing.assert_allclose(actions.numpy(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "env", [env_zoo.DictObservation, env_zoo.TupleObservation, env_zoo.DiscreteObservation, env_zoo.ShiftedDiscrete,
            env_zoo.MultiDiscreteActions, env_zoo.BoxActions, env_zoo.ScalarActions, env_zoo.Masked,
            env_zoo.MaskedFactors, partial(AnyKind, "discrete", "image"), partial(AnyKind, "discrete", "mixed")]
)  # fmt: skip
def test_the_environments_own_observations_go_in_and_its_own_actions_come_out(env: Any, tmp_path: Path) -> None:
    wrappers = {} if isinstance(env, partial) else {"wrappers": {"normalize_observation": True}}
    config = tiny("ppo", tmp_path, env_id="custom", env_kwargs=wrappers)
    policy = load_policy(trained(config, env).checkpoint_path)
    with torch.no_grad():  # a policy that tells observations apart
        for parameter in policy.algorithm.acting().parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    module = ExportedPolicy(policy).eval()
    inputs = example_inputs(module, 100, np.random.default_rng(5))
    actions = module(*map(torch.from_numpy, inputs.values()))[0].numpy()
    observations = [assemble(module.structure, inputs, row) for row in range(100)]
    wanted = policy.predict(observations, action_mask=inputs.get("action_mask"))
    assert len(np.unique(wanted, axis=0)) > 1, "a constant policy would prove nothing"
    np.testing.assert_allclose(actions, wanted, rtol=1e-5, atol=1e-5)
    assert all(policy.spaces.action_space.contains(row) for row in actions)


def test_a_file_that_acts_otherwise_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = trained(tiny("ppo", tmp_path)).checkpoint_path
    monkeypatch.setattr(exporting, "map_actions", lambda spaces, device: lambda actions: 1 - actions)
    with pytest.raises(TrainingFailure, match="1000 of 1000 actions differ from predict, by up to 1"):
        export_policy(checkpoint, "torch", tmp_path / "policy.pt2")
    assert not list(tmp_path.glob("*policy*"))


def test_critics_and_optimizers_stay_at_home(tmp_path: Path) -> None:
    made = export_policy(trained(tiny("td3", tmp_path)).checkpoint_path, "torch")
    state = torch.export.load(made.path).state_dict
    assert {name.split(".")[0] for name in state} <= {"acting"}
    assert not any("critic" in name or "optimizer" in name for name in state)


def test_what_is_wrong_is_said_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = trained(tiny("ppo", tmp_path)).checkpoint_path
    with pytest.raises(UserError, match="format is 'tflite'; it must be onnx or torch"):
        export_policy(checkpoint, "tflite")
    with pytest.raises(UserError, match=r"policy.bin; it must end with .pt2"):
        export_policy(checkpoint, "torch", tmp_path / "policy.bin")
    with pytest.raises(UserError, match="it must lie in a folder that exists"):
        export_policy(checkpoint, "torch", tmp_path / "nowhere" / "policy.pt2")
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"onnx is not installed, .* run pip install 'rl-training\[export\]'"):
        export_policy(checkpoint, "onnx")


@SLOW
def test_the_torch_program_loads_without_the_package(tmp_path: Path) -> None:
    made = export_policy(trained(tiny("ppo", tmp_path)).checkpoint_path, "torch", tmp_path / "policy.pt2")
    code = (
        "import sys, torch; program = torch.export.load(sys.argv[1]).module(); "
        "print(program(torch.zeros(3, 4))[0].shape, 'rl_training' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, made.path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "torch.Size([3]) False"


@pytest.mark.parametrize("file_format", ["onnx", "torch"])
@pytest.mark.parametrize("algo", [pytest.param(name, marks=[SLOW]) for name in SPECS])
def test_every_algorithm_acts_as_predict_does(algo: str, file_format: str, tmp_path: Path) -> None:
    made = export_policy(trained(tiny(algo, tmp_path)).checkpoint_path, file_format)
    parity = json.loads(made.path.with_name(f"{made.path.name}.json").read_text())["parity"]
    assert (parity["observations"], parity["different"]) == (1000, 0)
    assert parity["max_abs_difference"] < 1e-5
    assert parity["distinct_actions"] > 1 or algo == "dreamer"  # whose short run knows one action, but 1,000 states
    assert parity.get("max_abs_state_difference", 0.0) < 1e-5
    assert ("max_abs_state_difference" in parity) == (algo in ("dreamer", "r2d2"))


def test_the_card_says_how_it_plays_and_how_to_train_it_again(tmp_path: Path) -> None:
    run = trained(tiny("ppo", tmp_path))
    words = ["export", "--checkpoint", str(run.run_dir), "--format", "torch", "--output", str(tmp_path / "policy.pt2")]
    result = CliRunner().invoke(app, [*words, "--card", "--num-episodes", "4"])
    assert result.exit_code == 0, result.output
    assert "policy.pt2.md" in result.stdout
    card = (tmp_path / "policy.pt2.md").read_text()
    scores = evaluate_checkpoint(run.checkpoint_path, num_episodes=4, seed=10_003)
    mean, half = mean_interval(scores["eval_returns"])
    assert half is not None
    assert f"| {mean:.1f} | {mean - half:.1f} to {mean + half:.1f} |" in card
    again = parse_yaml(card.partition("```yaml\n")[2].partition("```")[0])
    assert load_config(again).algo_kwargs["num_steps"] == 8
    assert "run `rl-training train --config config.yaml`." in card
    code = card.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"obs": torch.zeros(2, 4)}
    exec(code, names)
    assert names["action"].shape == (2,)


def test_the_card_names_the_modules_that_training_again_imports(tmp_path: Path) -> None:
    run = trained(tiny("ppo", tmp_path, env_id="env_zoo:Walk"))
    words = ["export", "--checkpoint", str(run.run_dir), "--format", "torch", "--output", str(tmp_path / "policy.pt2")]
    result = CliRunner().invoke(app, [*words, "--card", "--num-episodes", "2", "--import", "json"])
    assert result.exit_code == 0, result.output
    card = (tmp_path / "policy.pt2.md").read_text()
    assert "run `rl-training train --config config.yaml --import json --import env_zoo`." in card


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--env", "CartPole-v1"], "--env is for --card"),
        (["--num-episodes", "1"], "--num-episodes is '1'; it must be a whole number of at least 2"),
        (["--format", "tflite"], "format is 'tflite'; it must be onnx or torch"),
    ],
)
def test_wrong_words_are_one_sentence(words: list[str], sentence: str, tmp_path: Path) -> None:
    checkpoint = trained(tiny("ppo", tmp_path)).checkpoint_path
    result = CliRunner().invoke(app, ["export", "--checkpoint", str(checkpoint), *words])
    assert result.exit_code == 2
    assert sentence in result.output
