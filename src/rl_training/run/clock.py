"""The clock of a run: seconds of training, how fast steps and updates come, and how long the rest will take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

RECENT_SECONDS = 30.0


class RecentSpeeds:
    """How fast counts have grown over the last half minute of training, or since this was made."""

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
        self.paused: dict[str, float] = {}  # seconds in this process, by what they were spent on
        self.start(step, updates)

    def start(self, step: int, updates: int) -> None:
        """Count from here on: the time since the clock was made does not count."""
        self._resumed_at = time.perf_counter()
        self._first_step, self._first_second, self._first_updates = step, self._seconds, updates
        self.before_learning = self.has_restarted = False
        self._recent = RecentSpeeds(self._seconds, step, updates)

    def stop(self) -> None:
        """Count no more."""
        self._seconds, self._is_stopped = self.seconds, True

    @property
    def seconds(self) -> float:
        """Seconds of training up to now."""
        return self._seconds if self._is_stopped else self._seconds + time.perf_counter() - self._resumed_at

    @contextmanager
    def pause(self, part: str) -> Iterator[None]:
        """Do not count the time of this block as training, but as `part`."""
        was_stopped, begun = self._is_stopped, time.perf_counter()
        self.stop()
        try:
            yield
        finally:
            self._resumed_at, self._is_stopped = time.perf_counter(), was_stopped
            self.paused[part] = self.paused.get(part, 0.0) + self._resumed_at - begun

    def steps_per_second(self, step: int) -> float:
        """The mean since the start of this process."""
        return (step - self._first_step) / max(self.seconds - self._first_second, 1e-9)

    def tick(self, step: int, updates: int) -> None:
        """Note a turn, and measure speeds anew after the first one with an update.

        Steps before it are taken many times as fast and say nothing about the time that the others will take.
        """
        was_before, self.before_learning = self.before_learning, updates == self._first_updates
        self.has_restarted = was_before and not self.before_learning
        if self.has_restarted:
            self._recent = RecentSpeeds(self.seconds, step, updates)

    def pace(self, step: int, updates: int, budgets: Sequence[float]) -> tuple[float, float]:
        """Recent steps per second, and the seconds left until the first budget of steps, updates or seconds is spent.

        They are infinite as long as nothing is known about the speed of learning.
        """
        seconds = self.seconds
        speeds = self._recent.update(seconds, step, updates)
        *amounts, left = (budget - spent for budget, spent in zip(budgets, (step, updates, seconds), strict=True))
        if min(amounts) <= 0:
            return speeds[0], 0.0
        if not self.before_learning:
            needed = [amount / speed for amount, speed in zip(amounts, speeds, strict=True) if speed > 0]
            left = min([left, *needed])
        return speeds[0], max(0.0, left)
