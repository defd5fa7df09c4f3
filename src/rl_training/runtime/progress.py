"""The numbers of the progress line: the speed over the last half minute, and the state of workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

RECENT_SECONDS = 30.0


class RecentSpeed:
    """Steps per second of training over the last half minute, or since it was created."""

    def __init__(self, step: int, seconds: float) -> None:
        self._seen = deque([(step, seconds)])

    def update(self, step: int, seconds: float) -> float:
        """The speed when `step` is reached after this many seconds of training."""
        while len(self._seen) > 1 and seconds - self._seen[1][1] >= RECENT_SECONDS:
            self._seen.popleft()
        first_step, first_second = self._seen[0]
        self._seen.append((step, seconds))
        return (step - first_step) / max(seconds - first_second, 1e-9)


def describe_workers(metrics: Mapping[str, float]) -> list[str]:
    """Descriptions such as `lag 1.2 (0 to 5)`, `learner waits 12%`, and problems; empty without workers."""
    if "policy_lag" not in metrics:
        return []
    least, mean, most = (metrics[f"policy_lag{end}"] for end in ("_min", "", "_max"))
    spread = "" if least == most else f" ({least:g} to {most:g})"
    waits = [f"learner waits {metrics['learner_waiting']:.0%}", f"workers wait {metrics['worker_waiting']:.0%}"]
    counts = {name: int(metrics[f"worker_{name}"]) for name in ("restarts", "dropped")}
    return [f"lag {mean:.3g}{spread}", *waits, *(f"{n:,} {name}" for name, n in counts.items() if n)]
