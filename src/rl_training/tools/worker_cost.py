"""Measure whether worker processes would be faster: the time of a step in one process, and in a worker."""

from __future__ import annotations

import io
import os
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from rl_training.algorithms.base import Algorithm
from rl_training.collect.local import Behaviour, LocalCollector
from rl_training.config.choices import torch_settings_restored
from rl_training.data.experience import Experience, Request
from rl_training.envs.engines import choose_vectorization
from rl_training.envs.random_play import make_stepper
from rl_training.envs.workers import Workers
from rl_training.errors import counted
from rl_training.run.build import Session
from rl_training.run.learner import build_algorithm
from rl_training.tools.stopwatch import Stopwatch

LEAST_ENVS = 8  # a single one cannot be divided among workers
ANSWER = bytes(2048)  # about the size of a worker's answer without its experience
TRIPS = 200


class WorkerCost(NamedTuple):
    """Seconds per environment step, and what is available for workers."""

    step: float  # the environment's own, in one process with `num_envs`
    collect: float  # with acting, in the same process
    handover: float  # what a worker adds to a step: acting for its few environments, and answering
    busy: float  # share of a worker's time in which a core works
    num_envs: int
    cores: int

    @property
    def least_workers(self) -> int:
        """The smallest number of workers that collect more than one process does."""
        return max(2, int((self.step + self.handover) / self.collect) + 1)

    @property
    def most_workers(self) -> int:
        """The largest number of workers with an environment and a core each; one core is the learner's."""
        return int(min(self.num_envs, (self.cores - 1) / max(self.busy, 1e-3)))

    @property
    def settings(self) -> str:
        """The options to give to a command."""
        given = {"execution_backend": "local_async", "num_envs": self.num_envs, "num_workers": self.most_workers}
        return " ".join(f"--set {name}={value}" for name, value in given.items())

    @property
    def pays(self) -> bool:
        """Whether an environment step takes longer than handing it over, and enough workers are possible."""
        return self.step > self.handover and self.least_workers <= self.most_workers

    def describe(self, env_id: str) -> str:
        """One sentence with the numbers."""
        costs = (
            f"a step of {env_id} takes {1e6 * self.step:,.0f} µs, to which a worker adds {1e6 * self.handover:,.0f} µs "
            f"for acting and handing it over; one process collects {1 / self.collect:,.0f} steps/s"
        )
        if self.pays:
            return f"{costs}: {self.least_workers} workers or more should pay"
        if self.step <= self.handover:
            return f"{costs}: workers do not pay here"
        few = f"{counted(self.num_envs, 'environment')} and {counted(self.cores, 'core')}, one for the learner"
        return f"{costs}: workers do not pay here, since it takes {self.least_workers} ({few})"


class Pace(NamedTuple):
    """Seconds per environment step of collecting, of the environment alone, and the share in which a core worked."""

    collect: float
    step: float
    busy: float


def measure_workers(session: Session, seconds: float) -> WorkerCost:
    """Collect for that long in one process, then as long with one environment and one thread, as a worker may."""
    num_envs = max(LEAST_ENVS, session.config.num_envs)
    alone = time_collecting(session, session.algorithm, num_envs, seconds)
    with torch_settings_restored():
        torch.set_num_threads(1)
        actor = build_algorithm(session.spec, session.params, session.spaces, seed=session.config.seed, device="cpu")
        worker = time_collecting(session, actor, 1, seconds)
    handover = worker.collect - worker.step + time_trip() / session.store.layout.max_steps
    return WorkerCost(alone.step, alone.collect, handover, worker.busy, num_envs, os.cpu_count() or 1)


def time_collecting(session: Session, algorithm: Algorithm, num_envs: int, seconds: float) -> Pace:
    """The best of several rounds, because other programs may use this machine too."""
    spaces, seed, watch = session.spaces, session.config.seed, Stopwatch()
    vectorization = choose_vectorization("auto", session.recipe, num_envs)
    layout = replace(session.store.layout, num_envs=num_envs, holds_resets=vectorization == "native")
    with closing(make_stepper(session.recipe, spaces, seed, num_envs, vectorization)) as stepper:
        actor = Behaviour(algorithm, spaces, num_envs, np.random.default_rng(seed))
        collector = LocalCollector(actor, stepper, experience := Experience(layout))
        collector.watch(watch.wrap)
        rounds: list[Pace] = []
        rows, end = 1, time.perf_counter() + seconds
        while len(rounds) < 2 or time.perf_counter() < end:
            watch.seconds.clear()
            begun, worked = time.perf_counter(), time.process_time()
            collector.fill(experience, Request(steps=rows))
            spent, worked = time.perf_counter() - begun, time.process_time() - worked
            taken = rows * num_envs
            rounds.append(Pace(spent / taken, watch.seconds["environment"] / taken, min(1.0, worked / spent)))
            rows = min(2 * rows, layout.max_steps) if spent < seconds / 8 else rows
        return min(rounds)


def time_trip() -> float:
    """Median seconds between a request to a process and its answer."""
    with closing(Workers([partial(io.BytesIO, ANSWER)], "a worker", 60.0)) as workers:
        times = [time.perf_counter()]
        for _ in range(TRIPS):
            workers.call("getvalue")
            times.append(time.perf_counter())
    return float(np.median(np.diff(times)))
