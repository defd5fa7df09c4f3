"""Collecting from the workers that are ready first: no waiting for slow ones, but a run depends on timing."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np

from rl_training.collect.worker import WorkerPlan
from rl_training.collect.workers import WorkerCollector
from rl_training.data.experience import Experience


class FirstComers(WorkerCollector):
    """A turn takes as many answers as there are workers, whichever workers give them.

    The answers of one turn may lie in the same columns of different memories, so they are copied into one batch.
    """

    answers_again = True

    def __init__(self, plan: WorkerPlan, *arguments: Any, **options: Any) -> None:
        super().__init__(plan, *arguments, **options)
        self.joined = Experience(plan.layout)

    def _next_number(self) -> int:
        """The smallest number that no worker's request has, so that nobody reads the weights that lie there."""
        held = {flight.number for flight in self._flights}
        return next(number for number in count() if number not in held)

    def _place(self, index: int, experience: Experience) -> int:
        """The worker's own columns, or other ones if those are taken; the answer is copied there."""
        place = min(set(range(len(self.records))) - set(self._answers), key=lambda free: (free != index, free))
        there = self._columns(experience, index)
        for name, array in self._columns(self.joined, place).arrays.items():
            array[:] = there.arrays[name]
        return place

    def _join(self, experience: Experience) -> Experience:
        """The copies; `parts` say which environments they come from."""
        joined = super()._join(self.joined)
        joined.parts = [
            (np.arange(self.records[index].first, self.records[index].stop), self._columns(joined, place))
            for place, (index, _) in self._answers.items()
        ]
        return joined
