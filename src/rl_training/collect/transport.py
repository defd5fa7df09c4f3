"""Transport of packed behaviours to workers and of experience back: the interface, and shared memory."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Protocol

from rl_training.algorithms.base import Array
from rl_training.collect.worker import CollectingWorker, WorkerPlan
from rl_training.data.experience import Experience
from rl_training.envs.workers import WorkerPool, Workers


class Transport(Protocol):
    """The workers of a run, and the data that they exchange with the learner."""

    experiences: list[Experience]  # the learner's, filled in turn

    @property
    def pool(self) -> WorkerPool:
        """The workers."""

    def send(self, number: int, packed: Array) -> None:
        """Put a packed behaviour where workers find it, in place of an older one that no worker reads."""

    def weights(self, number: int) -> tuple[Any, ...]:
        """The arguments that carry the behaviour in a request with that number."""

    def receive(self, number: int, index: int, answer: Any) -> dict[str, Any]:
        """Put the experience of an answer into the worker's columns and return the answer."""

    def steps(self) -> Array:
        """The steps that each worker has taken, as far as known; the count of a stalled worker does not change."""

    def close(self) -> None: ...


class SharedMemory:
    """Worker processes: weights and experience are in shared memory; messages carry neither."""

    def __init__(self, plan: WorkerPlan, name: str, timeout: float) -> None:
        self.experiences, self._packed, self._counts, self._descriptor = plan.share()
        places = enumerate(plan.columns())
        makers = [partial(CollectingWorker, plan, index, *place, self._descriptor) for index, place in places]
        try:
            self.pool = Workers(makers, name, timeout, [self._descriptor])
        except BaseException:
            os.close(self._descriptor)
            raise

    def send(self, number: int, packed: Array) -> None:
        """Copy it to the memory with that number."""
        self._packed[number % len(self._packed)][:] = packed

    def weights(self, number: int) -> tuple[Any, ...]:
        """No arguments: the number says which memory to read."""
        return ()

    def receive(self, number: int, index: int, answer: Any) -> dict[str, Any]:
        """Return the answer unchanged: the worker has written to its columns itself."""
        return answer

    def steps(self) -> Array:
        """The workers' own counts."""
        return self._counts.copy()

    def close(self) -> None:
        """End the processes."""
        try:
            self.pool.close()
        finally:
            os.close(self._descriptor)
