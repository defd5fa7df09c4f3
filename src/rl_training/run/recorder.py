"""What a run tells: rows of metrics, the progress line, and messages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_training.algorithms.base import read_metrics
from rl_training.record.logger import RunLogger, SilentLogger
from rl_training.run.build import Session
from rl_training.run.cadence import Cadence, summarize_episodes


class Recorder:
    """Collects the metrics of a run from all its parts, and logs them."""

    def __init__(self, session: Session, cadence: Cadence, run_dir: Path, *, console: bool, append: bool) -> None:
        self.session, self.cadence, self.state, config = session, cadence, cadence.state, session.config
        self.logger = SilentLogger() if session.ranks.rank else RunLogger(
            run_dir, console=console, total_steps=config.total_timesteps, append=append, resume_step=self.state.step,
            loggers=config.loggers, config=config.model_dump(mode="json"),
        )  # fmt: skip
        self.logged_update = self.evaluated_step = -1

    def progress_metrics(self) -> dict[str, float]:
        """Counters, episode statistics and scheduled values."""
        episodes = summarize_episodes(self.state.episodes)
        return {"updates": self.state.updates} | episodes | self.cadence.scheduled_values()

    def read_latest(self) -> dict[str, float]:
        """Metrics of the last update, over all ranks."""
        metrics = read_metrics(self.state.latest)
        return dict(zip(metrics, self.session.ranks.average(list(metrics.values())), strict=True))

    def metrics(self, latest: Mapping[str, float] | None = None, *, last: bool = True) -> dict[str, Any]:
        """The newest value of every metric; `latest` are those of the last update, if they were read already.

        `last` is as in `Collector.metrics`.
        """
        collected = self.state.collected_metrics | self.session.collector.metrics(last=last)
        latest = self.read_latest() if latest is None else latest
        # schedules go over what the last update says of one, such as SAC's alpha
        return {**self.progress_metrics(), **collected, **latest, **self.cadence.scheduled_values()}

    def log_row(self, latest: Mapping[str, float], *, last: bool) -> None:
        """Log one row of metrics; `last` means that it is logged only because the run ends."""
        row = self.metrics(latest, last=last)
        row["steps_per_second"] = self.cadence.clock.steps_per_second()
        self.logger.log(self.state.step, row, last=last)
        self.logged_update = self.state.updates

    def log_evaluation(self, metrics: Mapping[str, Any], returns: list[float], *, last: bool) -> None:
        """Log the result of an evaluation."""
        self.logger.log(self.state.step, {**metrics, "eval_returns": returns}, kind="eval", last=last)
        self.evaluated_step = self.state.step

    def show_progress(self, *, evaluates: bool = False) -> None:
        """Show the progress line, if it is due."""
        clock = self.cadence.clock
        if not self.logger.progress_due or (clock.has_restarted and not evaluates):
            return  # after a restart no speed is known yet; the next turn shows it
        collected = self.session.collector.metrics(last=True)
        mean = (self.progress_metrics() | collected).get("episode_return_mean")
        losses = {name: value for name, value in read_metrics(self.state.latest).items() if name.endswith("loss")}
        doing = "evaluating" if evaluates else "not learning yet" if clock.before_learning else ""
        self.logger.progress(self.state.step, *self.cadence.pace(), mean, losses, doing)
