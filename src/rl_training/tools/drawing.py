"""Charts as SVG text: lines with bands, distinguished by color and dash, for light and dark themes."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from rl_training.errors import UserError
from rl_training.tools.statistics import Array

LIGHT = ("#0072b2", "#c14a00", "#00795a", "#a8488a", "#7a6a00", "#5b5b5b")
DARK = ("#5ab4ea", "#ff9c5b", "#3fd0a4", "#e59bcb", "#e0cf50", "#bdbdbd")
DASHES = ("none", "7 4", "2 3", "9 3 2 3", "12 4", "4 2")
LETTER = 7.0  # width of a character of the 12 px text, on the safe side
LINE = 20  # height of a line of the legend
SVG = "http://www.w3.org/2000/svg"


class Series(NamedTuple):
    """One line, with a band where its lower and upper ends are numbers."""

    name: str
    x: Array
    y: Array
    low: Array | None = None
    high: Array | None = None


def chart_style() -> str:
    """CSS of all charts."""

    def colors(names: Sequence[str], text: str, grid: str, back: str) -> str:
        lines = "".join(f"--line{i}:{color};" for i, color in enumerate(names))
        return f".chart{{--text:{text};--grid:{grid};--back:{back};{lines}}}"

    series = "".join(
        f".chart .s{i}{{stroke:var(--line{i});stroke-dasharray:{dash}}}.chart .b{i}{{fill:var(--line{i})}}"
        for i, dash in enumerate(DASHES)
    )
    return (
        f"{colors(LIGHT, '#333', '#ddd', '#fff')}"
        f"@media(prefers-color-scheme:dark){{{colors(DARK, '#ddd', '#3a3f46', '#15181c')}}}"
        ".chart text{font:12px system-ui,sans-serif;fill:var(--text)}.chart .grid{stroke:var(--grid)}"
        f".chart .line{{fill:none;stroke-width:2;stroke-linejoin:round}}.chart .band{{opacity:.18}}{series}"
    )


def draw_svg(
    series: Sequence[Series], title: str, x_label: str, y_label: str, *, width: int = 720, height: int = 340,
    standalone: bool = False,
) -> str:  # fmt: skip
    """The chart as an `<svg>` element, or a whole file if `standalone`; its description gives each line's ends."""
    told = "; ".join(f"{line.name} goes from {line.y[0]:.4g} to {line.y[-1]:.4g}" for line in series)
    name = "".join(letter if letter.isalnum() else "-" for letter in title)
    legend = place_legend([line.name for line in series], width) if len(series) > 1 else []
    top = 30 + (legend[-1][1] + LINE if legend else 0)
    first, last = _ends([line.x for line in series])
    x_ticks, y_ticks = ticks(first, last, 4 if width < 500 else 7), ticks(*_heights(series), 5)
    x_ticks = x_ticks[(x_ticks >= first) & (x_ticks <= last)]
    left = 14 + LETTER * max(len(format_number(tick)) for tick in y_ticks)
    box = (left, top, width - 16, top + height - 70)

    def place(x: Array, y: Array) -> str:
        across = box[0] + (x - first) / (last - first or 1.0) * (box[2] - box[0])
        down = box[3] - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (box[3] - box[1])
        return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(across, down, strict=True))

    parts = [
        _text(2, top - 14, f"{title}: {y_label}" if standalone else y_label),
        _text(box[2], box[3] + 36, x_label, "end"),
    ]
    for tick in y_ticks:
        ends = place(np.array([first, last]), np.array([tick, tick]))
        parts += [f'<polyline class="grid" points="{ends}"/>']
        parts += [_text(box[0] - 6, float(ends.split()[0].split(",")[1]) + 4, format_number(tick), "end")]
    for tick in x_ticks:
        at = float(place(np.array([tick]), np.array([y_ticks[0]])).split(",")[0])
        parts.append(_text(at, box[3] + 18, format_number(tick), "middle" if at < box[2] - 12 else "end"))
    parts += _draw_lines(series, place)
    for i, (x, y, label) in enumerate(legend):
        parts.append(f'<line class="line s{i % len(DASHES)}" x1="{x}" y1="{y + 9}" x2="{x + 26}" y2="{y + 9}"/>')
        parts.append(_text(x + 32, y + 13, label))
    total, ids = top + height - 26, f"{name}{width}"
    own = f'<style>{chart_style()}</style><rect fill="var(--back)" width="100%" height="100%"/>' if standalone else ""
    return (
        f'<svg xmlns="{SVG}" class="chart w{width}" viewBox="0 0 {width} {total:.0f}" width="{width}" role="img" '
        f'aria-labelledby="{ids}t {ids}d"><title id="{ids}t">{escape(title)}</title>'
        f'<desc id="{ids}d">{escape(f"{y_label} over {x_label}: {told}.")}</desc>{own}{"".join(parts)}</svg>'
    )


