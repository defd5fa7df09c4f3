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
from rl_training.config.choices import choose_device
from rl_training.config.params import read_params
from rl_training.envs.factory import read_recipe
from rl_training.envs.probe import probe_spaces
from rl_training.envs.spaces import EnvSpaces
from rl_training.run.workflows import train

VECTOR = probe_spaces(read_recipe("CartPole-v1", {}))
IMAGE = probe_spaces(read_recipe("env_zoo:MinAtarLike", {}))
MIXED = EnvSpaces.from_gym("Mixed-v0", OBSERVATIONS["mixed"], gs.Discrete(2))
SMALL, WIDE = {"hidden_sizes": (128, 128)}, {"hidden_sizes": (64, 257)}
# algorithm, hyper-parameters, spaces, accelerate, why the GPU is chosen; nothing for the CPU
CASES: list[tuple[str, dict[str, Any], Any, str, str]] = [
    ("ppo", {}, VECTOR, "auto", ""), ("ppo", WIDE, VECTOR, "auto", "layers of 257 units"),
    ("ppo", {}, MIXED, "auto", "images"), ("ppo", {}, VECTOR, "graph", "captured updates"),
    ("sac", {"hidden_sizes": (64, 64)}, VECTOR, "auto", ""),
    ("sac", SMALL, VECTOR, "auto", "captured updates of 256 rows and 128 units"),
    ("sac", SMALL | {"batch_size": 255}, VECTOR, "auto", ""),
    ("sac", {}, VECTOR, "auto", "captured updates of 256 rows and 256 units"), ("sac", {}, VECTOR, "none", ""),
    ("sac", WIDE, VECTOR, "none", "layers of 257 units"), ("dqn", SMALL, VECTOR, "auto", ""),
    ("bc", SMALL, VECTOR, "auto", "captured updates of 256 rows and 128 units"),
    ("dqn", {}, IMAGE, "auto", "images"), ("rlpd", SMALL, VECTOR, "none", "10 networks side by side"),
    ("mbpo", SMALL, VECTOR, "none", "7 networks side by side"),
    ("dreamer", {"size": "xs"}, VECTOR, "auto", "captured updates of many steps"),
    ("dreamer", {"size": "xs"}, VECTOR, "none", ""), ("dreamer", {"size": "xs", "capture": False}, VECTOR, "auto", ""),
]  # fmt: skip


@pytest.mark.parametrize(("algo", "kwargs", "spaces", "accelerate", "reason"), CASES)
def test_a_gpu_is_taken_where_it_pays(
    algo: str, kwargs: dict[str, Any], spaces: Any, accelerate: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(algo, Path("unused"), accelerate=accelerate, device="auto")
    params = SPECS[algo].params(**kwargs)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device, sentence = choose_device(config, params, spaces)
    if reason:
        assert device == "cuda"
        assert sentence.startswith(f"device auto is the GPU: {reason} are faster there (")
    else:
        assert device == "cpu"
        assert sentence.startswith("device auto is the CPU: networks of this size are faster there (")
    assert choose_device(config.model_copy(update={"device": "cuda:1"}), params, spaces) == ("cuda:1", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(config, params, spaces) == ("cpu", "")


@pytest.mark.parametrize(
    ("algo", "vectorization", "device"),
    [("ppo", "device", "cuda"), ("ppo", "sync", "cpu"), ("dqn", "device", "cpu")],
)
def test_rollouts_on_the_device_take_the_gpu(
    algo: str, vectorization: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = tiny(algo, Path("unused"), device="auto", vectorization=vectorization)
    assert choose_device(config, read_params(SPECS[algo].params, config.algo_kwargs), VECTOR)[0] == device


@pytest.mark.parametrize(("device", "has_gpu", "said"), [("auto", True, 1), ("auto", False, 0), ("cpu", True, 0)])
def test_a_run_that_passes_over_a_gpu_says_so(
    device: str, has_gpu: bool, said: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    result = train(tiny("ppo", tmp_path, device=device, eval_episodes=0), console=False)
    config, log = (result.run_dir / name for name in ("config.yaml", "manifest.json"))
    assert yaml.safe_load(config.read_text())["device"] == "cpu"
    assert log.read_text().count("device auto is the CPU: networks of this size are faster there") == said
