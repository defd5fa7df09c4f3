"""Steps/s of whole training loops with replay on a GPU, and where the time of a step goes.

device_loop.py [--only sac] [--how none,graph] [--steps 3000] [--device cuda] [--set key=value] [--sampling] [--profile]
               [--json FILE]

Each loop is a run of `train` with one environment and one update per step. The rate is that of its second half. "Parts"
are host microseconds per step of the last `how`: first in a normal run, where acting waits for the previous update;
then with a wait for the device after each part, so that each part includes its own work on the device. `--sampling`
measures the time to add a row and sample a batch instead.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from rl_training import Callback
from rl_training.data import ReplayBuffer
from rl_training.run.run import Run
from rl_training.run.workflows import train

STARTS = 500  # steps at random before learning
WIDE = {"hidden_sizes": [256, 256], "batch_size": 256, "buffer_capacity": 1_000_000}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sac": ("sac", "HalfCheetah-v5", WIDE),
    "td3": ("td3", "HalfCheetah-v5", WIDE),
    "ddpg": ("ddpg", "HalfCheetah-v5", WIDE),
    "dqn": ("dqn", "CartPole-v1", {"hidden_sizes": [256, 256], "batch_size": 128, "train_frequency": 1}),
    "rainbow": ("rainbow_dqn", "CartPole-v1", {"hidden_sizes": [256, 256], "batch_size": 128, "train_frequency": 1}),
}


class Clock(Callback):
    """Times the second half of a run, and with `parts` what the loop calls there."""

    def __init__(self, steps: int, *, parts: bool, waits: bool) -> None:
        self.steps, self.parts, self.waits = steps, parts, waits
        self.seconds: dict[str, float] = defaultdict(float)
        self.begun = self.first = self.result = 0.0

    def on_start(self, run: Run) -> None:
        """Put a clock around each part."""
        session: Any = run.session
        parts = {
            "act": (session.behaviour, "act"), "environment": (session.collector.stepper, "step"),
            "store": (session.store, "add"), "sample": (session.store, "sample"),
            "update": (session.algorithm, "update"), "feedback": (session.store, "feedback"),
            "schedules": (run, "apply_schedules"), "count": (run, "count_update"), "tick": (run, "tick"),
        }  # fmt: skip
        for name, (owner, method) in parts.items() if self.parts else ():
            setattr(owner, method, self.timed(name, getattr(owner, method)))

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time added to the part's."""

        def call(*arguments: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            result = function(*arguments, **named)
            if self.waits:
                wait()
            self.seconds[name] += time.perf_counter() - begun
            return result

        return call

    def on_update(self, run: Run) -> None:
        """From half time to the last step, before the checkpoint at the end."""
        if not self.begun and run.step >= self.steps // 2:
            wait()
            self.first, self.begun = run.step, time.perf_counter()
            self.seconds.clear()
        elif run.step >= self.steps:
            wait()
            self.result = (self.steps - self.first) / (time.perf_counter() - self.begun)


def wait() -> None:
    """Until the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(name: str, how: str, arguments: argparse.Namespace, *, parts: bool = False, waits: bool = False) -> Clock:
    """One run; its clock has `result`, the steps/s."""
    algo, env_id, chosen = CASES[name]
    given = {key: yaml.safe_load(value) for key, value in (pair.split("=", 1) for pair in arguments.set)}
    clock = Clock(arguments.steps, parts=parts, waits=waits)
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "algo": algo, "env_id": env_id, "total_timesteps": arguments.steps, "device": arguments.device,
            "accelerate": how, "output_dir": folder, "eval_episodes": 0, "log_interval": 1000, "seed": 1,
            "vectorization": "sync", "replay_in_checkpoint": False, "loggers": [],
            "algo_kwargs": chosen | {"learning_starts": STARTS} | given,
        }  # fmt: skip
        train(config, callbacks=[clock], console=False)
    return clock


ROWS: dict[str, dict[str, Any]] = {
    "17 floats": {"obs_shape": (17,), "action_shape": (6,), "continuous": True},
    "376 floats": {"obs_shape": (376,), "action_shape": (17,), "continuous": True},
    "4 frames of 84 x 84": {"obs_shape": (4, 84, 84), "obs_dtype": "uint8", "frame_stack": 4},
}


def sampling(device: str) -> dict[str, Any]:
    """Microseconds per step of adding one row and sampling a batch, by where observations are gathered."""
    found: dict[str, Any] = {"name": "sampling"}
    for name, layout in ROWS.items():
        for batch in (32, 256):
            for on_device in (False, True):
                buffer = ReplayBuffer(20_000, device=device, on_device=on_device, reuses_batches=True, **layout)
                shape, kind = (1, *layout["obs_shape"]), layout.get("obs_dtype", "float32")
                row = {
                    "obs": np.ones(shape, kind), "actions": np.zeros((1, *layout.get("action_shape", ())), np.float32),
                    "rewards": np.zeros(1), "terminated": np.zeros(1, bool), "truncated": np.zeros(1, bool),
                    "next_obs": np.ones(shape, kind),
                }  # fmt: skip
                for _ in range(20_000):
                    buffer.add(**row)
                rng, times = np.random.default_rng(0), []
                for _ in range(200):
                    wait()
                    begun = time.perf_counter()
                    buffer.add(**row)
                    buffer.sample(batch, rng)
                    wait()
                    times.append(time.perf_counter() - begun)
                where = "device" if on_device else "host"
                found[f"{name}, {batch} rows, {where}"] = round(1e6 * float(np.median(times)), 1)
    return found


def main() -> None:
    """Print a table, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="sac,td3,dqn")
    parser.add_argument("--how", default="none,graph")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--sampling", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    hows = arguments.how.split(",")
    if arguments.sampling:
        print(json.dumps(sampling(arguments.device)), flush=True)
        return
    for name in arguments.only.split(","):
        for how in hows:
            row: dict[str, Any] = {"name": name, "how": how, "settings": arguments.set}
            try:
                row["steps_per_second"] = round(measure(name, how, arguments).result, 1)
                for waits in (False, True) if how == hows[-1] else ():
                    clock = measure(name, how, arguments, parts=True, waits=waits)
                    each = {part: 1e6 * spent / (clock.steps - clock.first) for part, spent in clock.seconds.items()}
                    each["other"] = 1e6 / clock.result - sum(each.values())
                    row["waiting_parts" if waits else "parts"] = {part: round(value, 1) for part, value in each.items()}
            except Exception:
                row["error"] = traceback.format_exc()
            found.append(row)
            print(json.dumps(row), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        if arguments.profile:
            profile = cProfile.Profile()
            profile.runcall(measure, name, hows[-1], arguments)
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
