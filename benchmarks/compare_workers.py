"""Compare workers on CartPole-v1 with RLlib's IMPALA and Sample Factory's APPO, each in its own Python.

`python benchmarks/compare_workers.py --peer rllib --python PYTHON`, where PYTHON has `ray[rllib]`, or `--peer
sample_factory` with one that has `sample-factory`. Each measurement is a process, and they alternate. The result is the
environment steps learned from per second, after the first seconds. Both sides have the same number of workers and
environments, the same networks and one torch thread per process; a peer keeps its own batch and fragment length.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

WARM_UP = 8.0  # seconds that are not measured
HIDDEN = [64, 64]  # of our preset


def measure_ours(algo: str, backend: str, workers: int, envs: int, seconds: float) -> float:
    """Steps/s of the CartPole preset with that execution backend."""
    from rl_training.config.train_config import load_config
    from rl_training.run.run import Callback, Run
    from rl_training.run.workflows import train

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
        config = load_config(f"{algo}/cartpole").model_copy(update={**fields, **budget})
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


def make_env(name: str, *_: Any, **options: Any) -> Any:
    """The environment, as Sample Factory asks for it."""
    import gymnasium as gym

    return gym.make(name)


def measure_sample_factory(workers: int, envs: int, seconds: float) -> float:
    """Steps/s of Sample Factory's APPO."""
    from sample_factory.algo.runners.runner import AlgoObserver
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import make_runner

    class Stopwatch(AlgoObserver):
        """Measures, and stops the run."""

        begun = first = last = (0, 0.0)

        def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:
            """Look at the clock."""
            self.last = (sum(runner.env_steps.values()), time.perf_counter())
            self.begun = self.begun if self.begun[1] else self.last
            if not self.first[0] and self.last[1] > self.begun[1] + WARM_UP:
                self.first = self.last
            if self.first[0] and self.last[1] > self.first[1] + seconds:
                runner.cfg.train_for_env_steps = 0

    register_env("CartPole-v1", make_env)
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            "--algo=APPO", "--env=CartPole-v1", "--device=cpu", "--use_rnn=False", "--nonlinearity=tanh",
            f"--num_workers={workers}", f"--num_envs_per_worker={envs // workers}", "--worker_num_splits=2",
            "--encoder_mlp_layers", *map(str, HIDDEN), "--normalize_input=False", f"--train_dir={folder}",
            "--train_for_env_steps=1000000000",
        ]  # fmt: skip
        parser, _ = parse_sf_args(settings)
        _, runner = make_runner(parse_full_cfg(parser, settings))
        runner.register_observer(watch := Stopwatch())
        runner.init()
        runner.run()
    return (watch.last[0] - watch.first[0]) / (watch.last[1] - watch.first[1])


PEERS = {
    "rllib": ("RLlib", "impala", measure_rllib),
    "sample_factory": ("Sample Factory", "appo", measure_sample_factory),
}


def main() -> None:
    """Measure in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", choices=PEERS, default="rllib")
    parser.add_argument("--python", default=sys.executable, help="a Python that has the peer")
    parser.add_argument("--backends", default="ray,local_async", help="of ours")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    peer, algo, measure_peer = PEERS[arguments.peer]
    where = arguments.workers, arguments.num_envs, arguments.seconds
    if arguments.side is not None:
        rate = measure_peer(*where) if arguments.side == peer else measure_ours(algo, arguments.side, *where)
        print(f"RATE {rate}")
        return
    rates: dict[str, list[float]] = {side: [] for side in (*arguments.backends.split(","), peer)}
    for _ in range(arguments.rounds):
        for side, seen in rates.items():
            python = arguments.python if side == peer else sys.executable
            done = subprocess.run(
                [python, *sys.argv, "--side", side], env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            seen.append(float(done.stdout.rpartition("RATE ")[2]))
            print(f"{side}: {seen[-1]:,.0f} steps/s", flush=True)
    theirs = statistics.median(rates[peer])
    print(f"\n| {algo.upper()} on CartPole-v1 | steps/s, median | next to {peer} |\n| --- | --: | --: |")
    for side, seen in rates.items():
        name = peer if side == peer else f"ours, `{side}`"
        middle = statistics.median(seen)
        print(f"| {name}, {where[0]} workers, {where[1]} environments | {middle:,.0f} | {middle / theirs:.1f}× |")


if __name__ == "__main__":
    main()
