"""Charts by matplotlib: lines with bands, each with its color and dash, readable on light and on dark pages."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any, NamedTuple

from rl_training.errors import printable
from rl_training.tools.statistics import Array

WIDE, NARROW = (7.5, 3.6), (3.7, 3.0)  # inches of a chart for a screen and for a phone
LETTER, ROW = 0.085, 0.2  # inches of a letter and of a line of the legend
COLORS = ("#0072b2", "#d55e00", "#009e73", "#c05c95", "#8c7a00", "#7f7f7f")  # contrast 3 on white and on the dark page
DASHES = ("-", (0, (3.5, 2)), (0, (1, 1.5)), (0, (4.5, 1.5, 1, 1.5)), (0, (6, 2)), (0, (2, 1)))
INK = "#1c1e22"  # of text and axes; a color that is nowhere else, so that an SVG can take that of its page instead
STYLE: Any = {
    "svg.fonttype": "none", "text.parse_math": False, "font.size": 10, "legend.frameon": False, "axes.titlesize": 11,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": INK, "grid.alpha": 0.12,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}  # fmt: skip
THEME = (
    "<style>svg{color:#1c1e21;background:#fff}"
    "@media(prefers-color-scheme:dark){svg{color:#e4e6e9;background:#15181c}}</style>"
)


class Series(NamedTuple):
    """One line, with a band where its lower and upper ends are numbers."""

    name: str
    x: Array
    y: Array
    low: Array | None = None
    high: Array | None = None


@contextmanager
def own_style(settings: Any = None) -> Iterator[None]:
    """Draw with our style, these settings and matplotlib's defaults: a stranger's folder may hold a `matplotlibrc`."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE | (settings or {}))
        yield


def draw_chart(
    series: Sequence[Series], title: str, x_label: str, y_label: str, *, kind: str, size: tuple[float, float] = WIDE
) -> bytes:
    """The chart as a file of that kind: svg, png or pdf. The same lines give the same SVG."""
    from matplotlib.figure import Figure

    most = int(size[0] / LETTER) - 8  # letters of a name
    names = [name if len(name) <= most else f"{name[: most - 1]}…" for name in (printable(s.name) for s in series)]
    columns = max(1, int(size[0] / LETTER / (8 + max(map(len, names), default=0))))
    rows = -(-len(names) // columns) if len(names) > 1 else 0
    with own_style({"svg.hashsalt": f"{title}, {y_label}, {size}"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that matplotlib's font lacks; a browser has other fonts
        figure = Figure(figsize=(size[0], size[1] + ROW * rows), layout="constrained")
        axes = figure.subplots()
        lines = []
        for i, one in enumerate(series):
            color, dash = COLORS[i % len(COLORS)], DASHES[(i + i // len(COLORS)) % len(DASHES)]
            lines += axes.plot(one.x, one.y, color=color, linestyle=dash)
            if one.low is not None and one.high is not None:
                axes.fill_between(one.x, one.low, one.high, color=color, alpha=0.18, linewidth=0)
        axes.set(title=printable(title), xlabel=x_label, ylabel=y_label)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: format_number(value))
        if rows:
            figure.legend(lines, names, loc="outside lower left", ncols=columns)
        undated: Any = {"Date": None, "Creator": None} if kind == "svg" else None
        figure.savefig(file := io.BytesIO(), format=kind, dpi=150, transparent=kind == "svg", metadata=undated)
    return file.getvalue()


def draw_svg(
    series: Sequence[Series], title: str, x_label: str, y_label: str, *, size: tuple[float, float] = WIDE
) -> str:
    """The chart as an `<svg>` element in the colors of a light or dark page; its description gives each line's ends."""
    text = draw_chart(series, title, x_label, y_label, kind="svg", size=size).decode()
    told = "; ".join(f"{line.name} goes from {line.y[0]:.4g} to {line.y[-1]:.4g}" for line in series)
    about = f"<title>{escape(title)}</title><desc>{escape(f'{y_label} over {x_label}: {told}.')}</desc>"
    head, _, body = text[text.index("<svg") :].partition(">")
    body = re.sub('<g id="[^"]*"', "<g", body)  # a page has several charts, whose groups have the same names
    return f'{head} role="img">{about}{THEME}{body}'.replace(INK, "currentColor")


def format_number(value: float) -> str:
    """A short number: 250, 1.5k, 20M, 0.25."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{round(value, 10):.4g}"
