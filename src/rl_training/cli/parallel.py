"""Several runs in parallel, each in its own process, shown on one screen."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from rl_training.cli.exits import BY_SIGNAL
from rl_training.cli.screen import TABLE_STYLE
from rl_training.errors import Terminated, counted

if TYPE_CHECKING:
    from rl_training.config.train_config import TrainConfig

REPORT_SECONDS = 0.25


@dataclass
class Job:
    """One run and the last message from its process."""

    config: TrainConfig
    state: str = "waiting"
    step: int = 0
    speed: float = 0.0
    seconds_left: float = math.inf
    mean: float | None = None
    run_dir: Path | None = None
    metrics: dict[str, Any] | None = None  # once it has ended
    code: int = 0
    process: Any = None


def run_parallel(
    console: Console, configs: Sequence[TrainConfig], processes: int, modules: Sequence[str] | None,
    continues: bool = False,
) -> tuple[list[Job], int]:  # fmt: skip
    """Train every config, `processes` at a time; return the jobs and the exit code.

    The first signal stops all runs cleanly, the second at once.
    """
    jobs = [Job(config) for config in configs]
    waiting = list(jobs)
    pipes: dict[Connection, Job] = {}
    with _stopping(jobs, waiting) as heard, Live(console=console, auto_refresh=False, transient=True) as live:
        try:
            while waiting or pipes:
                while waiting and len(pipes) < processes:
                    job = waiting.pop(0)
                    pipes[_start(job, modules, processes, continues)] = job
                for pipe in wait(list(pipes), timeout=REPORT_SECONDS):
                    assert isinstance(pipe, Connection)
                    if not _hear(console, pipe, pipes[pipe]):
                        pipes.pop(pipe).process.join()
                        pipe.close()
                live.update(show_jobs(jobs), refresh=console.is_terminal)
        finally:
            for job in pipes.values():
                job.process.kill()
    return jobs, BY_SIGNAL + heard[0] if heard else max(job.code for job in jobs)


def _start(job: Job, modules: Sequence[str] | None, processes: int, continues: bool) -> Connection:
    here, there = multiprocessing.Pipe(duplex=False)
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    arguments = there, job.config, list(modules or ()), threads, continues
    job.process = multiprocessing.get_context("spawn").Process(target=train_in_process, args=arguments)
    job.process.start()
    there.close()
    job.state = "running"
    return here


def _hear(console: Console, pipe: Connection, job: Job) -> bool:
    """Read the messages of a process; False when it has ended."""
    try:
        kind, *values = pipe.recv()
    except EOFError:
        if job.state == "running":  # it ended without a message
            job.process.join()
            job.state, job.code = "failed", 1
            console.print(f"seed {job.config.seed}: the process ended with exit code {job.process.exitcode}")
        return False
    if kind == "said":
        console.print(f"seed {job.config.seed}: {values[0]}", markup=False, soft_wrap=True)
    elif kind == "failed":
        job.state, job.code = "failed", values[0]
        console.print(f"seed {job.config.seed} failed: {values[1]}", markup=False, soft_wrap=True)
    elif kind == "ended":
        job.run_dir, job.metrics, signal_number = values
        assert job.metrics is not None
        job.step = job.metrics["global_step"]
        job.state, job.code = ("done", 0) if signal_number is None else ("stopped", BY_SIGNAL + signal_number)
        if not console.is_terminal:
            console.print(f"seed {job.config.seed}: {job.state} at step {job.step:,}")
    else:
        job.step, job.speed, job.seconds_left, job.mean = values
    return True


@contextmanager
def _stopping(jobs: Sequence[Job], waiting: list[Job]) -> Iterator[list[int]]:
    """Pass signals on to the processes, which do not get them from the terminal; start nothing new after one.

    The list holds the signals that came.
    """
    heard: list[int] = []

    def ask(number: int, _: Any) -> None:
        heard.append(number)
        for job in waiting:
            job.state = "not run"
        waiting.clear()
        for job in jobs:
            if job.state == "running":
                os.kill(job.process.pid, number)
        if len(heard) > 1:
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield heard
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def show_jobs(jobs: Sequence[Job]) -> Table:
    """One row per run: progress, speed and return."""
    from rl_training.record.logger import format_duration

    first = jobs[0].config
    table = Table(title=f"{counted(len(jobs), 'run')} of {first.algo} on {first.env_id}", **TABLE_STYLE)
    widths = {"state": 8, "steps": len(f"{first.total_timesteps:,}"), "": 4, "eta": 7, "return": 6}
    for name in ("seed", "state", "steps", "", "steps/s", "eta", "return"):  # the same width in every frame
        justify: Any = "left" if name == "state" else "right"
        table.add_column(name, justify=justify, no_wrap=True, min_width=widths.get(name))
    for job in jobs:
        share = min(1.0, job.step / job.config.total_timesteps)
        state = "starting" if job.state == "running" and not job.step else job.state
        table.add_row(
            str(job.config.seed), state, f"{job.step:,}", f"{share:.0%}", f"{job.speed:,.0f}" if job.speed else "",
            format_duration(job.seconds_left) if job.state == "running" and job.speed else "",
            "" if job.mean is None else f"{job.mean:.1f}",
        )  # fmt: skip
    return table


def train_in_process(pipe: Any, config: TrainConfig, modules: list[str], threads: str, continues: bool) -> None:
    """Runs in its own process: train, and report through the pipe."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # the parent process passes signals on; the terminal must not send them too
    os.environ["OMP_NUM_THREADS"] = threads
    from rl_training.cli.exits import STOPPED, describe, describe_warning
    from rl_training.cli.options import name_environment
    from rl_training.run.run import Callback, Run
    from rl_training.run.workflows import train

    class Tell(Callback):
        """Reports the progress of the run from time to time."""

        said = 0.0

        def on_update(self, run: Run) -> None:
            if time.monotonic() - self.said >= REPORT_SECONDS:
                self.said = time.monotonic()
                mean = run.recorder.progress_metrics().get("episode_return_mean")
                pipe.send(("progress", run.step, *run.cadence.pace(), mean))

    warnings.showwarning = lambda message, *_, **__: pipe.send(("said", describe_warning(message)))
    try:
        name_environment(config.env_id if config.env_id in config.named else None, modules)
        result = train(config, callbacks=[Tell()], console=False, raise_on_signal=False, continues=continues)
        pipe.send(("ended", result.run_dir, result.metrics, result.stop_signal))
    except (KeyboardInterrupt, Terminated):
        pipe.send(("failed", STOPPED, "stopped at once."))
    except Exception as error:
        pipe.send(("failed", *describe(error)))
