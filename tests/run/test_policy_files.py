"""Policy files: they act as the checkpoint does, are small, hold nothing to train from, and run no code."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from limits import limited
from resume_cases import SPECS, tiny
from rl_training import A2C, PPO
from rl_training.cli.main import app
from rl_training.config.params import read_params
from rl_training.config.train_config import list_presets
from rl_training.envs.factory import read_recipe
from rl_training.envs.probe import probe_spaces
from rl_training.errors import UserError
from rl_training.record.checkpoints import load_checkpoint, save_checkpoint
from rl_training.run import learner, workflows
from rl_training.run.workflows import resume_training, train
from rl_training.run.zoo import find_policy, list_zoo, read_card


def first_checkpoint(algo: str, folder: Path, **kwargs: Any) -> tuple[dict[str, Any], Any]:
    """A tree with the parts of a checkpoint, and the learner in it, whose weights no seed gives."""
    config, spec = tiny(algo, folder, kwargs=kwargs), SPECS[algo]
    params, spaces = read_params(spec.params, config.algo_kwargs), probe_spaces(read_recipe(config.env_id, {}))
    algorithm = learner.build_algorithm(spec, params, spaces, seed=0, device="cpu")
    with torch.no_grad():
        for parameter in algorithm.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    tree = {
        "schema": learner.SCHEMA, "config": config.model_dump(mode="json"), "spaces": spaces.to_dict(),
        "algorithm": dict(algorithm.state_dict()), "source": {"replay": np.zeros(10_000)}, "run": {"step": 5},
    }  # fmt: skip
    return tree, algorithm


@pytest.mark.parametrize("algo", SPECS)
def test_a_policy_file_acts_as_its_checkpoint_and_is_smaller(algo: str, tmp_path: Path) -> None:
    tree, algorithm = first_checkpoint(algo, tmp_path)
    whole = save_checkpoint(tmp_path / "whole.ckpt", tree)
    alone = save_checkpoint(tmp_path / "alone.policy", learner.policy_tree(tree, algorithm))
    there, here = learner.load_policy(whole), learner.load_policy(alone)
    space = there.spaces.observation_space
    space.seed(0)
    obs = np.stack([np.clip(space.sample(), -3.0, 3.0) for _ in range(20)]).astype(space.dtype)
    np.testing.assert_array_equal(here.predict(obs), there.predict(obs))
    assert alone.stat().st_size < whole.stat().st_size


def test_half_precision_acts_nearly_the_same_in_half_the_bytes(tmp_path: Path) -> None:
    tree, algorithm = first_checkpoint("sac", tmp_path, hidden_sizes=[64, 64])
    paths = [
        save_checkpoint(tmp_path / f"{half}.policy", learner.policy_tree(tree, algorithm, half=half))
        for half in (False, True)
    ]
    wide, narrow = (learner.load_policy(path) for path in paths)
    obs = np.random.default_rng(0).normal(size=(50, *wide.spaces.obs_shape)).astype(np.float32)
    difference = np.abs(wide.predict(obs) - narrow.predict(obs)).max()
    assert 0 < difference < 0.02
    assert paths[1].stat().st_size < 0.6 * paths[0].stat().st_size
    assert all(p.dtype == torch.float32 for p in narrow.algorithm.parameters())


def test_half_precision_keeps_statistics_that_16_bits_cannot_hold(tmp_path: Path) -> None:
    config = tiny("a2c", tmp_path, env_kwargs={"wrappers": {"normalize_observation": True}})
    checkpoint = train(config, console=False).checkpoint_path
    tree = learner.read_checkpoint(checkpoint)
    algorithm, _, _ = learner.load_algorithm(checkpoint, tree)
    name = next(name for name, _ in algorithm.acting().named_buffers() if name.endswith("var"))
    algorithm.acting().get_buffer(name).fill_(1e6)
    path = save_checkpoint(tmp_path / "half.policy", learner.policy_tree(tree, algorithm, half=True))
    assert bool((learner.load_policy(path).algorithm.acting().get_buffer(name) == 1e6).all())


def test_training_does_not_continue_from_a_policy_file(tmp_path: Path) -> None:
    model = A2C(tiny("a2c", tmp_path))
    model.learn(progress=False)
    path = model.save(tmp_path / "small.policy", policy_only=True)
    with pytest.raises(UserError, match="it can act, but not continue training; give a run's checkpoint"):
        resume_training(path, total_timesteps=100_000, console=False)
    loaded = A2C.load(path)
    assert loaded.evaluate(2, seed=1)["eval_returns"] == model.evaluate(2, seed=1)["eval_returns"]
    assert loaded.save(tmp_path / "again.policy", policy_only=True).read_bytes() == path.read_bytes()
    with pytest.raises(UserError, match="a policy file holds no replay buffer"):
        model.save(tmp_path / "both.policy", include_replay=True, policy_only=True)


def test_a_forged_policy_file_is_refused_before_memory_is_spent(tmp_path: Path) -> None:
    tree, algorithm = first_checkpoint("sac", tmp_path)
    small = copy.deepcopy(learner.policy_tree(tree, algorithm))
    small["config"]["algo_kwargs"]["hidden_sizes"] = [16384] * 16
    path = save_checkpoint(tmp_path / "huge.policy", small)
    with limited(seconds=20, megabytes=600), pytest.raises(UserError, match="does not fit its own config"):
        learner.load_policy(path)
    other = learner.policy_tree(tree, algorithm)
    other["algorithm"].pop(next(iter(other["algorithm"])))
    with pytest.raises(UserError, match="does not fit its own config: policy lacks"):
        learner.load_policy(save_checkpoint(tmp_path / "odd.policy", other))


@pytest.mark.parametrize("name", list_zoo())
def test_a_packaged_policy_is_what_its_card_says(name: str) -> None:
    card, path = read_card(name), find_policy(name)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == card.sha256
    tree = load_checkpoint(path)
    assert (card.preset, card.algo, card.steps) == (name, tree["config"]["algo"], tree["run"]["step"])
    assert card.env_id == tree["config"]["env_id"]
    assert card.preset in list_presets()
    assert path.stat().st_size <= 300_000 or card.weights == "float16"


def test_the_zoo_stays_small() -> None:
    assert sum(find_policy(name).stat().st_size for name in list_zoo()) < 15_000_000


def test_a_packaged_policy_is_loaded_by_name() -> None:
    model = A2C.from_zoo("cartpole")
    assert model.evaluate(1)["eval_return_mean"] == 500.0
    with pytest.raises(UserError, match=r"a2c/cartpole is a policy of a2c, not of ppo; use A2C\.from_zoo\."):
        PPO.from_zoo("a2c/cartpole")
    with pytest.raises(UserError, match="the zoo has no policy 'a2c/cartpol'; did you mean 'a2c/cartpole'"):
        A2C.from_zoo("cartpol")


def test_a_packaged_policy_refuses_to_learn_on_before_it_says_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"it can act, but not continue training; learn\(reset=True\) trains a new"):
        A2C.from_zoo("cartpole").learn(64)
    assert not capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_enjoy_counts_its_episodes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = {"eval_return_mean": 500.0, "eval_return_std": 0.0, "eval_episodes": 1}
    monkeypatch.setattr(workflows, "evaluate_checkpoint", lambda *_, **__: metrics)
    shown = CliRunner().invoke(app, ["enjoy", "a2c/cartpole", "--num-episodes", "1"]).output
    assert "500.0 ± 0.0 over 1 evaluation episode\n" in shown


def test_commands_of_the_zoo(tmp_path: Path) -> None:
    def run(*words: str) -> str:
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert "a2c/cartpole" in run("zoo", "list")
    assert "rl-training train --config a2c/cartpole --seed 0" in run("zoo", "show", "a2c/cartpole")
    copied = run("zoo", "get", "a2c/cartpole", "--output", str(tmp_path)).strip()
    assert Path(copied).read_bytes() == find_policy("a2c/cartpole").read_bytes()
