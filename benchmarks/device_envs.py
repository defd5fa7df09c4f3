"""Environments on the device: steps/s through `learn()`, where the time goes, and seconds to a solved CartPole.

    python benchmarks/device_envs.py [--envs 4096 65536] [--algos ppo impala] [--accelerate graph] [--normalize]

Prints one table, and writes it as JSON to $OUT/device_envs.json if OUT is set.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import rl_training
from rl_training.config.settings import UNSAID, fill_defaults
from rl_training.run.build import open_session

STEPS, EPOCHS, MINIBATCHES, WARM_UP = 32, 4, 4, 20


class Clock(rl_training.Callback):
    """Steps/s from update WARM_UP on, when everything is captured."""

    def __init__(self) -> None:
        self.begun, self.rate = (0.0, 0), 0.0

    def now(self) -> float:
        """The time when all work given to the device is done."""
        if GIVEN.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_update(self, run: Any) -> None:
        """Look at the first update after the warm-up."""
        if run.updates == WARM_UP:
            self.begun = self.now(), run.step

    def on_end(self, run: Any) -> None:
        """Before the last checkpoint is written."""
        seconds, first = self.begun
        self.rate = (run.step - first) / (self.now() - seconds)


def settings(algo: str, num_envs: int, **others: Any) -> dict[str, Any]:
    """What a user would write; observations and rewards are not normalized unless asked, as elsewhere."""
    known: dict[str, Any] = {"hidden_sizes": [64, 64], "num_steps": STEPS}
    if algo in ("ppo", "appo"):
        known |= {"update_epochs": EPOCHS, "minibatch_size": STEPS * num_envs // MINIBATCHES}
    wrappers = dict.fromkeys(("normalize_observation", "normalize_reward"), GIVEN.normalize)
    said = {"env_id": "CartPole-v1", "env_kwargs": {"wrappers": wrappers}, "vectorization": "device"}
    said |= {"device": GIVEN.device, "accelerate": GIVEN.accelerate, "num_envs": num_envs, "loggers": []}
    said["matmul_precision"] = GIVEN.precision
    return {"algo": algo, **said, "eval_episodes": 0, **others, "algo_kwargs": known}


def make(folder: str, **config: Any) -> Any:
    """The managed class of a config."""
    spec = rl_training.experiment.registry.get_algorithm_spec(config["algo"])
    return getattr(rl_training, spec.class_name)({**config, "output_dir": folder})


def measure(algo: str, num_envs: int, folder: str) -> float:
    """Steps/s through `learn()`, logging every tenth update."""
    clock, total = Clock(), (WARM_UP + GIVEN.updates) * STEPS * num_envs
    learner = make(folder, **settings(algo, num_envs, log_interval=10, total_timesteps=total))
    learner.learn(callbacks=[clock], progress=False)
    return clock.rate


def split(algo: str, num_envs: int) -> dict[str, float]:
    """Milliseconds of a turn: collecting, valuing, learning; each waited for."""
    config, turns = settings(algo, num_envs, total_timesteps=10**9), max(GIVEN.updates // 4, 1)
    session = open_session(rl_training.config.train_config.load_config(fill_defaults(config, UNSAID)))
    clock, spent = Clock(), dict.fromkeys(("collect", "hand over", "learn"), 0.0)
    for turn in range(WARM_UP + turns):
        times = [clock.now()]
        session.store.add(session.collect(session.store.request(0)), 0)
        times.append(clock.now())
        ((_, batch),) = session.store.batches(session.algorithm, 0)
        times.append(clock.now())
        session.algorithm.update(batch, sync=False)
        times.append(clock.now())
        if turn >= WARM_UP:
            for i, name in enumerate(spent):
                spent[name] += (times[i + 1] - times[i]) * 1000 / turns
    return spent


def solve(num_envs: int, folder: str) -> dict[str, float]:
    """Seconds from `learn()`, the first use of the GPU included, to an evaluation of at least 475 over 20 episodes."""
    steps = 10 * STEPS * num_envs
    config = settings("ppo", num_envs, log_interval=10, eval_episodes=20, total_timesteps=10 * steps)
    config["env_kwargs"] = {"wrappers": {"normalize_observation": True, "normalize_reward": True}}  # as by default
    config["algo_kwargs"] |= {
        "learning_rate": 3e-3, "eval_interval": steps,
        "early_stopping": {"metric": "eval_return_mean", "threshold": 475, "patience": 1},
    }  # fmt: skip
    found: dict[str, float] = {}
    begun = time.perf_counter()

    class Watch(rl_training.Callback):
        def on_start(self, run: Any) -> None:
            found["start"] = time.perf_counter() - begun

        def on_update(self, run: Any) -> None:
            if run.updates in (1, 2, 10):
                found[f"update {run.updates}"] = time.perf_counter() - begun

        def on_evaluation(self, run: Any, metrics: dict[str, Any]) -> None:
            found["evaluation"] = time.perf_counter() - begun
            found.update(step=run.step, score=metrics["eval_return_mean"])

    make(folder, **config).learn(callbacks=[Watch()], progress=False)
    return found


def main() -> None:
    """Every part on its own, so that one that fails does not hide the others."""
    found: dict[str, Any] = {"torch": torch.__version__, **vars(GIVEN)}
    with tempfile.TemporaryDirectory() as folder:
        parts: dict[str, Any] = {f"solve {GIVEN.solve}": lambda: solve(GIVEN.solve, folder)} if GIVEN.solve else {}
        for algo in GIVEN.algos:
            for envs in GIVEN.envs:
                name = f"{algo} {envs}"
                parts[f"{name} steps/s"] = lambda a=algo, n=envs: measure(a, n, folder)
                parts[f"{name} ms"] = lambda a=algo, n=envs: split(a, n)
        for name, part in parts.items():
            try:
                begun = time.perf_counter()
                found[name] = part()
                text = f"{found[name]:,.0f}" if isinstance(found[name], float) else found[name]
                print(f"{name:24s} {text}   ({time.perf_counter() - begun:.1f} s)", flush=True)
            except Exception:
                print(f"{name} failed:\n{traceback.format_exc()}", flush=True)
    if "OUT" in os.environ:
        name = f"device_envs_{GIVEN.accelerate}_{GIVEN.precision}.json"
        Path(os.environ["OUT"], name).write_text(json.dumps(found, indent=1))


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--envs", type=int, nargs="*", default=[4096, 65536])
    parser.add_argument("--algos", nargs="+", default=["ppo", "impala"])
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--accelerate", default="auto")
    parser.add_argument("--normalize", action="store_true", help="observations and rewards, as runs do by default")
    parser.add_argument("--precision", default="highest", help="matmul_precision")
    parser.add_argument("--solve", type=int, nargs="?", const=512, help="seconds to 475 with so many environments")
    return parser.parse_args()


if __name__ == "__main__":
    GIVEN = read_arguments()
    main()
