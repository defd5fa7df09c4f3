"""Worker processes against one process, on an environment that sleeps: `python benchmarks/bench_workers.py`.

One run of each `--workers` (0 is `local_sync`) with as many environments, in steps per second of training.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.runtime.workflows import train


class Sleepy(gym.Env[Any, Any]):
    """Random observations, each after a nap."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, seconds: float = 0.002) -> None:
        self.seconds, self.t = seconds, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The first observation."""
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.uniform(-1.0, 1.0, 4).astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Sleep, and give a random observation."""
        time.sleep(self.seconds)
        self.t += 1
        return self.np_random.uniform(-1.0, 1.0, 4).astype(np.float32), float(action), False, self.t >= 200, {}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="0,1,2,4,8", help="numbers of processes, by comma")
    parser.add_argument("--algo", default="impala")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16_000)
    arguments = parser.parse_args()
    print("| workers | steps/s | against one process | learner waited |")
    print("| --: | --: | --: | --: |")
    first = 0.0
    for workers in map(int, arguments.workers.split(",")):
        where = {"execution_backend": "local_async", "num_workers": workers} if workers else {}
        with tempfile.TemporaryDirectory() as folder:
            metrics = train(
                {"algo": arguments.algo, "env_id": "bench_workers:Sleepy", "num_envs": arguments.num_envs,
                 "total_timesteps": arguments.steps, "eval_episodes": 0, "log_interval": 100, "output_dir": folder,
                 **where},
                console=False,
            ).metrics  # fmt: skip
        rate = metrics["global_step"] / metrics["train_seconds"]
        first = first or rate
        waited = f"{metrics['learner_waiting']:.0%}" if workers else "–"
        print(f"| {workers or 'one process'} | {rate:,.0f} | {rate / first:.1f}× | {waited} |", flush=True)


if __name__ == "__main__":
    main()
