"""A run in a notebook: a bar, and a plot of its returns, redrawn while it trains. It needs IPython, no widgets."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from typing import Any

from rl_training.record.logger import format_duration
from rl_training.run.run import Callback, Run

SECONDS = 1.0  # between two pictures
MOST_POINTS = 400  # of a line; with more, every second one is dropped
WIDTH, HEIGHT, MARGIN = 560, 200, 44  # pixels of the plot
TRAINED, EVALUATED = "#7f7f7f", "#0072b2"  # colors; grey and blue are readable on light and dark pages
Point = tuple[float, float]


def is_watched() -> bool:
    """Whether somebody reads what this process prints, in a terminal or a notebook."""
    return sys.stderr.isatty() or type(sys.stderr).__module__ == "ipykernel.iostream"


def shows_html() -> bool:
    """Whether a notebook shows what this process displays."""
    return not sys.stderr.isatty() and is_watched() and "IPython" in sys.modules


class Live(Callback):
    """Shows a run in a notebook: a bar, and with `plot` the returns of training and of evaluations."""

    def __init__(self, *, plot: bool = True) -> None:
        self.plot, self.trained, self.evaluated = plot, list[Point](), list[Point]()
        self._due, self._handle, self._html = 0.0, None, ""

    def on_start(self, run: Run) -> None:
        """Show it."""
        self.trained, self.evaluated, self._handle = [], [], None
        self._show(run)

    def on_update(self, run: Run) -> None:
        """Redraw from time to time."""
        if time.monotonic() >= self._due:
            self._show(run)

    def on_evaluation(self, run: Run, metrics: dict[str, Any]) -> None:
        """Add a point."""
        self.evaluated.append((run.step, float(metrics["eval_return_mean"])))
        self._show(run)

    def on_end(self, run: Run) -> None:
        """Show the last state."""
        self._show(run)

    def _show(self, run: Run) -> None:
        metrics, (speed, left) = run.recorder.progress_metrics(), run.cadence.pace()
        mean = metrics.get("episode_return_mean")
        if mean is not None and math.isfinite(mean) and (not self.trained or run.step > self.trained[-1][0]):
            self.trained.append((run.step, float(mean)))
            self.trained = self.trained[:: 2 if len(self.trained) > MOST_POINTS else 1]
        total = run.config.total_timesteps
        words = [f"{run.step:,} of {total:,} steps", f"{speed:,.0f} steps/s"]
        words += [f"{format_duration(left)} left"] if 0 < left < math.inf else []
        words += [] if mean is None else [f"return {mean:.4g}"]
        words += [f"evaluation {self.evaluated[-1][1]:.4g}"] if self.evaluated else []
        title = escape(f"{run.config.algo} on {run.config.env_id}")
        bar = f'<progress value="{run.step}" max="{max(total, run.step)}" style="width:20em"></progress>'
        where = f"<small>{escape(str(run.run_dir))}</small>"
        picture = draw_returns(self.trained, self.evaluated) if self.plot else ""
        self._html = f"<div><b>{title}</b><br>{bar} {escape(' · '.join(words))}{picture}<br>{where}</div>"
        self._due = time.monotonic() + SECONDS
        with suppress(Exception):  # a page that was closed must not end a run
            self._draw()

    def _draw(self) -> None:
        if self._handle is None:
            from IPython.display import display

            self._handle = display(self, display_id=True)
        else:
            self._handle.update(self)

    def _repr_html_(self) -> str:
        return self._html

    def __repr__(self) -> str:
        return f"<Live: {len(self.trained)} points>"


def draw_returns(trained: Sequence[Point], evaluated: Sequence[Point]) -> str:
    """The lines as an SVG; empty where there is nothing to draw a line of."""
    points = [*trained, *evaluated]
    if max(len(trained), len(evaluated)) < 2:
        return ""
    (left, right), (low, high) = ((min(part), max(part)) for part in zip(*points, strict=True))
    wide, tall = (right - left) or 1.0, (high - low) or 1.0

    def place(step: float, value: float) -> str:
        x = MARGIN + (step - left) / wide * (WIDTH - 2 * MARGIN)
        return f"{x:.1f},{HEIGHT - 24 - (value - low) / tall * (HEIGHT - 36):.1f}"

    def line(series: Sequence[Point], color: str, width: float) -> str:
        at = " ".join(place(*point) for point in series)
        return f'<polyline fill="none" stroke="{color}" stroke-width="{width}" points="{at}"/>'

    def text(x: float, y: float, words: str, anchor: str = "start", color: str = "currentColor") -> str:
        return f'<text x="{x}" y="{y}" font-size="11" fill="{color}" text-anchor="{anchor}">{words}</text>'

    labels = text(MARGIN - 4, 16, f"{high:.4g}", "end") + text(MARGIN - 4, HEIGHT - 24, f"{low:.4g}", "end")
    labels += text(MARGIN, HEIGHT - 6, f"{left:,.0f}") + text(WIDTH - MARGIN, HEIGHT - 6, f"{right:,.0f} steps", "end")
    labels += text(WIDTH / 2 - 90, HEIGHT - 6, "training episodes", color=TRAINED)
    labels += text(WIDTH / 2 + 30, HEIGHT - 6, "evaluations", color=EVALUATED)
    drawn = line(trained, TRAINED, 1.2) + line(evaluated, EVALUATED, 2)
    return f'<br><svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">{drawn}{labels}</svg>'
