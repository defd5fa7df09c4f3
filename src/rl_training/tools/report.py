"""A report on runs, as one HTML file that loads nothing and runs no script, its charts, and a policy's model card.

Charts are drawn by matplotlib, readable on light and on dark pages. The templates are `assets/report.html`, which
escapes everything from the files of runs, and `assets/card.md`.
"""

from __future__ import annotations

import io
import re
import shlex
import warnings
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from html import escape
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rl_training.config.spec import get_algorithm_spec
from rl_training.config.train_config import TrainConfig, dump_yaml
from rl_training.errors import UserError, counted, first_line, printable
from rl_training.record.logger import format_duration
from rl_training.record.metrics_file import is_number
from rl_training.tools import compare
from rl_training.tools.records import EVALUATED, TRAINED, Groups, RunRecord, Series, as_mapping, select_runs

if TYPE_CHECKING:
    from rl_training.tools.export import Export

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
MOST_EPISODES = 4
MOST_ACROSS = 3  # charts next to each other
VERSIONS = ("rl_training", "python", "torch", "gymnasium", "numpy", "platform")
OWN_TO_A_RUN = ("algo", "env_id", "seed", "output_dir", "name")
Episode = tuple[str, str]  # a sentence, and a GIF in base64 or nothing
Rows = list[Sequence[Any]]


@contextmanager
def own_style(settings: Any = None) -> Iterator[None]:
    """Draw with our style, these settings and matplotlib's defaults: a stranger's folder may hold a `matplotlibrc`."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE | (settings or {}))
        yield


class Panel(NamedTuple):
    """One chart of a figure."""

    title: str
    series: Sequence[Series]
    y_label: str


def draw_chart(
    series: Sequence[Series], title: str, x_label: str, y_label: str, *, kind: str, size: tuple[float, float] = WIDE
) -> bytes:
    """The chart as a file of that kind: svg, png or pdf. The same lines give the same SVG."""
    return draw_panels([Panel(title, series, y_label)], x_label, kind=kind, size=size)


def draw_panels(
    panels: Sequence[Panel], x_label: str, *, kind: str, size: tuple[float, float] = WIDE, told: str = ""
) -> bytes:
    """Charts next to each other as one file, each of that size; a name has the same color everywhere.

    `told` stands above the names: what lines and bands are.
    """
    from matplotlib.figure import Figure

    across = min(MOST_ACROSS, len(panels))
    down, width = -(-len(panels) // across), size[0] * across
    known = list(dict.fromkeys(one.name for panel in panels for one in panel.series))
    most = int(width / LETTER) - 8  # letters of a name
    names = [name if len(name) <= most else f"{name[: most - 1]}…" for name in map(printable, known)]
    columns = max(1, int(width / LETTER / (8 + max(map(len, names), default=0))))
    rows = -(-len(names) // columns) if len(names) > 1 else 0
    height = size[1] * down + ROW * (rows + bool(told))
    with own_style({"svg.hashsalt": f"{panels[0]}, {size}"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that matplotlib's font lacks; a browser has other fonts
        figure = Figure(figsize=(width, height), layout="constrained")
        lines: dict[str, Any] = {}
        for panel, axes in zip(panels, figure.subplots(down, across, squeeze=False).flat, strict=False):
            for one in panel.series:
                i = known.index(one.name)
                color, dash = COLORS[i % len(COLORS)], DASHES[(i + i // len(COLORS)) % len(DASHES)]
                (lines[one.name],) = axes.plot(one.x, one.y, color=color, linestyle=dash)
                if one.low is not None and one.high is not None:
                    axes.fill_between(one.x, one.low, one.high, color=color, alpha=0.18, linewidth=0)
            axes.set(title=printable(panel.title), xlabel=x_label, ylabel=panel.y_label)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(lambda value, _: format_number(value))
        for axes in figure.axes[len(panels) :]:
            axes.remove()
        if rows or told:
            shown = [lines[name] for name in known] if rows else []
            place: Any = {"loc": "outside lower left", "alignment": "left", "title_fontsize": 9}
            figure.legend(shown, names if rows else [], title=told or None, ncols=columns, **place)
        undated: Any = {"Date": None, "Creator": None} if kind == "svg" else None
        figure.savefig(file := io.BytesIO(), format=kind, dpi=150, transparent=kind == "svg", metadata=undated)
    return file.getvalue()


def draw_svg(
    series: Sequence[Series], title: str, x_label: str, y_label: str, *, size: tuple[float, float] = WIDE
) -> str:
    """The chart as an `<svg>` element in the colors of a light or dark page; its description gives each line's ends."""
    return panels_as_svg([Panel(title, series, y_label)], x_label, size=size)


