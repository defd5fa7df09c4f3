"""Steps/s of 8 Breakout environments with random actions in each engine: run `python benchmarks/bench_engines.py`."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from rl_training.envs.factory import read_recipe
from rl_training.envs.probe import make_stepper, probe_spaces

ENVS, STEPS, ROUNDS = 8, 250, 7
ATARI = {"frameskip": 1, "repeat_action_probability": 0.0}


def cpu_seconds() -> float:
    """CPU time of this process with its threads, and of its children."""
    pids = [os.getpid(), *map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())]
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(row[11]) + int(row[12]) for row in fields) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print medians, with and without an end of the episode at each lost life."""
    for life in (False, True):
        recipe = read_recipe("ALE/Breakout-v5", {**ATARI, "wrappers": {"atari": {"terminal_on_life_loss": life}}})
        spaces, rng = probe_spaces(recipe), np.random.default_rng(0)
        with ExitStack() as opened:
            kinds = ("sync", "async", "native")
            made = {kind: make_stepper(recipe, spaces, 0, ENVS, kind) for kind in kinds}
            steppers = {kind: opened.enter_context(closing(stepper)) for kind, stepper in made.items()}
            rates: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
            for stepper in steppers.values():
                stepper.start()
            for _ in range(ROUNDS):
                for kind, stepper in steppers.items():
                    wall, cpu = time.perf_counter(), cpu_seconds()
                    for _ in range(STEPS):
                        stepper.step(rng.integers(0, 4, ENVS))
                    wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
                    rates[kind].append((ENVS * STEPS / wall, ENVS * STEPS / cpu))
        print(f"terminal_on_life_loss {life}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        for kind, measured in rates.items():
            wall, cpu = np.median(measured, axis=0)
            low, high = min(measured)[0], max(measured)[0]
            print(f"{kind:>7}: {wall:6,.0f} steps/s ({low:,.0f} to {high:,.0f}), {cpu:6,.0f} per CPU second")


if __name__ == "__main__":
    main()
