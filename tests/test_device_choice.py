"""`device: auto`: a GPU only where it pays, and a run that passes over one says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from gymnasium import spaces as gs

from registry_contract import OBSERVATIONS
from resume_cases import SPECS, tiny
from rl_training.envs.factory import probe_spaces, read_recipe
from rl_training.envs.spaces import EnvSpaces
from rl_training.runtime.params import read_params
from rl_training.runtime.session import choose_device, resolve
from rl_training.runtime.workflows import train

VECTOR = probe_spaces(read_recipe("CartPole-v1", {}))
IMAGE = probe_spaces(read_recipe("env_zoo:MinAtarLike", {}))
MIXED = EnvSpaces.from_gym("Mixed-v0", OBSERVATIONS["mixed"], gs.Discrete(2))
SMALL, WIDE = {"hidden_sizes": (128, 128)}, {"hidden_sizes": (64, 257)}
# algorithm, hyper-parameters, spaces, accelerate, device, its reason
CASES: list[tuple[str, dict[str, Any], Any, str, str, str]] = [
    ("ppo", {}, VECTOR, "auto", "cpu", "layers of at most 256 units on vectors"),
    ("ppo", WIDE, VECTOR, "auto", "cuda", "layers of 257 units"),
    ("ppo", {}, MIXED, "auto", "cuda", "images"),
    ("ppo", {}, VECTOR, "graph", "cuda", "captured updates"),
    ("sac", SMALL, VECTOR, "auto", "cpu", "layers of at most 128 units on vectors"),
    ("sac", {}, VECTOR, "auto", "cuda", "layers of 256 units"),
    ("sac", {}, VECTOR, "none", "cpu", "layers of at most 256 units on vectors"),
    ("dqn", {}, IMAGE, "auto", "cuda", "images"), ("rlpd", SMALL, VECTOR, "auto", "cuda", "10 networks side by side"),
    ("mbpo", SMALL, VECTOR, "none", "cuda", "7 networks side by side"),
    ("dreamer", {"size": "xs"}, VECTOR, "auto", "cuda", "captured updates of many steps"),
    ("dreamer", {"size": "xs"}, VECTOR, "none", "cpu", "layers of at most 256 units on vectors"),
    ("dreamer", {"size": "xs", "capture": False}, VECTOR, "auto", "cpu", "layers of at most 256 units on vectors"),
]  # fmt: skip


@pytest.mark.parametrize(("algo", "kwargs", "spaces", "accelerate", "device", "reason"), CASES)
def test_a_gpu_is_taken_where_it_pays(
    algo: str, kwargs: dict[str, Any], spaces: Any, accelerate: str, device: str, reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config, params = tiny(algo, Path("unused"), accelerate=accelerate), SPECS[algo].params(**kwargs)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    where = {"cpu": "CPU", "cuda": "GPU"}[device]
    chosen, sentence = choose_device(config, params, spaces)
    assert (chosen, sentence.partition(" learn faster")[0]) == (device, f"device auto is the {where}: {reason}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(config, params, spaces)[0] == "cpu"


@pytest.mark.parametrize(
    ("algo", "vectorization", "device"),
    [("ppo", "device", "cuda"), ("ppo", "sync", "cpu"), ("dqn", "device", "cpu")],
)
def test_rollouts_on_the_device_take_the_gpu(
    algo: str, vectorization: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = tiny(algo, Path("unused"), device="auto", vectorization=vectorization)
    params = read_params(SPECS[algo].params, config.algo_kwargs)
    assert resolve(config, params, read_recipe(config.env_id, {}), VECTOR).device == device


@pytest.mark.parametrize(("device", "has_gpu", "said"), [("auto", True, 1), ("auto", False, 0), ("cpu", True, 0)])
def test_a_run_that_passes_over_a_gpu_says_so(
    device: str, has_gpu: bool, said: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    result = train(tiny("ppo", tmp_path, device=device, eval_episodes=0), console=False)
    config, log = (result.run_dir / name for name in ("config.yaml", "manifest.json"))
    assert yaml.safe_load(config.read_text())["device"] == "cpu"
    assert log.read_text().count("device auto is the CPU: layers of at most 256 units on vectors learn faster") == said
