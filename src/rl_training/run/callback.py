"""`Callback`: the base class for user code that a run calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rl_training.errors import UserError

if TYPE_CHECKING:
    from rl_training.run.run import Run


class Callback:
    """Base class of callbacks: override the methods you need; return False from any of them to stop the run.

    `run` has `step`, `updates`, `config`, `run_dir` and `metrics`, the newest value of every logged metric.
    """

    def on_start(self, run: Run) -> bool | None:
        """Called before the first step."""

    def on_update(self, run: Run) -> bool | None:
        """Called after each turn of the loop."""

    def on_evaluation(self, run: Run, metrics: dict[str, Any]) -> bool | None:
        """Called after each evaluation."""

    def on_end(self, run: Run) -> bool | None:
        """Called after the last step."""


def read_callbacks(callbacks: Iterable[Callback] | None) -> list[Callback]:
    """Check the callbacks; each must have at least one method to call."""
    if callbacks is not None and not isinstance(callbacks, Iterable):
        raise UserError(f"callbacks is a {type(callbacks).__name__}; it must be a list of callbacks.")
    told = list(callbacks or ())
    events = [name for name in vars(Callback) if name.startswith("on_")]
    for callback in told:
        if not any(callable(getattr(callback, name, None)) for name in events):
            raise UserError(f"{callback!r} is not a callback; it needs one of the methods {', '.join(events)}.")
    return told
