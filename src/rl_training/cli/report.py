"""`rl-training compare`, `report` and `plot`: compare and show finished runs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_training.cli.options import ImportOption, OwnEnvOption, Text, Texts, name_environment, option
from rl_training.cli.screen import make_console, quote
from rl_training.errors import UserError
from rl_training.safe_files import output_written, replacing

if TYPE_CHECKING:
    from rl_training.tools.compare import Comparison

RunsArgument = Annotated[list[str], typer.Argument(metavar="RUN...", help="Folders of runs, or of several runs.")]
ByOption = Annotated[
    Text, option("Group by algo or by a setting; default: by what differs.", "--by", metavar="NAME")
]
SharedOption = Annotated[
    bool, option("Use all runs, unfinished ones too, up to the step that all reached.", "--shared-steps")
]
SHOWN_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the shared steps, and of the range of returns


def compare(
    runs: RunsArgument,
    by: ByOption = None,
    threshold: Annotated[Text, option("Count the steps to this return.", "--threshold", metavar="X")] = None,
    references: Annotated[
        Texts, option("Returns of an environment that score 0 and 1.", "--reference", metavar="ENV=LOW,HIGH")
    ] = None,
    shared_steps: SharedOption = False,
    training: Annotated[bool, option("Compare returns of training episodes.", "--training")] = False,
) -> None:
    """Compare runs by algorithm or setting: interquartile means, intervals, and whether there is a difference."""
    bar = None if threshold is None else read_number("--threshold", threshold)
    scale = dict(read_reference(text) for text in references or ())
    from rl_training.tools.compare import compare_groups, group_runs
    from rl_training.tools.records import find_runs

    groups = group_runs(find_runs(runs), by)
    result = compare_groups(groups, scale, bar, shared_steps=shared_steps, trained=training)
    print_comparison(make_console(), result, bar)


def report(
    runs: RunsArgument,
    output: Annotated[str, option("The file to write.", "--output", metavar="F.html")] = "report.html",
    by: ByOption = None,
    shared_steps: SharedOption = False,
    no_episode: Annotated[bool, option("Leave out the episode; no environment is made.", "--no-episode")] = False,
    env: OwnEnvOption = None,
    modules: ImportOption = None,
) -> None:
    """Write one HTML file about runs: curves, scores, settings, time, warnings, an episode, commands."""
    named = name_environment(env, modules)
    from rl_training.tools.compare import group_runs
    from rl_training.tools.records import find_runs
    from rl_training.tools.report import build_report, show_episodes

    groups = group_runs(find_runs(runs), by)
    page = partial(build_report, groups, shared_steps=shared_steps)
    write_output(output, page())  # a renderer that crashes must not end this process
    if not no_episode:
        write_output(output, page(show_episodes(groups, named)))
    make_console().print(f"report: {quote(Path(output))}", soft_wrap=True)


def plot(
    runs: RunsArgument,
    output: Annotated[str, option("The file to write, .svg or .png.", "--output", metavar="F")] = "curves.svg",
    by: ByOption = None,
    shared_steps: SharedOption = False,
) -> None:
    """Draw learning curves with intervals over seeds."""
    if Path(output).suffix not in (".svg", ".png"):
        raise UserError(f"--output is {output!r}; it must end in .svg or .png.")
    from rl_training.tools.compare import group_runs
    from rl_training.tools.records import find_runs
    from rl_training.tools.report import plot_curves

    drawn, notes = plot_curves(group_runs(find_runs(runs), by), Path(output).suffix, shared_steps=shared_steps)
    write_output(output, drawn)
    print_notes(console := make_console(), notes)
    console.print(f"plot: {quote(Path(output))}", soft_wrap=True)


def write_output(target: str, content: str | bytes) -> None:
    """Write the file; a UserError says why it cannot be written."""
    with output_written(target, "--output"), replacing(target) as file:
        file.write(content if isinstance(content, bytes) else content.encode())


def read_number(name: str, text: str) -> float:
    """The finite number in an option's text."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{name} is {text!r}; it must be a number.")
    return number


def read_reference(text: str) -> tuple[str, tuple[float, float]]:
    """`ENV=LOW,HIGH` as the environment and its two returns."""
    env, _, pair = text.rpartition("=")
    ends = [read_number("--reference", end) for end in pair.split(",")] if env else []
    if len(ends) != 2 or ends[0] == ends[1]:
        raise UserError(f"--reference is {text!r}; it must be ENV=LOW,HIGH with two different returns.")
    return env, (ends[0], ends[1])


def print_comparison(console: Console, result: Comparison, threshold: float | None) -> None:
    """Print groups, pairs of groups, returns over steps, profiles, and notes."""
    from rl_training.tools.compare import describe_groups, describe_pairs, metric_name

    envs = escape(", ".join(result.envs))
    console.print(f"[bold]{envs}[/bold]: {metric_name(result.scored_by)} at the end, best first")
    print_table(console, *describe_groups(result, threshold))
    if result.pairs:
        print_table(console, *describe_pairs(result))
    if result.steps is not None:
        at = [round(share * (len(result.steps) - 1)) for share in SHOWN_SHARES]
        head = [f"{x:,.0f} steps" if result.steps[-1] > 1 else f"{x:.0%} of steps" for x in result.steps[at]]
        rows = [[g.name, *(f"{g.curve.value[i]:.4g}" for i in at)] for g in result.groups if g.curve is not None]
        print_table(console, [f"IQM of {metric_name(result.curve_of)}", *head], rows)
    if len(result.groups) > 1 and result.thresholds[0] < result.thresholds[-1]:
        at = [round(share * (len(result.thresholds) - 1)) for share in SHOWN_SHARES[:-1]]
        rows = [[g.name, *(f"{g.profile.value[i]:.0%}" for i in at)] for g in result.groups]
        print_table(console, ["share of runs above", *(f"{result.thresholds[i]:.4g}" for i in at)], rows)
    print_notes(console, result.notes)


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """One line for each note."""
    for note in notes:
        console.print(f"note: {escape(note)}", style="yellow", soft_wrap=True)


def print_table(console: Console, head: list[str], rows: list[list[Any]]) -> None:
    """A table with names in the first column."""
    table = Table(box=SIMPLE_HEAD, header_style="bold")
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    console.print(table)
