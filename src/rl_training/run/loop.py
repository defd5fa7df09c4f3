"""The whole training loop: collect, store, update with each batch that is due, then log, evaluate and save."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rl_training.algorithms.base import UpdateResult
from rl_training.data.experience import Timed, untimed
from rl_training.envs.stepper import Episode
from rl_training.run.build import Session
from rl_training.run.run import Run


def run_loop(session: Session, run: Run | Turns, timed: Timed = untimed) -> None:
    """Train until the run is finished; `timed` may replace the calls that make up a turn, to measure them."""
    algorithm, store, collect = session.algorithm, session.store, timed(session.collect, session.collector.part)
    add, batches, feedback = timed(store.add, "store"), timed(store.batches, "store"), timed(store.feedback, "store")
    update = timed(algorithm.update, "learn")
    while not run.finished():
        run.apply_schedules()
        experience = collect(store.request(run.own_step))
        run.count_steps(add(experience, run.own_step), experience.episodes)
        for phase, batch in batches(algorithm, run.own_step):
            result = update(batch, phase=phase, global_step=run.step, sync=False)
            run.count_update(result)
            feedback(batch, result)
        run.tick()


class Turns:
    """Takes the place of a `Run` to measure a session: it only counts, until `enough` turns are taken."""

    def __init__(self, step: int, enough: Callable[[Turns], bool]) -> None:
        self.step, self._first, self._enough = step, step, enough
        self.updates, self.learned = 0, False  # in the last turn

    @property
    def own_step(self) -> int:
        """A measurement has one process."""
        return self.step

    @property
    def taken(self) -> int:
        """The number of steps; a turn without any counts as one."""
        return self.step - self._first

    def finished(self) -> bool:
        """Whether these turns are enough."""
        return self._enough(self)

    def apply_schedules(self) -> None:
        """Begin a turn; a measurement is too short for schedules."""
        self.learned = False

    def count_steps(self, steps: int, episodes: Iterable[Episode]) -> None:
        """Count real transitions."""
        self.step += steps or 1

    def count_update(self, result: UpdateResult) -> None:
        """Count an update."""
        self.updates, self.learned = self.updates + 1, True

    def tick(self) -> None:
        """Nothing else is due."""
