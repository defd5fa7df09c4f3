"""Train every registered algorithm for a moment on a GPU and print a table: `python scripts/gpu_check.py`.

Shows that `device: cuda` works for each, from vectors and, where supported, from images.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.config.train_config import TrainConfig
from rl_training.experiment.registry import list_algorithm_specs
from rl_training.run.workflows import evaluate_checkpoint, resume_training, train

SMALL = {
    "num_steps": 32, "learning_starts": 64, "batch_size": 64, "buffer_capacity": 2_000, "value_updates": 8,
    "gradient_updates_per_step": 2, "dataset_size": 500, "minibatch_size": 64, "train_frequency": 8,
    "expert_dataset_size": 500, "num_ensembles": 3, "num_elites": 2, "model_updates": 20, "rollout_batch_size": 200,
    "model_train_frequency": 256, "size": "xs", "sequence_length": 8, "dataset_kind": "random",
}  # fmt: skip


class Images(gym.Env[Any, Any]):
    """Random 10x10x4 images; a reward for action 0."""

    observation_space = gym.spaces.Box(0, 255, (10, 10, 4), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self._image(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self._image(), float(action == 0), False, self.count >= 20, {}

    def _image(self) -> Any:
        return self.np_random.integers(0, 256, (10, 10, 4), dtype=np.uint8)


class MovedImages(Images):
    """The same with continuous actions; a reward for small ones."""

    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return super().step(int(np.abs(action).max() > 0.5))


def check(name: str, env_id: str, device: str, env: Any = None) -> str:
    """One line: steps, updates and seconds of a run on the device, evaluated and resumed."""
    spec = next(spec for spec in list_algorithm_specs() if spec.name == name)
    kwargs = {key: value for key, value in SMALL.items() if key in spec.params.model_fields}
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            algo=name, env_id=env_id, total_timesteps=1_024, num_envs=4, device=device, eval_episodes=2,
            output_dir=folder, algo_kwargs=kwargs,
        )  # fmt: skip
        begun = time.perf_counter()
        result = train(config, env=env, console=False)
        seconds = time.perf_counter() - begun
        where = result.policy.algorithm.device
        resumed = resume_training(result.checkpoint_path, total_timesteps=1_536, env=env, console=False)
        evaluate_checkpoint(Path(resumed.checkpoint_path), num_episodes=1, env=env)
    metrics = resumed.metrics
    return f"{name:16} {env_id:14} {where!s:8} {result.metrics['global_step']:6} {metrics['global_step']:6} " \
           f"{metrics['updates']:6} {seconds:8.2f}"  # fmt: skip


def main() -> int:
    """Check them all; the exit code says whether every one ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these algorithms (default: all)")
    arguments = parser.parse_args()
    print(f"{'algorithm':16} {'environment':14} {'device':8} {'steps':>6} {'resume':>6} {'updates':>6} {'seconds':>8}")
    failed = 0
    for spec in list_algorithm_specs():
        if arguments.only and spec.name not in arguments.only:
            continue
        cases: list[tuple[str, Any]] = [("CartPole-v1" if "discrete" in spec.action_kinds else "Pendulum-v1", None)]
        if "image" in spec.observation_kinds:
            cases.append(("images", Images if "discrete" in spec.action_kinds else MovedImages))
        for env_id, env in cases:
            try:
                print(check(spec.name, env_id, arguments.device, env), flush=True)
            except Exception as error:
                failed += 1
                print(f"{spec.name:16} {env_id:14} FAILED: {type(error).__name__}: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
