"""Steps/s of whole training loops on the CPU and on the GPU, by learner and width: the basis of `device: auto`.

device_choice.py [--only sac] [--seconds 0.7]
"""

from __future__ import annotations

import argparse
import platform
import traceback
from contextlib import closing
from typing import Any

import torch

from rl_training.config.choices import torch_settings_restored
from rl_training.config.settings import UNSAID, fill_defaults
from rl_training.config.train_config import load_config
from rl_training.tools import bench

SHORT = {"learning_starts": 300, "buffer_capacity": 20_000}
EVERY_STEP = SHORT | {"train_frequency": 1}
# algorithm, environment, number of them, widths, other hyper-parameters
CASES: list[tuple[str, str, int, tuple[int, ...], dict[str, Any]]] = [
    ("sac", "Pendulum-v1", 1, (64, 128, 256), SHORT), ("td3", "Pendulum-v1", 1, (64, 128), SHORT),
    ("dqn", "CartPole-v1", 1, (64, 128, 256), EVERY_STEP), ("rainbow_dqn", "CartPole-v1", 1, (64,), EVERY_STEP),
    ("ppo", "CartPole-v1", 8, (64, 256, 512), {}), ("ppo", "CartPole-v1", 64, (256,), {"minibatch_size": 1_024}),
    ("impala", "CartPole-v1", 16, (64, 256), {}),
]  # fmt: skip


def measure(algo: str, env_id: str, num_envs: int, device: str, params: dict[str, Any]) -> tuple[float, Any]:
    """Steps/s while learning, and the number of threads."""
    said = {"algo": algo, "env_id": env_id, "num_envs": num_envs, "device": device, "algo_kwargs": params,
            "total_timesteps": 10**7}  # fmt: skip
    with torch_settings_restored(), closing(bench.open_measured(load_config(fill_defaults(said, UNSAID)))) as session:
        first = bench.warm_up(session)
        return bench.measure_pace(session, first), session.config.threads


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=0.7, help="per measurement")
    arguments = parser.parse_args()
    bench.PACE_SECONDS = arguments.seconds / bench.ROUNDS
    print(torch.cuda.get_device_name(), torch.__version__, platform.python_version())
    print("| | environments | units | CPU steps/s | threads | GPU steps/s | ratio |\n" + "| --- " * 7 + "|", flush=True)
    for algo, env_id, num_envs, widths, chosen in CASES:
        for width in widths if not arguments.only or algo in arguments.only.split(",") else ():
            params = chosen | {"hidden_sizes": [width, width]}
            try:
                cpu, threads = measure(algo, env_id, num_envs, "cpu", params)
                gpu, _ = measure(algo, env_id, num_envs, "cuda", params)
            except Exception:
                traceback.print_exc()
                continue
            cells = algo, num_envs, width, f"{cpu:,.0f}", threads, f"{gpu:,.0f}", f"{gpu / cpu:.2f}"
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
