"""What the progress line says about workers."""

from __future__ import annotations

from collections.abc import Mapping


def describe_workers(metrics: Mapping[str, float]) -> list[str]:
    """Descriptions such as `lag 1.2 (0 to 5)`, `learner waits 12%`, and problems; empty without workers."""
    if "policy_lag" not in metrics:
        return []
    least, mean, most = (metrics[f"policy_lag{end}"] for end in ("_min", "", "_max"))
    spread = "" if least == most else f" ({least:g} to {most:g})"
    waits = [f"learner waits {metrics['learner_waiting']:.0%}", f"workers wait {metrics['worker_waiting']:.0%}"]
    counts = {name: int(metrics[f"worker_{name}"]) for name in ("restarts", "dropped")}
    return [f"lag {mean:.3g}{spread}", *waits, *(f"{n:,} {name}" for name, n in counts.items() if n)]
