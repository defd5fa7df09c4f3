"""`rl-training runs`, `compare`, `report` and `plot`: list, compare and show runs."""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text as Styled

from rl_training.cli.options import ImportOption, OwnEnvOption, Text, Texts, name_environment, option
from rl_training.cli.screen import PIPE_WIDTH, make_console, print_table, quote
from rl_training.errors import UserError, did_you_mean, printable
from rl_training.record.json_lines import plain
from rl_training.safe_files import output_written, replacing

if TYPE_CHECKING:
    from rl_training.tools.compare import Comparison

RunsArgument = Annotated[
    list[str], typer.Argument(metavar="RUN...", help="Folders of runs, or of several; tables of curves (FILE.csv).")
]
ByOption = Annotated[Text, option("Group by algo or by a setting; default: by what differs.", "--by", metavar="NAME")]
SharedOption = Annotated[
    bool, option("Use all runs, unfinished ones too, up to the step that all reached.", "--shared-steps")
]
RUNS = "runs"  # where runs are, unless another folder is named
RUN_COLUMNS = ("run", "state", "algorithm", "environment", "steps", "last", "best", "age")
COLORS = {"running": "cyan", "done": "green", "stopped": "yellow", "failed": "red"}
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
SHOWN_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the shared steps, and of the range of returns


def list_runs(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of runs.")] = RUNS,
    as_json: Annotated[bool, option("Print a JSON list for programs.", "--json")] = False,
) -> None:
    """List runs: state, algorithm, environment, steps, last and best return, age of the newest row."""
    found, damaged = summarize_runs(Path(folder))
    if as_json and (Path(folder).is_dir() or folder == RUNS):  # before the first run, a program asks again
        problems = [{"problem": printable(text)} for text in damaged]
        typer.echo(json.dumps([*map(plain, found), *problems], indent=1))
        return
    rows = [format_run(one) for one in found]
    if not rows and not damaged:
        raise UserError(f"{folder} contains no runs; give another folder, or train: rl-training train ppo/cartpole.")
    console = make_console()
    if rows:
        print_table(console, RUN_COLUMNS, rows, words=range(4))
    print_notes(console, damaged)


