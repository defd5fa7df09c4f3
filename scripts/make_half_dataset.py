"""Transitions of Pendulum-v1 from one half of its state space: the data of MOPO's coefficient-0 control.

`python scripts/make_half_dataset.py F.npz` puts the pendulum anywhere between 45 degrees left and 135 degrees right of
upright, at any speed, and takes one step with a random torque. The upright position is included; no step starts in the
other half of the circle, so a model is accurate in the first half and guesses in the second.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.data import TransitionDataset

ANGLES, SPEEDS, TORQUES = (-np.pi / 4, 3 * np.pi / 4), (-8.0, 8.0), (-2.0, 2.0)


def make_half_dataset(rows: int, seed: int) -> TransitionDataset:
    """`rows` single steps, each an episode of its own that is truncated."""
    rng, env = np.random.default_rng(seed), gym.make("Pendulum-v1")
    pendulum: Any = env.unwrapped
    columns: dict[str, list[Any]] = {name: [] for name in ("obs", "actions", "rewards", "next_obs")}
    for _ in range(rows):
        env.reset(seed=0)  # for the time limit; the state is set below
        angle, speed, torque = rng.uniform(*ANGLES), rng.uniform(*SPEEDS), rng.uniform(*TORQUES, 1)
        pendulum.state = np.array([angle, speed])
        next_obs, reward, *_ = env.step(torque.astype(np.float32))
        step = ([np.cos(angle), np.sin(angle), speed], torque, reward, next_obs)
        for column, value in zip(columns.values(), step, strict=True):
            column.append(value)
    env.close()
    arrays: dict[str, Any] = {name: np.array(column, dtype=np.float32) for name, column in columns.items()}
    ends = {"terminated": np.zeros(rows, bool), "truncated": np.ones(rows, bool)}
    return TransitionDataset(**arrays, **ends, metadata={"env_id": "Pendulum-v1", "policy": "half", "seed": seed})


def main(argv: Sequence[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Pendulum-v1 transitions from half of the state space.")
    parser.add_argument("output", type=Path, help="the npz file to write")
    parser.add_argument("--rows", type=int, default=6_000, help="transitions")
    parser.add_argument("--seed", type=int, default=0, help="of the states and torques")
    arguments = parser.parse_args(argv)
    print(f"wrote: {make_half_dataset(arguments.rows, arguments.seed).save_npz(arguments.output)}")


if __name__ == "__main__":
    main()