def _draw_lines(series: Sequence[Series], place: Callable[[Array, Array], str]) -> Iterator[str]:
    for i, line in enumerate(series):
        color = i % len(DASHES)
        if line.low is not None and line.high is not None and np.isfinite(line.low).all():
            around = place(np.concatenate([line.x, line.x[::-1]]), np.concatenate([line.high, line.low[::-1]]))
            yield f'<polygon class="band b{color}" points="{around}"/>'
        yield f'<polyline class="line s{color}" points="{place(line.x, line.y)}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def place_legend(names: Sequence[str], width: int) -> list[tuple[float, int, str]]:
    """The position of each name in a legend, as many per line as fit; a name longer than a line is cut."""
    placed: list[tuple[float, int, str]] = []
    x, y, most = 2.0, 0, int((width - 40) / LETTER)
    for name in names:
        shown = name if len(name) <= most else f"{name[: most - 1]}…"
        if placed and x + 32 + LETTER * len(shown) > width:
            x, y = 2.0, y + LINE
        placed.append((x, y, shown))
        x += 32 + LETTER * len(shown) + 16
    return placed


def _ends(arrays: Sequence[Array]) -> tuple[float, float]:
    joined = np.concatenate(arrays)
    return float(joined.min()), float(joined.max())


def _heights(series: Sequence[Series]) -> tuple[float, float]:
    drawn = [part for line in series for part in (line.y, line.low, line.high) if part is not None]
    return _ends([part[np.isfinite(part)] for part in drawn])


def ticks(low: float, high: float, most: int) -> Array:
    """Round numbers that enclose the range: at most about that many steps of 1, 2 or 5 times a power of ten."""
    span = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= most)
    count = max(1, math.ceil(high / step - 1e-9) - math.floor(low / step + 1e-9))
    return np.asarray(step * (math.floor(low / step + 1e-9) + np.arange(count + 1)), dtype=np.float64)


def format_number(value: float) -> str:
    """A short number: 250, 1.5k, 20M, 0.25."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{round(value, 10):.4g}"


def draw_png(series: Sequence[Series], title: str, x_label: str, y_label: str) -> bytes:
    """The same lines and bands as a PNG file, by matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        needs = "a PNG needs the extra 'results' (pip install 'rl-training[results]')"
        raise UserError(f"{needs}; an .svg needs nothing.") from None
    axes = (figure := Figure(figsize=(7.2, 4.0), layout="constrained")).subplots()
    for i, line in enumerate(series):
        color, dash = LIGHT[i % len(LIGHT)], DASHES[i % len(DASHES)]
        style = "-" if dash == "none" else (0, tuple(float(part) / 2 for part in dash.split()))
        axes.plot(line.x, line.y, label=line.name, color=color, linestyle=style)
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.18, linewidth=0)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    if len(series) > 1:
        axes.legend()
    figure.savefig(buffer := io.BytesIO(), dpi=150)
    return buffer.getvalue()
