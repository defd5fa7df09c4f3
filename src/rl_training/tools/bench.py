"""Where the time of a short run goes. The methods of the live objects are wrapped, so other runs pay nothing."""

from __future__ import annotations

import math
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rl_training.experiment.config import TrainConfig
from rl_training.runtime.loop import run_loop
from rl_training.runtime.params import read_params
from rl_training.runtime.run import Run
from rl_training.runtime.session import Session, closed_on_error, open_session
from rl_training.runtime.spec import get_algorithm_spec
from rl_training.tools.stopwatch import Stopwatch
from rl_training.tools.worker_cost import WorkerCost, measure_workers

# What each part of a run is made of: methods of the collector, the store, the algorithm and the run.
PARTS = {
    "environment": ("collector.stepper.step", "collector.stepper.start"),
    "act": ("collector.actor.act", "collector.actor.add_logprobs", "store._evaluate"),
    "rollout on the device": ("collector._roll",),
    "wait for workers": ("collector._wait",),
    "store": ("collector.collect", "store.add", "store.batches", "store.feedback"),
    "learn": ("algorithm.update",),
    "evaluate": ("run.evaluate",),
    "checkpoint": ("run.save_checkpoint",),
}
REST = "rest"
MOST_RANDOM = 1_000  # random steps of a measurement before learning, whatever learning_starts says
WORKER_SECONDS = 0.5  # of each measurement of the cost of workers
MOST_WAITING = 10_000  # steps that a measurement waits for an update


@dataclass
class Breakdown:
    """Seconds of a run by part; each without the parts called inside it."""

    config: TrainConfig
    steps: int = 0
    updates: int = 0
    total_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    workers: WorkerCost | None = None

    @property
    def steps_per_second(self) -> float:
        """Environment steps per second of training: without evaluations and checkpoints, as a run counts them."""
        aside = self.seconds.get("evaluate", 0.0) + self.seconds.get("checkpoint", 0.0)
        return self.steps / max(self.total_seconds - aside, 1e-9)


def benchmark(config: TrainConfig) -> Breakdown:
    """Run the config in a temporary folder and measure where the time of its loop goes; nothing is left behind.

    The run starts when it learns: the random steps before that would make it look faster than it is.
    """
    session = open_measured(config)
    with closed_on_error(session):
        first = play_at_random(session)
        first += time_turns(session, first, 0.0)[0]  # first calls are slow
        workers = measure_workers(session, WORKER_SECONDS) if session.spec.steps_environments else None
    with tempfile.TemporaryDirectory(prefix="rl-training-bench-") as folder:
        return replace(_run_timed(session, first, Path(folder)), workers=workers)


def open_measured(config: TrainConfig) -> Session:
    """The config's session, which learns after at most `MOST_RANDOM` steps."""
    params = read_params(get_algorithm_spec(config.algo).params, config.algo_kwargs)
    if getattr(params, "learning_starts", 0) > MOST_RANDOM:
        config = config.model_copy(update={"algo_kwargs": {**config.algo_kwargs, "learning_starts": MOST_RANDOM}})
    return open_session(config)


class Turn(NamedTuple):
    """What one turn of the loop did."""

    steps: int
    updates: int


def take_turn(session: Session, step: int) -> Turn:
    """One turn of the loop at `step`, outside any run."""
    store, algorithm = session.store, session.algorithm
    steps = store.add(session.collect(store.request(step)), step)
    updates = 0
    for phase, batch in store.batches(algorithm, step + steps):
        store.feedback(batch, algorithm.update(batch, phase=phase, global_step=step + steps, sync=False))
        updates += 1
    return Turn(steps, updates)


def play_at_random(session: Session) -> int:
    """Take turns until learning starts; returns their steps."""
    step = 0
    while step < getattr(session.params, "learning_starts", 0):
        turn = take_turn(session, step)
        step += turn.steps
        if turn.updates:  # pretraining
            break
    return step


def time_turns(session: Session, step: int, seconds: float) -> tuple[int, float]:
    """Take turns from `step` on until `seconds` have passed and the last turn learned; returns their steps and seconds.

    They end with an update because some lanes take many steps per update. A turn without steps counts as one step.
    """
    begun, taken = time.perf_counter(), 0
    while True:
        turn = take_turn(session, step + taken)
        taken += turn.steps or 1
        _synchronize(session)
        spent = time.perf_counter() - begun
        if spent >= seconds and (turn.updates or taken >= MOST_WAITING):
            return taken, spent


def _run_timed(session: Session, first: int, folder: Path) -> Breakdown:
    watch = Stopwatch(lambda: _synchronize(session))
    total_timesteps = session.config.total_timesteps + first
    session.config = session.config.model_copy(update={"total_timesteps": total_timesteps})
    run = Run(session, folder)
    run.step = first
    run.next_evaluation += first
    run.next_checkpoint += first
    with closing(run):
        _wrap_parts(watch, {**vars(session), "run": run})
        with run.signals():
            begun = time.perf_counter()
            run_loop(session, run)
            total = time.perf_counter() - begun
    seconds = {part: watch.seconds.get(part, 0.0) for part in PARTS}
    seconds[REST] = max(0.0, total - sum(seconds.values()))
    return Breakdown(session.config, run.step - first, run.updates, total, seconds)


def _synchronize(session: Session) -> None:
    """Wait for a GPU, which may still be busy after a call has returned."""
    if session.config.device.startswith("cuda"):
        torch.cuda.synchronize()


def _wrap_parts(watch: Stopwatch, roots: dict[str, Any]) -> None:
    for part, names in PARTS.items():
        for name in names:
            root, *between, method = name.split(".")
            target = roots[root]
            for attribute in between:
                target = getattr(target, attribute, None)
            if callable(getattr(target, method, None)):  # lanes differ in what they have
                setattr(target, method, watch.wrap(getattr(target, method), part))


def estimate_seconds(session: Session, seconds: float) -> float:
    """Seconds of collecting and learning that the session's budget will take, measured over a short time."""
    total, params = session.config.total_timesteps, session.params
    step = play_at_random(session)
    first_steps, first_spent = time_turns(session, step, 0.0)
    fits = hasattr(params, "model_updates")
    if first_spent > 3 * seconds and not fits:  # long enough: slow first calls hardly matter
        return total * first_spent / first_steps
    steps, spent = time_turns(session, step + first_steps, seconds)
    per_step = spent / steps
    # in a lane with a model, the first turn fits it; a run does that once, or as often as the budget asks
    num_fits = math.ceil(total / getattr(params, "model_train_frequency", total)) if fits else 0
    return total * per_step + num_fits * max(0.0, first_spent - first_steps * per_step)


def storage_bytes(session: Session) -> int:
    """Bytes of the experience that the session keeps, imagined and recorded rows included."""
    store = session.store
    kept = [getattr(owner, "buffer", None) for owner in (store, getattr(store, "rollouts", None))]
    kept.append(getattr(session.collector, "experience", None))
    recorded = [getattr(store, name, None) for name in ("dataset", "expert")]
    rows = sum(array.nbytes for data in recorded if data is not None for array in data.arrays().values())
    return rows + sum(int(part.nbytes) for part in kept if part is not None)
