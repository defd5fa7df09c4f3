"""Folders as runs leave them, written without training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

HOSTILE = "<script>alert(1)</script>&\"'"


def write_run(
    parent: Path, returns: Sequence[Any], *, algo: str = "ppo", seed: int = 0, env_id: str = "CartPole-v1",
    kind: str = "eval", manifest: Any = None, step: int = 1_000, budget: int | None = None, **algo_kwargs: Any,
) -> Path:  # fmt: skip
    """A run with one row per return, `step` steps apart; with a larger budget it is unfinished."""
    number = len(list(parent.iterdir())) if parent.exists() else 0
    folder = parent / f"{algo}-{env_id.replace(':', '_')}-s{seed}-{number}"
    folder.mkdir(parents=True)
    config = {
        "algo": algo, "env_id": env_id, "seed": seed, "total_timesteps": budget or step * len(returns),
        "algo_kwargs": algo_kwargs,
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    name = "eval_return_mean" if kind == "eval" else "episode_return_mean"
    rows = [
        {"step": step * i, "kind": kind, "time": i / 10, name: value, "steps_per_second": 1e5}
        for i, value in enumerate(returns, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "manifest.json").write_text(json.dumps({} if manifest is None else manifest))
    return folder


def write_group(parent: Path, finals: Sequence[float], **settings: Any) -> None:
    """A run per final return, its curve a line from zero."""
    for seed, final in enumerate(finals):
        write_run(parent, [0.0, final / 2, final], seed=seed, **settings)
