"""What actors of continuous actions learn from images: run this file with a label, such as the version of the code.

The task is `DotToTarget` of the tests: a dot and its target on images of 16x16 pixels, 2,000 steps, 850 updates. What
`SETTINGS` does not name is at each algorithm's default. Evaluations of 20 episodes go to
`benchmarks/results/image_actors.json`, under the label. Random actions have about -4.8. `--drqv2` adds
those of DrQ-v2's axes that the algorithm has; `benchmarks/results/image_drqv2.json` has runs with and without them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_training.config.params import parameter_names
from rl_training.config.settings import UNSAID, fill_defaults
from rl_training.config.spec import get_algorithm_spec
from rl_training.config.train_config import TrainConfig, load_config
from rl_training.run.workflows import train

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))  # where a run finds the environment
RESULTS = ROOT / "benchmarks" / "results" / "image_actors.json"
SETTINGS = {
    "learning_starts": 300, "batch_size": 64, "hidden_sizes": [64], "buffer_capacity": 5000, "gamma": 0.9,
    "train_frequency": 2, "learning_rate": 1e-3, "eval_interval": 1000,
}  # fmt: skip
FALLS = {"type": "linear", "start": 1.0, "end": 0.1, "fraction": 0.5}
DRQV2 = {  # one of 16 pixels is about four of 84
    "augmentation": "shift", "shift_pixels": 1, "n_step": 3, "num_critics": 2, "policy_delay": 1,
    "policy_noise_schedule": FALLS, "noise_clip": 0.3, "exploration_noise_schedule": FALLS,
}  # fmt: skip


def image_config(algo: str, seed: int, folder: str | Path, more: Mapping[str, Any] | None = None) -> TrainConfig:
    """A run on the task, with more settings where the algorithm has them."""
    known = parameter_names(get_algorithm_spec(algo).params)
    settings = SETTINGS | {name: value for name, value in (more or {}).items() if name in known}
    said = {
        "algo": algo, "env_id": "env_zoo:DotToTarget", "total_timesteps": 2000, "eval_episodes": 20, "seed": seed,
        "device": "cpu", "threads": 1, "output_dir": str(folder), "algo_kwargs": settings,
    }  # fmt: skip
    return load_config(fill_defaults(said, UNSAID))


def format_table(recorded: dict[str, dict[str, list[float]]]) -> str:
    """The table in docs/results/history.md: a row per algorithm, a column per label."""
    rows = [["", *recorded], ["---"] * (1 + len(recorded))]
    for algo in next(iter(recorded.values())):
        rows.append(
            [algo, *(", ".join(f"{x:.2f}".replace("-", "−") for x in runs[algo]) for runs in recorded.values())]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Run every algorithm with every seed; record and print what they reach."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("label")
    parser.add_argument("--only", default="td3,d4pg,ddpg,sac", help="algorithms")
    parser.add_argument("--seeds", default="11,12,13")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--drqv2", action="store_true", help="add the axes of DrQ-v2")
    arguments = parser.parse_args()
    more = DRQV2 if arguments.drqv2 else None
    for algo in arguments.only.split(","):
        returns = []
        for seed in map(int, arguments.seeds.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                metrics = train(image_config(algo, seed, folder, more), console=False).metrics
            returns.append(round(metrics["eval_return_mean"], 2))
        print(f"{algo}: mean {statistics.mean(returns):.2f}, seeds {returns}", flush=True)
        found = arguments.results
        recorded = json.loads(found.read_text(encoding="utf-8")) if found.exists() else {}
        recorded.setdefault(arguments.label, {})[algo] = returns
        found.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
