"""Steps per second of rollouts through a model, and of their parts: `python benchmarks/bench_model_rollouts.py`.

It uses Pendulum's sizes and seven members of 4x200, of which five are elites. A step is one row through the policy,
through one randomly drawn member, with noise, into the synthetic buffer. Numbers are medians of alternating
measurements. The second column is per second of CPU time; with one thread it estimates the speed of an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from rl_training.algorithms.mbpo import MBPO
from rl_training.algorithms.mopo import MOPO
from rl_training.data.model_store import CHUNK, SyntheticBuffer
from rl_training.envs.outcomes import never
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel
from rl_training.models.mlp_sac import MLPSACModel

BUDGET = 200_000
SIZES: dict[str, Any] = {"obs_dim": 3, "action_dim": 1}


def make(learner: type[MBPO], hidden: int, **options: Any) -> MBPO:
    """A learner with default dynamics and a policy of two layers of that width."""
    policy = MLPSACModel(**SIZES, hidden_sizes=(hidden, hidden))
    return learner(policy_model=policy, dynamics_model=MLPMOPOEnsembleModel(**SIZES), **options)


def pieces(rows: int, states: int) -> dict[str, Callable[[], Any]]:
    """Each measured call takes `states` model steps in chunks of `rows`."""
    small, large, mopo = make(MBPO, 64), make(MBPO, 256), make(MOPO, 64)
    obs, actions = torch.randn(states, 3), torch.rand(states, 1) * 2 - 1
    model, elites = small.dynamics_model, small.elites
    group = -(-rows // len(elites))
    grouped = torch.randn(len(elites), group, 3), torch.rand(len(elites), group, 1)
    buffer = SyntheticBuffer(100_000, **SIZES)

    def roll(learner: MBPO) -> None:
        for chunk in obs.split(rows):
            buffer.add(learner.imagine(chunk, never))

    @torch.no_grad()
    def members_alone() -> None:
        for _ in range(-(-states // rows)):
            model(*grouped, elites)

    @torch.no_grad()
    def every_member() -> None:
        for chunk, taken in zip(obs.split(rows), actions.split(rows), strict=True):
            model(chunk, taken)

    return {
        "rollouts, policy 2x64": lambda: roll(small),
        "rollouts, policy 2x256": lambda: roll(large),
        "rollouts with MOPO's penalty, policy 2x64": lambda: roll(mopo),
        "  drawn members alone": members_alone,
        "  every member on every row": every_member,
        "  policy 2x64 alone": lambda: [small.act(chunk) for chunk in obs.split(rows)],
        "  policy 2x256 alone": lambda: [large.act(chunk) for chunk in obs.split(rows)],
    }


def main() -> None:
    """Print one line per measurement."""
    parser = argparse.ArgumentParser(description="Model steps per second.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--rows", type=int, default=CHUNK, help="rows rolled out together")
    parser.add_argument("--states", type=int, default=20_480, help="model steps per measurement")
    parser.add_argument("--repeats", type=int, default=11, help="measurements of each, of which the median counts")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    calls = pieces(arguments.rows, arguments.states)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for repeat in range(arguments.repeats + 1):
        for name, call in calls.items():
            begun, begun_cpu = time.perf_counter(), time.process_time()
            call()
            if repeat:  # the first is for warming up
                seconds[name].append((time.perf_counter() - begun, time.process_time() - begun_cpu))
    print(f"{arguments.threads} threads, {arguments.rows} rows together; the budget is {BUDGET:,} model steps/s")
    for name, times in seconds.items():
        wall, cpu = (arguments.states / statistics.median(column) for column in zip(*times, strict=True))
        print(f"{name:44s} {wall:12,.0f} steps/s {cpu:12,.0f} per CPU second")


if __name__ == "__main__":
    main()
