"""Collect from the workers that are ready first: slow workers delay nothing, but a run depends on timing."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np

from rl_training.collect.worker import WorkerPlan
from rl_training.collect.workers import WorkerCollector
from rl_training.data.experience import Experience


class FirstComers(WorkerCollector):
    """A turn takes as many answers as there are workers, whichever workers give them.

    The answers of one turn may be in the same columns of different memories, so they are copied into one batch.
    """

    answers_again = True

    def __init__(self, plan: WorkerPlan, *arguments: Any, **options: Any) -> None:
        super().__init__(plan, *arguments, **options)
        self.joined = Experience(plan.layout)

    def _next_number(self) -> int:
        """The smallest number that no pending request uses, so that no worker reads the weights with that number."""
        held = {flight.number for flight in self._flights}
        return next(number for number in count() if number not in held)

    def _place(self, index: int, experience: Experience) -> int:
        """Copy the answer to the worker's own columns, or to other ones if those are taken; return the place."""
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
