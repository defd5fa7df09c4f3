"""Where a signal may leave a run, and after what a run can still be saved."""

from __future__ import annotations

from types import FrameType

from rl_training.errors import TrainingFailure


class Interruption(KeyboardInterrupt):
    """A signal ends an evaluation, or a turn that takes too long, at a place where nothing is left half done."""


def can_leave(frame: FrameType | None) -> bool:
    """Whether an environment, its engine or an evaluation's own code runs: an exception there breaks no learner."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module in ("rl_training.envs.stepper", "rl_training.runtime.evaluation"):
            return True
        if module.startswith(("rl_training.runtime.", "rl_training.algorithms.")):
            return False
        frame = frame.f_back
    return False


def can_save_after(error: BaseException) -> bool:
    """Whether buffers are whole: not where a failure (out of memory, for example) came out of their own code."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith("rl_training.data."):
            return False
        trace = trace.tb_next
    return not isinstance(error, TrainingFailure)
