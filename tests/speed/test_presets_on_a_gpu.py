"""Short runs of presets on a GPU: graphs are plain code, and a stopped run goes on, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from resume_cases import assert_same, stop_and_resume
from rl_training.config.train_config import TrainConfig, load_config
from rl_training.run.workflows import TrainResult, train

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICE = "cuda"
SMALL = {"learning_starts": 128, "eval_interval": 0}
BIG = {"learning_starts": 128, "eval_interval": 0, "train_frequency": 8}
NAMES = {  # preset -> total timesteps, changed hyperparameters
    "ppo/t_maze": (4096, {}),
    "ppo/cartpole_positions": (4096, {}),
    "a2c/cartpole": (4096, {"memory": "gru"}),
    "impala/cartpole": (4096, {"memory": "gru"}),
    "appo/cartpole": (4096, {"memory": "gru"}),
    "r2d2/cartpole_positions": (3000, BIG),
    "dqn/bit_flip": (600, SMALL),
    "ddpg/point_reach": (600, SMALL),
    "ddpg/drqv2_pendulum_pixels": (400, SMALL),
    "tqc/pendulum": (300, SMALL),
    "redq/pendulum": (200, SMALL),
    "droq/pendulum": (200, SMALL),
    "crossq/pendulum": (300, SMALL),
    "simba/pendulum": (300, SMALL),
    "simbav2/pendulum": (300, SMALL),
    "flash_sac/pendulum": (300, SMALL),
    "discrete_sac/cartpole": (300, SMALL),
    "pqn/cartpole": (4096, {}),
    "iql/pendulum": (200, {"eval_interval": 0}),
    "awac/pendulum": (200, {"eval_interval": 0}),
    "td3_bc/pendulum": (200, {"eval_interval": 0}),
    "rebrac/pendulum": (200, {"eval_interval": 0}),
    "cql/pendulum": (200, {"eval_interval": 0}),
    "cql/pendulum_online": (200, {"eval_interval": 0, "offline_updates": 100}),
}


UNEQUAL = {"a2c/cartpole": "a GRU's weights differ on an H200 with torch 2.11; plain against plain was not compared"}


def short(name: str, folder: Path, accelerate: str) -> TrainConfig:
    """The preset with a small budget on a GPU."""
    if "pixels" in name:
        pytest.importorskip("pygame")
    total, changed = NAMES[name]
    given = load_config(name)
    return given.model_copy(
        update={
            "total_timesteps": total, "eval_episodes": 0, "device": DEVICE, "loggers": (), "accelerate": accelerate,
            "output_dir": str(folder), "algo_kwargs": {**given.algo_kwargs, **changed},
        }
    )  # fmt: skip


def weights(result: TrainResult) -> dict[str, Any]:
    """All that the learner knows."""
    return result.policy.algorithm.state_dict()


def marked(name: str) -> Any:
    """A preset whose graphs are known to differ is expected to fail."""
    return pytest.param(name, marks=[pytest.mark.xfail(reason=UNEQUAL[name])] if name in UNEQUAL else [])


@pytest.mark.parametrize("name", [marked(name) for name in NAMES])
def test_graphs_are_plain_code(name: str, tmp_path: Path) -> None:
    plain, graph = (weights(train(short(name, tmp_path / how, how), console=False)) for how in ("none", "graph"))
    assert_same(graph, plain)


@pytest.mark.parametrize("name", NAMES)
def test_a_stopped_run_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    whole = weights(train(short(name, tmp_path / "whole", "graph"), console=False))
    parts = stop_and_resume(short(name, tmp_path / "parts", "graph"), NAMES[name][0] * 3 // 4)
    assert_same(weights(parts), whole)