def summarize_runs(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The facts of each run in a folder, the newest first, and a sentence about each run that cannot be read."""
    from rl_training.run.folder import find_run_folders

    found, damaged = list[dict[str, Any]](), []
    for run in find_run_folders(folder, "manifest.json"):
        name, metrics = run.name if run == folder else str(run.relative_to(folder)), run / "metrics.jsonl"
        try:
            changed = (metrics if metrics.is_file() else run).stat().st_mtime
            found.append({"run": name, "folder": str(run), **summarize_run(run), "changed": changed})
        except (UserError, OSError) as error:
            damaged.append(f"{name} cannot be read: {error}")
    return sorted(found, key=lambda one: -one["changed"]), damaged


def summarize_run(folder: Path) -> dict[str, Any]:
    """State, algorithm, environment, steps, last and best return; a UserError names a value that no run would have."""
    from rl_training.tools.records import EVALUATED, TRAINED, check_number, read_run

    run = read_run(folder)
    newest = run.rows[-1] if run.rows else {"step": 0}
    steps = int(check_number(newest, "step"))
    budget = check_number(run.config, "total_timesteps", "config.yaml")
    budget = int(budget) if budget.is_integer() else budget
    returns = [check_number(row, EVALUATED) for row in run.rows if EVALUATED in row]
    trained = check_number(newest, TRAINED) if TRAINED in newest else None
    return {
        "state": run.status, "algorithm": run.algo, "environment": run.env_id, "seed": run.config.get("seed"),
        "step": steps, "total_timesteps": budget, "last_return": returns[-1] if returns else trained,
        "best_return": max(filter(math.isfinite, returns), default=None),
    }  # fmt: skip


def format_run(facts: dict[str, Any]) -> list[Any]:
    """The row of a run in the table."""
    steps, budget = facts["step"], facts["total_timesteps"]
    share = "" if steps >= budget else f" ({steps / budget:.0%})"
    shown = ["-" if facts[name] is None else f"{facts[name]:.1f}" for name in ("last_return", "best_return")]
    state = Styled(facts["state"], COLORS[facts["state"]])
    about = [facts["run"], state, facts["algorithm"], facts["environment"], f"{steps:,}{share}"]
    return [*about, *shown, format_age(facts["changed"])]


def format_age(changed: float) -> str:
    """The time since then, such as 5 min."""
    seconds = max(0.0, time.time() - changed)
    size, unit = next((one for one in UNITS if seconds >= one[0]), UNITS[-1])
    return f"{seconds // size:.0f} {unit}"


def compare(
    runs: RunsArgument,
    by: ByOption = None,
    threshold: Annotated[Text, option("Count the steps to this return.", "--threshold", metavar="X")] = None,
    references: Annotated[
        Texts, option("Returns of an environment that score 0 and 1.", "--reference", metavar="ENV=LOW,HIGH")
    ] = None,
    shared_steps: SharedOption = False,
    training: Annotated[bool, option("Compare returns of training episodes.", "--training")] = False,
    kind: Annotated[
        Text, option("table, csv, json, latex or markdown; default: as --output ends.", "--format", metavar="NAME")
    ] = None,
    output: Annotated[Text, option("The file to write; default: the screen.", "--output", metavar="F")] = None,
) -> None:
    """Compare runs by algorithm or setting: interquartile means, intervals, and whether there is a difference.

    Each environment by itself, or all as one score with --reference. FILE.csv, or FILE.csv:sac,td3 for some of its
    algorithms, puts published curves next to yours.
    """
    bar = None if threshold is None else read_number("--threshold", threshold)
    scale = dict(read_reference(text) for text in references or ())
    from rl_training.tools.compare import by_task, compare_groups, read_groups
    from rl_training.tools.tables import write_table

    wanted = choose_format(kind, output)
    groups = read_groups(runs, by)
    tasks = [groups] if scale else by_task(groups)
    results = [compare_groups(task, scale, bar, shared_steps=shared_steps, trained=training) for task in tasks]
    if wanted == "table":
        console = make_console() if output is None else Console(file=io.StringIO(), width=PIPE_WIDTH)
        for result in results:
            console.print(end="" if result is results[0] else "\n")
            print_comparison(console, result, bar)
        text = "" if output is None else console.file.getvalue()  # type: ignore[attr-defined]
    else:
        text = printable(write_table(results, wanted, bar))
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_output(output, text.encode())
        make_console().print(f"{wanted}: {quote(Path(output))}", soft_wrap=True)


def choose_format(kind: str | None, output: str | None) -> str:
    """The format that was given, or else the one that the file's name says; the two must agree."""
    from rl_training.tools.tables import KINDS

    if kind is not None and kind not in (known := ("table", *KINDS)):
        raise UserError(f"--format is {kind!r}; {did_you_mean(kind, known)}")
    end = "" if output is None else Path(output).suffix
    said = {"": kind or "table", ".txt": "table", **{suffix: name for name, suffix in KINDS.items()}}.get(end)
    if said is None and kind is None:
        every = ", ".join(KINDS.values())
        raise UserError(f"--output is {output!r}; it must end in {every} or .txt (the tables of the screen).")
    if None not in (said, kind) and said != kind:
        raise UserError(f"--format is {kind}, but --output {output} is the name of a {said} file; leave one out.")
    return kind or str(said)


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
    from rl_training.tools.compare import read_groups
    from rl_training.tools.report import build_report, show_episodes

    groups = read_groups(runs, by)
    if tables := [run.folder for group in groups.values() for run in group if run.measured_on]:
        raise UserError(f"a report is about runs, and {tables[0]} is a table; give it to compare or plot.")
    page = partial(build_report, groups, shared_steps=shared_steps)
    write_output(output, page().encode())  # first, because a renderer may crash this process
    if not no_episode:
        write_output(output, page(show_episodes(groups, named)).encode())
    make_console().print(f"report: {quote(Path(output))}", soft_wrap=True)


def plot(
    runs: RunsArgument,
    output: Annotated[str, option("The file to write: .svg, .png or .pdf.", "--output", metavar="F")] = "curves.svg",
    by: ByOption = None,
    shared_steps: SharedOption = False,
) -> None:
    """Draw learning curves with intervals over seeds, a chart per environment."""
    kind = Path(output).suffix.removeprefix(".")
    if kind not in ("svg", "png", "pdf"):
        raise UserError(f"--output is {output!r}; it must end in .svg, .png or .pdf.")
    from rl_training.tools.compare import read_groups
    from rl_training.tools.report import plot_curves

    drawn, notes = plot_curves(read_groups(runs, by), kind, shared_steps=shared_steps)
    write_output(output, drawn)
    print_notes(console := make_console(), notes)
    console.print(f"plot: {quote(Path(output))}", soft_wrap=True)


def write_output(target: str, content: bytes) -> None:
    """Write the file; a UserError says why it cannot be written."""
    with output_written(target, "--output"), replacing(target) as file:
        file.write(content)


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
    from rl_training.tools.compare import describe_groups, describe_pairs, format_score, metric_name

    envs = escape(", ".join(result.envs))
    console.print(f"[bold]{envs}[/bold]: {metric_name(result.scored_by)} at the end, best first")
    print_table(console, *describe_groups(result, threshold))
    if result.pairs:
        print_table(console, *describe_pairs(result))
    if result.steps is not None:
        at = [round(share * (len(result.steps) - 1)) for share in SHOWN_SHARES]
        head = [f"{x:,.0f} steps" if result.steps[-1] > 1 else f"{x:.0%} of steps" for x in result.steps[at]]
        rows = [[g.name, *(format_score(g.curve.value[i]) for i in at)] for g in result.groups if g.curve is not None]
        print_table(console, [f"IQM of {metric_name(result.curve_of)}", *head], rows)
    if len(result.groups) > 1 and result.thresholds[0] < result.thresholds[-1]:
        at = [round(share * (len(result.thresholds) - 1)) for share in SHOWN_SHARES[:-1]]
        rows = [[g.name, *(f"{g.profile.value[i]:.0%}" for i in at)] for g in result.groups]
        print_table(console, ["share of runs above", *(format_score(result.thresholds[i]) for i in at)], rows)
    print_notes(console, result.notes)


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """One line for each note."""
    for note in notes:
        console.print(f"note: {escape(note)}", style="yellow", soft_wrap=True)
