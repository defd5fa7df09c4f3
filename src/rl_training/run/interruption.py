"""Ending a run early: signals and failures, where they may interrupt it, and what is saved."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from rl_training.errors import EnvironmentFailure, Terminated, TrainingFailure
from rl_training.run.ranks import resume_command

if TYPE_CHECKING:
    from rl_training.run.run import Run

STOP_SECONDS = 10.0  # after the first signal, to finish the current turn


class Interruption(KeyboardInterrupt):
    """Raised by a signal to end an evaluation, or a turn that takes too long, where nothing is half changed."""


@dataclass
class StopRequest:
    """What signals ask of a run: the handlers here set it, and `Run` reads it."""

    signal: int | None = None
    at_once: bool = False  # after a second signal
    interruption: Interruption | None = None  # ends the current turn after its update

    @property
    def name(self) -> str | None:
        """The signal's name, the reason why a run stops."""
        return None if self.signal is None else signal.Signals(self.signal).name


@contextmanager
def stop_on_signals(run: Run) -> Iterator[None]:
    """SIGINT and SIGTERM ask the run to stop; a second one stops it at once, with the error of `stop_error`.

    An evaluation ends at once. The current turn of the loop is finished, so that a resume is exact, unless it takes
    more than `STOP_SECONDS`: then it is interrupted after its update or inside the environment, whichever comes
    first. If closing an environment takes that long, the run does not wait for it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    stop = run.stop

    def ask(number: int, frame: FrameType | None) -> None:
        stop.at_once, stop.signal = stop.signal is not None, number
        if stop.at_once:
            raise KeyboardInterrupt  # not SystemExit, which an environment may raise itself
        what = "this evaluation is discarded" if run.phase == "evaluation" else "stopping after this update"
        run.logger.message(f"{what}; a checkpoint will be written (a second signal stops at once)")
        if hasattr(signal, "setitimer"):
            previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, abandon)
            signal.setitimer(signal.ITIMER_REAL, STOP_SECONDS, STOP_SECONDS)
        if run.phase == "evaluation" and can_leave(frame):
            raise Interruption

    def abandon(number: int, frame: FrameType | None) -> None:
        if run.phase == "turn":
            interruption = Interruption()
            run.session.collector.interrupt(interruption)
            if run.ranks.count == 1:  # several ranks must agree first
                stop.interruption = interruption
            if can_leave(frame):
                raise interruption
        elif run.phase == "closing" or (run.phase == "evaluation" and can_leave(frame)):
            raise Interruption

    previous: dict[int, Any] = {}
    for asking in (signal.SIGINT, signal.SIGTERM):
        previous[asking] = signal.signal(asking, ask)
    try:
        yield
    except KeyboardInterrupt as error:
        if stop.at_once and stop.signal is not None:
            raise stop_error(stop.signal) from error
        raise
    finally:
        if len(previous) > 2:  # the alarm is set
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)


def stop_error(number: int) -> BaseException:
    """What a run raises after this signal, once everything is saved."""
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated()


@contextmanager
def abandon_turn_on_signal(run: Run) -> Iterator[None]:
    """After a signal, abandon the current turn, whatever error interrupts it.

    If all ranks have the failure, they have the signal too.
    """
    try:
        yield
    except (Exception, Interruption) as error:
        if run.ranks.knows(error):
            run.stop.signal = int(run.ranks.largest(run.stop.signal or 0)) or None
        if run.stop.signal is None or run.phase != "turn" or not _all_can_save_after(run, error):
            raise
        run.leave_turn(error)


@contextmanager
def save_on_failure(run: Run) -> Iterator[None]:
    """Save the learner after a failure and print where it was saved."""
    try:
        yield
    except TrainingFailure:  # its message already names the last good checkpoint
        raise
    except BaseException as error:
        if isinstance(error, (EnvironmentFailure, ValueError)) and run.ranks.count == 1:
            run.find_cause(error)
        if run.counts() != run.saved and not run.stop.at_once and _all_can_save_after(run, error):
            try:
                if run.session.algorithm.first_bad_tensor() is None:
                    if run.phase == "turn":
                        run.abandon_turn()
                    run.save_checkpoint()
            except Exception as failure:  # only the first error is raised
                run.logger.message(f"warning: step {run.step} could not be saved: {failure}")
        if run.saved is not None and run.saved[0]:
            latest = run.checkpoints.latest
            command = f"{resume_command(run.ranks.count)} --checkpoint {latest}{run.config.named_options}"
            note = f"step {run.saved[0]:,.0f} is saved: {command}"
            run.logger.message(note)
            if isinstance(error, Exception) and hasattr(error, "add_note"):
                error.add_note(note)
        raise


def _all_can_save_after(run: Run, error: BaseException) -> bool:
    """Whether every rank can save; if not all have the error, another rank may be waiting for something else."""
    return run.ranks.knows(error) and not run.ranks.largest(not can_save_after(error))


def can_leave(frame: FrameType | None) -> bool:
    """Whether code of an environment, its engine or an evaluation is running, where an exception breaks no learner.

    The innermost module that has a `CAN_BE_LEFT` decides; without any, nothing may be interrupted.
    """
    frames = [] if frame is None else [one for one, _ in traceback.walk_stack(frame)]
    marks = (one.f_globals["CAN_BE_LEFT"] for one in frames if "CAN_BE_LEFT" in one.f_globals)
    return bool(next(marks, False))


def can_save_after(error: BaseException) -> bool:
    """Whether buffers are intact: an error inside a module that has `CHANGES_BUFFERS` may leave one half changed."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    changes = any(frame.f_globals.get("CHANGES_BUFFERS", False) for frame in frames)
    return not changes and not isinstance(error, TrainingFailure)
