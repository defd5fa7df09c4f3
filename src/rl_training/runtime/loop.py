"""The loop, in full: collect, update with each batch due, then whatever is due by cadence."""

from __future__ import annotations

from rl_training.algorithms.base import Algorithm
from rl_training.runtime.run import Run
from rl_training.runtime.spec import Source


def run_loop(algorithm: Algorithm, source: Source, run: Run) -> None:
    """Train until the run is finished."""
    while not run.finished():
        run.apply_schedules()
        run.count_steps(source.collect(algorithm, run.step))
        for phase, batch in source.batches(algorithm, run.step):
            result = algorithm.update(batch, phase=phase, global_step=run.step, sync=False)
            source.feedback(batch, result)
            run.count_update(result)
        run.tick()
