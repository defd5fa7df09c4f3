"""Small runs with worker processes, and the comparison of how two of them end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from resume_cases import assert_same, load_checkpoint, rows_of, tiny
from rl_training.run.workflows import TrainResult

CLOCKED = {"learner_waiting", "worker_waiting", "worker_restarts"}


def workers(algo: str, output_dir: Path, count: int | str = 2, **fields: Any) -> Any:
    plain = {"num_envs": 3, "vectorization": "sync", "eval_episodes": 0, "execution_backend": "local_async"}
    return tiny(algo, output_dir, num_workers=count, **{**plain, **fields})


def assert_same_end(one: TrainResult, other: TrainResult) -> None:
    """Learner, store, workers and requests in flight, to the bit; and the rows of metrics but for clocks."""
    ends = [load_checkpoint(result.checkpoint_path) for result in (one, other)]
    for part in ("algorithm", "source"):
        assert_same(ends[0][part], ends[1][part], part)
    rows = [rows_of(result.run_dir) for result in (one, other)]
    for row in rows[0] + rows[1]:
        for name in CLOCKED:
            row.pop(name, None)
    assert rows[0] == rows[1]
