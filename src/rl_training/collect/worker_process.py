"""Workers: some of a run's environments, and a behaviour that acts in them, in processes with shared memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from rl_training.algorithms.base import Algorithm, Array
from rl_training.collect.local import Behaviour, LocalCollector
from rl_training.data.store import Experience, ExperienceLayout, Request
from rl_training.envs.engines import make_engine
from rl_training.envs.factory import EnvRecipe
from rl_training.envs.spaces import EnvSpaces
from rl_training.envs.stepper import Stepper
from rl_training.envs.workers import WorkerPool, Workers, register_missing, share_arrays

MEMORIES = 2  # workers fill one while the learner reads the other
FIXED, FIRST = "fixed", "first"  # a turn takes one answer from every worker, or the first that arrive


@dataclass(frozen=True)
class WorkerPlan:
    """The arguments of every worker of a run."""

    make_algorithm: Callable[[], Algorithm]
    recipe: EnvRecipe
    spaces: Mapping[str, Any]
    registrations: Mapping[str, bytes]
    seed: int
    vectorization: str
    layout: ExperienceLayout
    packed_size: int  # bytes of a packed behaviour
    num_workers: int
    epsilon_ladder: float = 0.0  # Ape-X's alpha (Horgan et al. 2018, arXiv:1803.00933)
    order: str = FIXED

    @property
    def behaviours(self) -> int:
        """How many memories packed behaviours need; with `first`, each worker may read another one, and one is free."""
        return MEMORIES if self.order == FIXED else self.num_workers + 1

    def columns(self) -> list[tuple[int, int]]:
        """Each worker's environments, as (first, stop)."""
        edges = [self.layout.num_envs * index // self.num_workers for index in range(self.num_workers + 1)]
        return list(pairwise(edges))

    def share(self, descriptor: int | None = None) -> tuple[list[Experience], list[Array], Array, int]:
        """Memory that all processes see: experiences, packed behaviours, and a count of each worker's steps."""
        arrays = self.layout.arrays()
        layout = [*list(arrays.values()) * MEMORIES, *[((self.packed_size,), np.uint8)] * self.behaviours]
        shared, descriptor = share_arrays([*layout, ((self.num_workers,), np.int64)], descriptor)
        size = len(arrays)
        parts = [dict(zip(arrays, shared[i * size :], strict=False)) for i in range(MEMORIES)]
        packed = shared[MEMORIES * size : -1]
        return [Experience(self.layout, part) for part in parts], packed, shared[-1], descriptor


class CountedStepper(Stepper):
    """A stepper that counts its steps where the learner can see them, so that the learner notices a stalled worker."""

    def __init__(self, *arguments: Any, counts: Array, index: int) -> None:
        super().__init__(*arguments)
        self.counts, self.index = counts, index

    def step(self, actions: Array) -> Any:
        """Count, and step."""
        self.counts[self.index] += 1
        return super().step(actions)


class CollectingWorker:
    """Steps the environments of one worker and fills their columns of an experience.

    Messages carry only small data: finished episodes, generators, the policy's memory, and the state of the
    environments without the actions of their episodes, which the learner reads from the experience.
    """

    def __init__(self, plan: WorkerPlan, index: int, descriptor: int) -> None:
        first, stop = plan.columns()[index]
        torch.set_num_threads(1)
        register_missing(plan.registrations)
        experiences, self.packed, counts, _ = plan.share(descriptor)
        self.experiences = [experience.columns(first, stop) for experience in experiences]
        self.share = (stop - first) / plan.layout.num_envs
        self.epsilon_power = 1.0 + plan.epsilon_ladder * index / max(1, plan.num_workers - 1)
        spaces, count = EnvSpaces.from_dict(dict(plan.spaces)), stop - first
        algorithm = plan.make_algorithm()
        algorithm.seed(int(np.random.SeedSequence([plan.seed, 2, first]).generate_state(1)[0]))
        rng = np.random.default_rng(np.random.SeedSequence([plan.seed, 1, first]))
        engine = make_engine(plan.recipe, spaces, count, plan.seed, plan.vectorization, first=first)
        stepper = CountedStepper(engine, spaces, count, counts=counts, index=index)
        self.collector = LocalCollector(Behaviour(algorithm, spaces, count, rng), stepper, self.experiences[0])

    def collect(self, number: int, request: Request) -> dict[str, Any]:
        """Fill the experience with that number, acting with the behaviour of that number."""
        begun = time.perf_counter()
        experience = self.experiences[number % MEMORIES]
        self.collector.actor.unpack(self.packed[number % len(self.packed)])
        numbers = self.collector.actor.algorithm.numbers
        if "epsilon" in numbers:
            numbers["epsilon"] **= self.epsilon_power
        # this worker's share of the random steps
        self.collector.fill(experience, request._replace(random=int(np.ceil(request.random * self.share))))
        names = ("steps", "transitions", "episodes", "has_resets", "version")
        answer = {name: getattr(experience, name) for name in names}
        return answer | {"state": self.brief_state(), "seconds": time.perf_counter() - begun}

    def brief_state(self) -> dict[str, Any]:
        """The current state, without what the learner knows from the experience."""
        actor, stepper = self.collector.actor, self.collector.stepper
        stepper_state = stepper.state_dict(stepper.engine.brief_state())
        del stepper_state["obs"]
        generators = {"rng": actor.rng.bit_generator.state, "generator": actor.algorithm.generator.get_state()}
        return {"stepper": stepper_state, **generators, **actor.state_dict()}

    def restore(self, state: dict[str, Any]) -> list[str]:
        """Continue from a state; if that cannot be exact, start new episodes and return the reasons as sentences."""
        actor = self.collector.actor
        actor.rng.bit_generator.state = state["rng"]
        actor.algorithm.generator.set_state(state["generator"])
        sentences = self.collector.load_state_dict(state)
        if sentences:
            self.collector.abandon()
        return sentences

    def close(self) -> None:
        """Close the environments."""
        self.collector.close()


class SharedMemory:
    """Worker processes, and the data that they exchange with the learner, which is in memory that all of them see.

    `ray_workers.ObjectStore` does the same for Ray actors.
    """

    pool: WorkerPool

    def __init__(self, plan: WorkerPlan, name: str, timeout: float) -> None:
        self.experiences, self._packed, self._counts, self._descriptor = plan.share()
        makers = [partial(CollectingWorker, plan, index, self._descriptor) for index in range(plan.num_workers)]
        try:
            self.pool = Workers(makers, name, timeout, [self._descriptor])
        except BaseException:
            os.close(self._descriptor)
            raise

    def send(self, number: int, packed: Array) -> None:
        """Put a packed behaviour where workers find it, in place of an older one that no worker reads."""
        self._packed[number % len(self._packed)][:] = packed

    def ask(self, index: int, number: int, request: Request) -> None:
        """Ask a worker for experience, with the behaviour of that number."""
        self.pool.ask(index, "collect", number, request)

    def receive(self, index: int, number: int) -> dict[str, Any]:
        """A worker's answer, when its experience is in its columns; here it has written them itself."""
        answer: dict[str, Any] = self.pool.get(index)
        return answer

    def steps(self) -> Array:
        """The steps that each worker has taken, as far as known; the count of a stalled worker does not change."""
        return self._counts.copy()

    def close(self) -> None:
        """End the processes."""
        try:
            self.pool.close()
        finally:
            os.close(self._descriptor)
