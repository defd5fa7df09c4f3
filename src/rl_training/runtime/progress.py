"""The numbers of the progress line: speeds that follow the last half minute, and what workers do."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

RECENT_SECONDS = 30.0


class RecentSpeeds:
    """How fast counts have grown over the last half minute of training, from where they were begun at the earliest."""

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


def describe_workers(metrics: Mapping[str, float]) -> list[str]:
    """Such as `lag 1.2 (0 to 5)`, `learner waits 12%`, and what went wrong; nothing without workers."""
    if "policy_lag" not in metrics:
        return []
    least, mean, most = (metrics[f"policy_lag{end}"] for end in ("_min", "", "_max"))
    spread = "" if least == most else f" ({least:g} to {most:g})"
    waits = [f"learner waits {metrics['learner_waiting']:.0%}", f"workers wait {metrics['worker_waiting']:.0%}"]
    counts = {name: int(metrics[f"worker_{name}"]) for name in ("restarts", "dropped")}
    return [f"lag {mean:.3g}{spread}", *waits, *(f"{n:,} {name}" for name, n in counts.items() if n)]
