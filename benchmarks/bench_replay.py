"""Costs of replay on one thread, in microseconds (medians): run `python benchmarks/bench_replay.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rl_training.data import PrioritizedReplayBuffer, RecurrentReplayBuffer, ReplayBuffer
from rl_training.data.prioritized import SumTree

BATCH = 256
TREE_BUDGET_US = 350.0
SAMPLE_BUDGET_US = 60.0


def median_us(call: Callable[[], Any], repeats: int = 400) -> float:
    """Median duration of one call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times) * 1e6)


def measure_tree(capacity: int) -> float:
    """Sampling 256 leaves and setting their priorities."""
    rng, tree = np.random.default_rng(0), SumTree(capacity)
    tree.leaves[:capacity] = rng.random(capacity)
    tree.rebuild()

    def work() -> None:
        rows, _ = tree.sample(BATCH, rng)
        tree.set(rows, rng.random(BATCH))

    return median_us(work)


def fill(buffer: Any, steps: int, obs_shape: tuple[int, ...], dtype: str = "float32") -> float:
    """Add random steps; returns the median cost of one `add`."""
    rng, n = np.random.default_rng(0), buffer.num_envs
    obs = rng.integers(0, 255, (64, n, *obs_shape)).astype(dtype)
    frames = getattr(buffer, "frame_stack", 1)
    if frames > 1:
        obs[:] = obs[:, :, -1:]  # constant stacks are valid stacks if the frame does not change
        obs[:] = obs[0]
    no = np.zeros(n, bool)
    clock = iter(range(10**9))

    def add() -> None:
        t = next(clock)
        done = np.full(n, t % 50 == 49)
        final = obs[t % 64] if done.any() else None
        buffer.add(obs[t % 64], np.zeros(n, np.int64), np.zeros(n), done, no, obs[(t + 1) % 64], final_obs=final)

    return median_us(add, steps)


def main() -> None:
    """Print one line per measurement."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    tree = measure_tree(1_000_000)
    print(f"sum tree, 1,000,000 leaves: sample and update 256 {tree:8.1f} us (budget {TREE_BUDGET_US:.0f})")
    print(f"sum tree,   100,000 leaves: sample and update 256 {measure_tree(100_000):8.1f} us")
    for num_envs in (1, 8, 64):
        for n_step in (1, 3):
            buffer = ReplayBuffer(100_000, num_envs, obs_shape=(4,), n_step=n_step)
            add = fill(buffer, 100_000 // num_envs, (4,))
            sample = median_us(lambda b=buffer: b.sample(BATCH, rng))  # type: ignore[misc]
            budget = f" (budget {SAMPLE_BUDGET_US:.0f})" if n_step == 1 and num_envs == 1 else ""
            name = f"replay, 100,000 rows of (4,), {num_envs:2d} envs, n_step {n_step}"
            print(f"{name}: add {add:6.1f} us, sample {BATCH} {sample:6.1f} us{budget}")
    prioritized = PrioritizedReplayBuffer(1_000_000, obs_shape=(4,))
    add = fill(prioritized, 4000, (4,))

    def work() -> None:
        batch = prioritized.sample(BATCH, rng)
        prioritized.update_priorities(batch["indices"], batch["rewards"] + 1.0)

    both = median_us(work)
    print(f"prioritized, capacity 1,000,000 (4,000 filled): add {add:6.1f} us, sample and update {both:6.1f} us")
    for frame_stack in (1, 4):
        images = ReplayBuffer(4000, obs_shape=(4, 84, 84), obs_dtype="uint8", frame_stack=frame_stack)
        add = fill(images, 4000, (4, 84, 84), "uint8")
        sample = median_us(lambda b=images: b.sample(32, rng), 100)  # type: ignore[misc]
        print(f"replay, obs (4, 84, 84), frame_stack {frame_stack}: add {add:6.1f} us, sample 32 {sample:7.1f} us")
    sequences = RecurrentReplayBuffer(4000, obs_shape=(3, 64, 64), obs_dtype="uint8", sequence_length=64)
    add = fill(sequences, 4000, (3, 64, 64), "uint8")
    sample = median_us(lambda: sequences.sample(16, rng), 50)
    print(f"sequences, obs (3, 64, 64): add {add:6.1f} us, sample 16 x 64 {sample:7.1f} us")


if __name__ == "__main__":
    main()
