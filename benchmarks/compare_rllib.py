"""IMPALA on CartPole-v1 next to RLlib's, both with workers: `python benchmarks/compare_rllib.py --rllib PYTHON`.

PYTHON is that of an environment with `ray[rllib]`. Every measurement is a process of its own, turn about: after the
first seconds, environment steps that were learned from, per second. Both have as many workers and environments, the
same networks and one torch thread per process; RLlib keeps its own batch (500 steps) and fragment length (50).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

WARM_UP = 8.0  # seconds that are not measured
HIDDEN = [64, 64]  # of our preset


def measure_ours(backend: str, workers: int, envs: int, seconds: float) -> float:
    """Steps/s of the preset with that execution backend."""
    from rl_training.experiment.config import load_config
    from rl_training.runtime.run import Callback, Run
    from rl_training.runtime.workflows import train

    class Stopwatch(Callback):
        """Measures, and stops the run."""

        begun = first = last = (0, 0.0)

        def on_update(self, run: Run) -> bool | None:
            """Look at the clock."""
            self.last = (run.step, time.perf_counter())
            if run.updates == 1:
                self.begun = self.last
            if not self.first[0] and self.last[1] > self.begun[1] + WARM_UP:
                self.first = self.last
            return False if self.first[0] and self.last[1] > self.first[1] + seconds else None

    fields = {"execution_backend": backend, "num_workers": workers, "num_envs": envs, "eval_episodes": 0, "threads": 1}
    with tempfile.TemporaryDirectory() as folder:
        budget = {"total_timesteps": 10**9, "output_dir": folder}
        config = load_config("impala/cartpole").model_copy(update={**fields, **budget})
        train(config, callbacks=[watch := Stopwatch()], console=False)
    return (watch.last[0] - watch.first[0]) / (watch.last[1] - watch.first[1])


def measure_rllib(workers: int, envs: int, seconds: float) -> float:
    """Steps/s of RLlib's IMPALA."""
    import ray
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    ray.init(address="local", num_cpus=workers + 2, include_dashboard=False, log_to_driver=False)
    config = (
        IMPALAConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=workers, num_envs_per_env_runner=envs // workers)
        .learners(num_learners=0)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=HIDDEN, fcnet_activation="tanh"))
    )
    algo = config.build_algo()
    first = last = (0.0, 0.0)
    begun = time.perf_counter()
    while not first[0] or last[1] < first[1] + seconds:
        learned = algo.train().get("learners", {}).get("__all_modules__", {})  # in the first results there is none
        last = (float(learned.get("num_env_steps_trained_lifetime", 0)), time.perf_counter())
        if not first[0] and last[1] > begun + WARM_UP:
            first = last
    algo.stop()
    ray.shutdown()
    return (last[0] - first[0]) / (last[1] - first[1])


def main() -> None:
    """Measure in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rllib", default=sys.executable, metavar="PYTHON", help="a Python that has ray[rllib]")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    where = arguments.workers, arguments.num_envs, arguments.seconds
    if arguments.side is not None:
        rate = measure_rllib(*where) if arguments.side == "rllib" else measure_ours(arguments.side, *where)
        print(f"RATE {rate}")
        return
    rates: dict[str, list[float]] = {"ray": [], "local_async": [], "rllib": []}
    for _ in range(arguments.rounds):
        for side, seen in rates.items():
            python = arguments.rllib if side == "rllib" else sys.executable
            done = subprocess.run(
                [python, *sys.argv, "--side", side], env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            seen.append(float(done.stdout.rpartition("RATE ")[2]))
            print(f"{side}: {seen[-1]:,.0f} steps/s", flush=True)
    theirs = statistics.median(rates["rllib"])
    print("\n| IMPALA on CartPole-v1 | steps/s, median | next to RLlib |\n| --- | --: | --: |")
    for side, name in (("ray", "ours, `ray`"), ("local_async", "ours, `local_async`"), ("rllib", "RLlib")):
        middle = statistics.median(rates[side])
        print(f"| {name}, {where[0]} workers, {where[1]} environments | {middle:,.0f} | {middle / theirs:.1f}× |")


if __name__ == "__main__":
    main()