def panels_as_svg(panels: Sequence[Panel], x_label: str, *, size: tuple[float, float] = WIDE, told: str = "") -> str:
    """Charts as an `<svg>` element, as `draw_svg` does for one."""
    text = draw_panels(panels, x_label, kind="svg", size=size, told=told).decode()
    about = []
    for title, series, y_label in panels:
        ends = "; ".join(f"{line.name} goes from {line.y[0]:.4g} to {line.y[-1]:.4g}" for line in series)
        about.append(f"{y_label} over {x_label}: {ends}." if len(panels) == 1 else f"{title}: {y_label}: {ends}.")
    title = panels[0].title if len(panels) == 1 else f"Learning curves on {len(panels)} environments"
    described = f"<title>{escape(title)}</title><desc>{escape(' '.join([*about, told]).strip())}</desc>"
    head, _, body = text[text.index("<svg") :].partition(">")
    body = re.sub('<g id="[^"]*"', "<g", body)  # a page has several charts, whose groups have the same names
    return f'{head} role="img">{described}{THEME}{body}'.replace(INK, "currentColor")


def format_number(value: float) -> str:
    """A short number: 250, 1.5k, 20M, 0.25."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{round(value, 10):.4g}"


def build_report(groups: Groups, episodes: Sequence[Episode] = (), *, shared_steps: bool = False) -> str:
    """The page; `shared_steps` is for `select_runs`."""
    runs = [run for group in groups.values() for run in group]
    envs = list(dict.fromkeys(run.env_id for run in runs))
    named = [
        (f"{name}, {f'{run.env_id}, ' if len(envs) > 1 else ''}seed {run.config.get('seed', '-')}", run)
        for name, group in groups.items()
        for run in group
    ]
    seconds = format_duration(sum(wall_seconds(run) for run in runs))
    return render(
        "report.html",
        title=f"{', '.join(groups)} on {', '.join(envs)}",
        amount=f"{counted(len(runs), 'run')}, {sum(run.last_step for run in runs):,} steps, {seconds}",
        environments=[describe_environment(env, groups, shared_steps) for env in envs],
        describe_estimate=compare.describe_estimate,
        metric_name=compare.metric_name,
        runs=describe_runs(named),
        settings=[describe_settings(name, group) for name, group in groups.items()],
        warnings=describe_warnings(runs),
        episodes=episodes,
        versions=describe_versions(runs),
        commands=list(dict.fromkeys(typed for run in runs for start in starts(run) if (typed := typed_command(start)))),
        configs=[shlex.quote(str(run.folder / "config.yaml")) for run in runs],
    )


def render(template: str, **facts: Any) -> str:
    """The template in `assets` with these facts; in HTML they are escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    pages = Environment(
        loader=PackageLoader("rl_training", "assets"), autoescape=select_autoescape(), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return pages.get_template(template).render(facts)


def render_card(
    export: Export, config: TrainConfig, scores: dict[str, Any], interval: tuple[float, float], again: str
) -> str:
    """The model card of a policy; `scores` are an evaluation's metrics and `interval` that of its mean return.

    `again` is the command that trains it again from its config in the file `config.yaml`.
    """
    facts, yaml = export.facts, dump_yaml(config.model_dump(mode="json")).rstrip()
    return render(
        "card.md", facts=facts, parity=facts["parity"], file=export.path.name, config=config, scores=scores,
        interval=interval, yaml=yaml, again=again,
    )  # fmt: skip


def describe_environment(env: str, groups: Groups, shared_steps: bool) -> dict[str, Any]:
    """Learning curves, scores and verdicts of the runs on one environment, or why they cannot be compared."""
    own = {name: [run for run in group if run.env_id == env] for name, group in groups.items()}
    own = {name: group for name, group in own.items() if group}
    selected, _ = select_runs(own, shared_steps=shared_steps)
    metric, lines, _ = compare.learning_curves(selected)  # the comparison has the notes
    measure = compare.metric_name(metric)
    facts = {
        "name": env, "measure": measure, "several": any(len(group) > 1 for group in selected.values()),
        "missing": [name for name in selected if name not in {line.name for line in lines}],
        "curves": draw_twice(lines, f"Learning curves on {env}", "steps", measure) if lines else [],
    }  # fmt: skip
    try:
        result = compare.compare_groups(own, shared_steps=shared_steps)
    except UserError as error:
        return facts | {"result": None, "problem": str(error)}
    lines = [Series(g.name, result.thresholds, *g.profile) for g in sorted(result.groups, key=lambda g: g.name)]
    labels = f"Performance profiles on {env}", "final return", "share of runs above"
    has_profiles = result.pairs and result.thresholds[0] < result.thresholds[-1]
    tables = {"groups": compare.describe_groups(result), "pairs": compare.describe_pairs(result)}
    return facts | tables | {"result": result, "profiles": draw_twice(lines, *labels) if has_profiles else []}


def draw_twice(lines: Sequence[Series], *labels: str) -> list[str]:
    """A chart for wide and for narrow screens; a screen shows one."""
    return [draw_svg(lines, *labels, size=size) for size in (WIDE, NARROW)]


def plot_curves(groups: Groups, kind: str, *, shared_steps: bool = False) -> tuple[bytes, list[str]]:
    """The learning curves of runs as an svg, png or pdf file, a chart per environment, and notes on what is drawn."""
    panels, told, counts = list[Panel](), list[str](), set[int]()
    for task in compare.by_task(groups):
        env = next(iter(task.values()))[0].env_id
        selected, notes = select_runs(task, shared_steps=shared_steps)
        metric, lines, more = compare.learning_curves(selected)
        elsewhere = compare.measured_elsewhere(selected)
        if lines:
            counts |= {len(selected[line.name]) for line in lines}
            panels.append(Panel(f"Learning curves on {env}", lines, compare.metric_name(metric)))
        else:
            more = ["too few evaluations and finished training episodes to draw a curve."]
        told += [f"{env}: {note}" if lines == [] else note for note in (*notes, *more, *elsewhere)]
    if not panels:
        raise UserError("the runs have too few evaluations and finished training episodes to draw a curve.")
    if len(panels) > 1:
        panels = [panel._replace(title=panel.title.removeprefix("Learning curves on ")) for panel in panels]
    size, what = WIDE if len(panels) == 1 else NARROW, describe_lines(counts)
    draw = panels_as_svg if kind == "svg" else partial(draw_panels, kind=kind)
    drawn: Any = draw(panels, "steps", size=size, told=what)
    return drawn if isinstance(drawn, bytes) else drawn.encode(), list(dict.fromkeys(told))


def describe_lines(counts: set[int]) -> str:
    """What lines and bands are, for groups with these numbers of runs."""
    if counts == {1}:
        return "Line: one run."
    runs = " to ".join(str(n) for n in dict.fromkeys((min(counts), max(counts))))
    return f"Line: interquartile mean of {runs} runs. Band: {compare.LEVEL:.0%} bootstrap interval."


def last_row(run: RunRecord, metric: str) -> dict[str, Any]:
    """The last row with a number for this metric; empty if there is none."""
    return next((row for row in reversed(run.rows) if is_number(row.get(metric))), {})


def wall_seconds(run: RunRecord) -> float:
    """Seconds from the run's start to its last row."""
    return max((float(row["time"]) for row in run.rows if is_number(row.get("time"))), default=0.0)


def starts(run: RunRecord) -> list[dict[str, Any]]:
    """The manifests of a run's starts, oldest first."""
    earlier = run.manifest.get("earlier")
    told = [*earlier, run.manifest] if isinstance(earlier, list) else [run.manifest]
    return [start for start in told if isinstance(start, dict)]


def describe_runs(named: Sequence[tuple[str, RunRecord]]) -> tuple[Sequence[str], Rows]:
    """Head and rows of the table of runs: returns, steps and time; `bench` shows more of the time."""
    rows: Rows = []
    for name, run in named:
        (steps, values), trained, training = run.curve(EVALUATED), run.curve(TRAINED)[1], training_seconds(run)
        last, speed = last_row(run, EVALUATED), last_row(run, "steps_per_second")
        spread = f" ± {last['eval_return_std']:.4g}" if is_number(last.get("eval_return_std")) else ""
        waiting = speed.get("learner_waiting")
        waits = f" ({waiting:.0%} waiting for workers)" if is_number(waiting) else ""
        rows.append((
            name, f"{values[-1]:.4g}{spread}" if len(values) else "-", last.get("eval_episodes", "-"),
            f"{values.max():.4g} at {steps[values.argmax()]:,.0f}" if len(values) else "-",
            f"{trained[-1]:.4g}" if len(trained) else "-", f"{run.last_step:,}{run.unspent}",
            f"{wall_seconds(run):.1f} s", "-" if training is None else f"{training:.1f} s{waits}",
            f"{speed['steps_per_second']:,.0f}" if speed else "-",
        ))  # fmt: skip
    head = ["run", "last evaluation", "episodes", "best evaluation", "in training", "steps", "time"]
    return [*head, "of it training", "steps/s"], rows


def describe_settings(name: str, group: Sequence[RunRecord]) -> tuple[str, Rows, str]:
    """The name of a group, its settings that differ from its algorithm's defaults, and why they are not known."""
    try:
        defaults = default_settings(group[0].algo)
    except UserError as error:  # an algorithm of a plugin that is not installed here
        return name, [], str(error)
    rows: Rows = []
    for setting in dict.fromkeys(key for run in group for key in run.settings if key not in OWN_TO_A_RUN):
        values = dict.fromkeys(compare.describe_value(run.settings.get(setting)) for run in group)
        default = defaults.get(setting, "-")
        if list(values) != [default] and default != "auto":  # a resolved `auto` is not the user's choice
            rows.append((setting, " / ".join(values), default))
    return name, rows, ""


def default_settings(algo: str) -> dict[str, str]:
    """The settings that `train --algo` would use, as `describe_value` writes them."""
    spec = get_algorithm_spec(algo)
    models: tuple[Any, ...] = TrainConfig, spec.params
    dumps = [model.model_construct().model_dump(mode="json") for model in models]  # without fields that have no default
    return {name: compare.describe_value(value) for name, value in {**dumps[0], **dumps[1], **spec.defaults}.items()}


def training_seconds(run: RunRecord) -> float | None:
    """Seconds of training without evaluations and checkpoints; unknown for a resumed run."""
    last = last_row(run, "steps_per_second")
    if len(starts(run)) != 1 or not last or last["steps_per_second"] <= 0:
        return None
    return min(last["step"] / last["steps_per_second"], wall_seconds(run))


def describe_warnings(runs: Sequence[RunRecord]) -> list[str]:
    """The messages of the runs when they started, and the problems that their rows show."""
    found: dict[str, list[str]] = {}
    for run in runs:
        lists = [start.get("messages") for start in starts(run)]
        told = [message for messages in lists if isinstance(messages, list) for message in messages[1:]]
        numbers = ((key, value) for row in run.rows for key, value in row.items() if isinstance(value, float))
        told += [f"{key} was not finite in some row" for key in sorted({k for k, v in numbers if not np.isfinite(v)})]
        if run.status != "done":
            told.append(f"{run.status} at step {run.last_step:,}{run.unspent}")
        for message in told:
            found.setdefault(str(message).removeprefix("warning: "), []).append(run.folder.name)
    more = {text: f" and {len(names) - 1} more" if len(names) > 1 else "" for text, names in found.items()}
    return [f"{text} ({names[0]}{more[text]})" for text, names in found.items()]


def describe_versions(runs: Sequence[RunRecord]) -> Rows:
    """The versions that runs were made with."""
    made = [{name: run.manifest.get(name, "-") for name in VERSIONS} for run in runs]
    for run, versions in zip(runs, made, strict=True):
        git = as_mapping(run.manifest.get("git"))
        versions["git"] = f"{git.get('commit', '-')}{'' if git.get('clean', True) else ', with uncommitted changes'}"
    return [(name, " / ".join(dict.fromkeys(str(one[name]) for one in made))) for name in (*VERSIONS, "git")]


def typed_command(start: dict[str, Any]) -> str:
    """The command in a manifest; empty if there is none."""
    words = start.get("command")
    if not isinstance(words, list) or not words:
        return ""
    program, *rest = map(str, words)
    known = Path(program).name in ("rl-training", "__main__.py")
    return shlex.join(["rl-training", *rest] if known else ["python", program, *rest])


def show_episodes(groups: Groups, env: Any = None) -> list[Episode]:
    """An episode of each group on each environment, for the first few of these pairs."""
    pairs: dict[str, list[RunRecord]] = {}
    for name, run in ((name, run) for name, group in groups.items() for run in group):
        pairs.setdefault(f"{name} on {run.env_id}", []).append(run)
    return [show_episode(name, runs, env) for name, runs in islice(pairs.items(), MOST_EPISODES)]


def show_episode(name: str, runs: Sequence[RunRecord], env: Any = None) -> Episode:
    """An animated episode of the best run of a group, or a sentence that says why there is none."""
    run = max(runs, key=lambda run: run.curve(EVALUATED)[1].max(initial=-np.inf))
    found = [run.folder / "checkpoints" / file for file in ("best.ckpt", "latest.ckpt")]
    checkpoint = next((path for path in found if path.is_file()), None)
    if checkpoint is None:
        return f"{name}: no episode, because {run.folder} has no checkpoint.", ""
    from rl_training.run.film import film_checkpoint  # torch

    try:
        film = film_checkpoint(checkpoint, env)
    except Exception as error:  # whatever an environment or its renderer raises, the report is written
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        return f"{name}: no episode, because {kind}{first_line(error)}.", ""
    return f"{name}: {film.told}, by {checkpoint.name} of {run.folder.name}", b64encode(film.gif).decode()
