"""Compare worker processes with one process, on an environment that sleeps or on that of a preset (`--config`).

One run for each number in `--workers` (0 is `local_sync`), all with the same number of environments; steps per second
after the first updates.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.config.train_config import read_yaml
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import train


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


class Stopwatch(Callback):
    """Steps and seconds from one update to the last, which comes after so many seconds at most."""

    def __init__(self, skip: int, seconds: float) -> None:
        self.skip, self.seconds, self.first = skip, seconds, np.zeros(2)

    def on_update(self, run: Run) -> bool:
        """Remember the first and the newest time; False ends the run."""
        self.last = np.array([run.step, time.perf_counter()])
        if run.updates <= self.skip:
            self.first = self.last
        return bool(self.last[1] - self.first[1] < self.seconds)

    def rate(self) -> float:
        """Steps per second between them."""
        steps, seconds = self.last - self.first
        return float(steps / seconds)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="0,1,2,4,8", help="numbers of processes, by comma")
    parser.add_argument("--config", help="a preset in place of the environment that sleeps: impala/breakout_atari")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16_000, help="at most so many of each run")
    parser.add_argument("--skip", type=int, default=5, help="updates before measuring: first calls are slow")
    parser.add_argument("--seconds", type=float, default=math.inf, help="at most so long, after the first updates")
    arguments = parser.parse_args()
    sleepy = {"algo": "impala", "env_id": "bench_workers:Sleepy", "log_interval": 100}
    config = {
        **(read_yaml(arguments.config) if arguments.config else sleepy), "vectorization": "sync",
        "num_envs": arguments.num_envs, "total_timesteps": arguments.steps, "eval_episodes": 0,
    }  # fmt: skip
    print("| workers | steps/s | against the first | learner waited |")
    print("| --: | --: | --: | --: |")
    first = 0.0
    for workers in map(int, arguments.workers.split(",")):
        where = {"execution_backend": "local_async", "num_workers": workers} if workers else {}
        with tempfile.TemporaryDirectory() as folder:
            watch = Stopwatch(arguments.skip, arguments.seconds)
            run = train({**config, **where, "output_dir": folder}, console=False, callbacks=[watch])
        rate = watch.rate()
        first = first or rate
        waited = f"{run.metrics['learner_waiting']:.0%}" if workers else "–"
        print(f"| {workers or 'one process'} | {rate:,.0f} | {rate / first:.1f}× | {waited} |", flush=True)


if __name__ == "__main__":
    main()
