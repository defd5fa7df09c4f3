"""Train configs in processes of their own, several at a time: `train --jobs` and `tune --jobs`.

Each process reports its run to this one, which alone writes to the screen and passes signals on.
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_training.errors import EnvironmentFailure, Terminated, TrainingFailure, UserError, kind_and_line

if TYPE_CHECKING:
    from rl_training.config.train_config import TrainConfig
    from rl_training.run.run import Run

REPORT_SECONDS = 0.5  # between reports of a run's progress
LEAVE_SECONDS = 10.0  # for a process to end after its run
ORPHAN_SECONDS = 60.0  # for a run to be saved when the process that started it is gone


@dataclass
class Job:
    """A run to do, and what its process has told about it; `evaluated` returns whether it continues."""

    config: TrainConfig
    ended: Callable[[Job], None]
    evaluated: Callable[[int, float], bool] = lambda step, value: True
    warned: Callable[[str], None] = lambda warning: None
    state: str = "waiting"  # then starting, running, and done, stopped or failed
    step: int = 0
    speed: float = 0.0  # in steps/s
    seconds_left: float = math.inf
    mean: float | None = None  # of the returns of the last episodes
    run_dir: Path | None = None
    metrics: dict[str, Any] | None = None  # at its end
    signal: int | None = None  # that stopped it
    error: Exception | None = None  # that ended it


def run_jobs(
    jobs: Iterator[Job], count: int, modules: Sequence[str], tick: Callable[[], None], continues: bool = False
) -> int | None:
    """Run every job, `count` at a time, and call `tick` after every report; return the signal that stopped them.

    The first signal is passed on: every run is saved, and no other starts. A second one ends all of them at once.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    running: dict[Any, tuple[Any, Job]] = {}  # processes and their jobs, by the link to the process
    passed_on = False
    with signals_heard() as heard:
        try:
            while True:
                while not heard and len(running) < count and (job := next(jobs, None)) is not None:
                    link, process = start(job, max(1, cores // count), modules, continues)
                    running[link] = process, job
                if not running:
                    return heard[0] if heard else None
                if heard and not passed_on:
                    passed_on = True
                    for process, _ in running.values():
                        os.kill(process.pid, heard[0])
                for link in wait(list(running), REPORT_SECONDS):
                    process, job = running[link]
                    if has_ended(link, process, job):
                        del running[link]
                        if heard and job.error:
                            job.signal = heard[0]
                        job.ended(job)
                        process.join(LEAVE_SECONDS)
                        process.kill()  # a thread of the environment may still be running
                tick()
        finally:
            for process, _ in running.values():
                process.kill()


def start(job: Job, threads: int, modules: Sequence[str], continues: bool) -> tuple[Any, Any]:
    """Start a process for a job; return the link to it, and the process."""
    context = multiprocessing.get_context("spawn")
    link, other = context.Pipe()
    process = context.Process(target=train_here, args=(other, job.config, threads, tuple(modules), continues))
    process.start()
    other.close()
    job.state = "starting"
    return link, process


def has_ended(link: Any, process: Any, job: Job) -> bool:
    """Handle one message of a process; return whether it is the last one."""
    try:
        kind, *values = link.recv()
    except (EOFError, OSError):
        process.join()
        job.state, job.error = "failed", TrainingFailure(f"its process ended with code {process.exitcode}")
        return True
    if kind == "evaluated":
        with suppress(BrokenPipeError):  # the process is gone, which the next message says
            link.send(job.evaluated(*values))
    elif kind == "warned":
        job.warned(*values)
    else:
        vars(job).update(*values)
    return bool(kind == "ended")


@contextmanager
def signals_heard() -> Iterator[list[int]]:
    """Gather SIGINT and SIGTERM in a list; the second one raises."""
    heard: list[int] = []

    def keep(number: int, _: Any) -> None:
        heard.append(number)
        if len(heard) > 1:
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    previous = {number: signal.signal(number, keep) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield heard
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# in the process ------------------------------------------------------------------------------------------------------


class Report:
    """A callback that reports the progress and the evaluations of a run."""

    def __init__(self, link: Connection) -> None:
        self.link, self.reported = link, 0.0

    def on_update(self, run: Run) -> None:
        """Report the progress from time to time."""
        if time.monotonic() - self.reported >= REPORT_SECONDS:
            self.reported = time.monotonic()
            speed, seconds_left = run.cadence.pace()
            mean = run.recorder.progress_metrics().get("episode_return_mean")
            news = {"state": "running", "step": run.step, "speed": speed, "seconds_left": seconds_left, "mean": mean}
            self.link.send(("progressed", news))

    def on_evaluation(self, run: Run, metrics: dict[str, Any]) -> bool:
        """Report the evaluation and ask whether to continue."""
        self.link.send(("evaluated", run.step, metrics["eval_return_mean"]))
        return bool(self.link.recv())


def train_here(link: Connection, config: TrainConfig, threads: int, modules: Sequence[str], continues: bool) -> None:
    """Train the config and report through the link."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # the parent passes signals on; the terminal must not send them too
    threading.Thread(target=stop_with_parent, daemon=True).start()
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    from rl_training.run.workflows import train  # imports torch, which reads the number of threads

    warnings.showwarning = lambda message, *_, **__: link.send(("warned", str(message)))
    news: dict[str, Any] = {"state": "failed"}
    try:
        for name in modules:
            importlib.import_module(name)
        told: list[Any] = [Report(link)]
        done = train(config, callbacks=told, console=False, raise_on_signal=False, continues=continues)
        news = {"state": "stopped" if done.stop_signal else "done", "signal": done.stop_signal}
        news |= {"step": done.metrics["global_step"], "metrics": done.metrics, "run_dir": done.run_dir}
    except (UserError, EnvironmentFailure, TrainingFailure) as error:
        news["error"] = error
    except KeyboardInterrupt:
        news["error"] = TrainingFailure("it was stopped at once")
    except Exception as error:  # which might not survive pickling
        news["error"] = TrainingFailure(f"the run failed with {kind_and_line(error)}")
    with suppress(BrokenPipeError):  # the parent is gone
        link.send(("ended", news))


def stop_with_parent() -> None:
    """Stop the run when the parent is gone, even if it was killed, so that no run is left behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)
