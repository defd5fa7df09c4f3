"""The clock of a run: seconds of training, how fast steps and updates come, and how long the rest will take."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

RECENT_SECONDS = 30.0


class RecentSpeeds:
    """How fast counts have grown over the last half minute of training, or since the first call if that is shorter."""

    def __init__(self, seconds: float, *counts: int) -> None:
        self._seen = deque([(seconds, *counts)])

    def update(self, seconds: float, *counts: int) -> list[float]:
        """The growth per second of each count, now that these are reached after these seconds of training."""
        while len(self._seen) > 1 and seconds - self._seen[1][0] >= RECENT_SECONDS:
            self._seen.popleft()
        first_second, *first_counts = self._seen[0]
        self._seen.append((seconds, *counts))
        passed = max(seconds - first_second, 1e-9)
        return [(count - first) / passed for count, first in zip(counts, first_counts, strict=True)]


class TrainingClock:
    """Seconds of training, without pauses and summed over resumes, and how fast steps and updates come in them."""

    def __init__(self, seconds: float, step: int, updates: int) -> None:
        self._seconds, self._is_stopped = seconds, False
        self.start(step, updates)

    def start(self, step: int, updates: int) -> None:
        """Count from here on: the time since the clock was made does not count."""
        self._resumed_at = time.perf_counter()
        self._first = step, self._seconds
        self._measure_from(step, updates)

    def stop(self) -> None:
        """Count no more."""
        self._seconds, self._is_stopped = self.seconds, True

    @property
    def seconds(self) -> float:
        """Seconds of training up to now."""
        return self._seconds if self._is_stopped else self._seconds + time.perf_counter() - self._resumed_at

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count the time of this block."""
        was_stopped = self._is_stopped
        self.stop()
        try:
            yield
        finally:
            self._resumed_at, self._is_stopped = time.perf_counter(), was_stopped

    def steps_per_second(self, step: int) -> float:
        """The mean since the start of this process."""
        first_step, first_second = self._first
        return (step - first_step) / max(self.seconds - first_second, 1e-9)

    def tick(self, step: int, updates: int) -> None:
        """Measure speeds anew from the first update on.

        Steps before it are taken many times as fast and say nothing about the time that the others will take.
        """
        if updates == self._first_updates:
            self.before_learning = True
        elif self.before_learning:
            self._measure_from(step, updates)

    def _measure_from(self, step: int, updates: int) -> None:
        self._recent = RecentSpeeds(self.seconds, step, updates)
        self._first_updates, self.before_learning = updates, False

    def pace(self, step: int, updates: int, budgets: Sequence[float]) -> tuple[float, float]:
        """Recent steps per second, and the seconds left until the first budget of steps, updates or seconds is spent.

        They are infinite as long as nothing is known about the speed of learning.
        """
        speeds = self._recent.update(self.seconds, step, updates)
        *amounts, left = (budget - spent for budget, spent in zip(budgets, (step, updates, self.seconds), strict=True))
        if not self.before_learning:
            needed = [amount / speed for amount, speed in zip(amounts, speeds, strict=True) if speed > 0]
            left = min(left, *needed, math.inf)
        return speeds[0], max(0.0, left)
