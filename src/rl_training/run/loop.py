"""The whole training loop: collect, store, update with each batch that is due, then log, evaluate and save."""

from __future__ import annotations

from rl_training.run.build import Session
from rl_training.run.run import Run


def run_loop(session: Session, run: Run) -> None:
    """Train until the run is finished."""
    algorithm, store = session.algorithm, session.store
    while not run.finished():
        run.apply_schedules()
        experience = session.collect(store.request(run.own_step))
        run.count_steps(store.add(experience, run.own_step), experience.episodes)
        for phase, batch in store.batches(algorithm, run.own_step):
            result = algorithm.update(batch, phase=phase, global_step=run.step, sync=False)
            run.count_update(result)
            store.feedback(batch, result)
        run.tick()
