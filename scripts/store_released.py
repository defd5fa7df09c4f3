"""Store small checkpoints of this version, with the actions that they choose: tests/record/released/VERSION.

Run it once, for the commit that is released. `tests/record/test_released.py` loads what every version has stored.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from rl_training import __version__
from rl_training.config.train_config import TrainConfig
from rl_training.run.workflows import predict_checkpoint, train

RELEASED = Path(__file__).resolve().parents[1] / "tests" / "record" / "released"
SMALL: dict[str, Any] = {"hidden_sizes": [8]}
REPLAY: dict[str, Any] = {**SMALL, "learning_starts": 20, "batch_size": 8, "buffer_capacity": 60}
RUNS: dict[str, dict[str, Any]] = {
    "a2c": {"env_id": "CartPole-v1", "algo_kwargs": {**SMALL, "num_steps": 8}},
    "ppo": {"env_id": "CartPole-v1", "num_envs": 2, "algo_kwargs": {**SMALL, "num_steps": 16, "minibatch_size": 16}},
    "dqn": {"env_id": "CartPole-v1", "algo_kwargs": REPLAY},
    "c51_dqn": {"env_id": "CartPole-v1", "algo_kwargs": {**REPLAY, "v_min": 0.0, "v_max": 100.0}},
    "sac": {"env_id": "Pendulum-v1", "algo_kwargs": REPLAY},
    "td3": {"env_id": "Pendulum-v1", "algo_kwargs": REPLAY},
    "d4pg": {"env_id": "Pendulum-v1", "algo_kwargs": {**REPLAY, "v_min": -100.0, "v_max": 0.0}},
    "naf": {"env_id": "Pendulum-v1", "algo_kwargs": REPLAY},
    "tqc": {"env_id": "Pendulum-v1", "algo_kwargs": {**REPLAY, "critic_hidden_sizes": [8]}},
    "discrete_sac": {"env_id": "CartPole-v1", "algo_kwargs": REPLAY},
}
SIZES = {"CartPole-v1": 4, "Pendulum-v1": 3}  # of an observation
ROWS, STEPS = 20, 64


def config_of(algo: str, folder: Path) -> TrainConfig:
    """A run of seconds."""
    quiet = {"eval_episodes": 1, "loggers": (), "threads": 1, "device": "cpu", "seed": 1}
    return TrainConfig(algo=algo, total_timesteps=STEPS, output_dir=str(folder), **quiet, **RUNS[algo])


def store(target: Path) -> None:
    """Train, copy the last checkpoints and write down what they choose."""
    target.mkdir(parents=True)
    expected = {}
    draw = np.random.default_rng(0).normal
    with tempfile.TemporaryDirectory() as folder:
        for algo in RUNS:
            result = train(config_of(algo, Path(folder)), console=False)
            path = target / f"{algo}.ckpt"
            shutil.copyfile(result.checkpoint_path, path)
            obs = draw(size=(ROWS, SIZES[RUNS[algo]["env_id"]])).round(2).tolist()
            expected[algo] = {"obs": obs, "actions": predict_checkpoint(path, obs).tolist()}
    (target / "expected.json").write_text(json.dumps(expected) + "\n", encoding="utf-8")


def main() -> int:
    """Store this version's checkpoints, unless they are there."""
    target = RELEASED / __version__
    if target.exists():
        print(f"{target} is there already; a released version does not change.", file=sys.stderr)
        return 1
    store(target)
    print(f"{sum(file.stat().st_size for file in target.iterdir()):,} bytes in {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
