"""Collecting from whichever workers are ready: a slow one holds up nobody, and a run is no function of its seed."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np

from rl_training.collect.worker import WorkerPlan
from rl_training.collect.workers import WorkerCollector
from rl_training.data.experience import Experience


class FirstComers(WorkerCollector):
    """As many answers in a turn as there are workers, whoever gives them.

    The answers of one turn do not lie next to each other, so they are copied together.
    """

    answers_again = True

    def __init__(self, plan: WorkerPlan, *arguments: Any, **options: Any) -> None:
        super().__init__(plan, *arguments, **options)
        self.joined = Experience(plan.layout)

    def _next_number(self) -> int:
        """One whose memory no worker may be reading."""
        held = {flight.number for flight in self._flights}
        return next(number for number in count() if number not in held)

    def _place(self, index: int, experience: Experience) -> int:
        """The worker's own columns, or others where they are taken."""
        place = min(set(range(len(self.records))) - set(self._answers), key=lambda free: (free != index, free))
        there = self._columns(experience, index)
        for name, array in self._columns(self.joined, place).arrays.items():
            array[:] = there.arrays[name]
        return place

    def _columns(self, experience: Experience, index: int) -> Experience:
        return experience.columns(self.records[index].first, self.records[index].stop)

    def _join(self, experience: Experience) -> Experience:
        """The copies; its parts say which environments they are of."""
        joined = super()._join(self.joined)
        joined.parts = [
            (np.arange(self.records[index].first, self.records[index].stop), self._columns(joined, place))
            for place, (index, _) in self._answers.items()
        ]
        return joined
