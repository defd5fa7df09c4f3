"""What commands print, and how they end: 0 done, 1 the run failed, 2 wrong input, 128 + n stopped by signal n.

An error is one sentence; only --debug shows a traceback.
"""

from __future__ import annotations

import math
import os
import re
import select
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rl_training import errors
from rl_training.errors import counted, printable
from rl_training.record.json_lines import json_line, wants_json

if TYPE_CHECKING:
    from rl_training.run.workflows import TrainResult

FAILED, WRONG_INPUT, BY_SIGNAL = 1, 2, 128  # plus the number of the signal
STOPPED = BY_SIGNAL + signal.SIGINT
PIPE_WIDTH = 160  # a table in a file or pipe has no width limit
FEW_SEEDS = 5  # with fewer, an interval is doubtful
# Two-sided 95 % points of Student's t by degrees of freedom: no package that we need can compute them, SciPy could
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
TABLE_STYLE: dict[str, Any] = {
    "title_justify": "left", "title_style": "bold", "header_style": "bold", "box": SIMPLE_HEAD, "pad_edge": False,
    "show_edge": False, "collapse_padding": True,
}  # fmt: skip
REASONS = {
    "total_timesteps": "finished", "max_updates": "finished (max_updates)", "max_seconds": "stopped by max_seconds",
    "early_stopping": "solved, stopped early", "callback": "stopped by a callback", "SIGINT": "stopped by Ctrl-C",
    "SIGTERM": "stopped by SIGTERM",
}  # fmt: skip


def run_to_exit_code(action: Callable[[], Any], *, debug: bool = False) -> int:
    """Run `action`; any exception becomes one sentence on stderr and an exit code."""
    try:
        action()
        sys.stdout.flush()
        return 0
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, typer.Abort, errors.Terminated) as stop:
        tell("stopped at once." if wants_json() else "\nstopped at once.")
        return BY_SIGNAL + signal.SIGTERM if isinstance(stop, errors.Terminated) else STOPPED
    except BrokenPipeError as error:
        if not _stdout_is_gone():
            return _report(error, debug)
        # `rl-training list | head`: the reader closed the pipe; print nothing more, also at interpreter exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _report(error, debug)


def _report(error: Exception, debug: bool) -> int:
    if debug:
        typer.echo(errors.printable("".join(traceback.format_exception(error))), err=True)
    code, sentence = describe(error)
    if code == WRONG_INPUT and not is_first_rank():  # rank 0 prints it
        return code
    if wants_json():
        typer.echo(json_line("error", message=sentence, exit_code=code), err=True)
        return code
    typer.echo(f"{typer.style('error:', fg='red', bold=True)} {sentence}", err=True)
    if code == FAILED and not debug:
        typer.echo("run with --debug for the traceback", err=True)
    return code


def exit_after_signal(result: Any) -> None:
    """End the command with 128 + n if signal n stopped the run."""
    if result.stop_signal is not None:
        raise typer.Exit(BY_SIGNAL + result.stop_signal)


def is_first_rank() -> bool:
    """Whether this process prints for its run: of those that `torchrun` starts, only rank 0 does."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK", "0") == "0"


def tell(text: str) -> None:
    """A sentence on stderr."""
    text = printable(text)
    typer.echo(json_line("message", message=text) if wants_json() else text, err=True)


def describe_warning(message: object) -> str:
    """A Python warning as a line; without the colors and the `WARN: ` of Gymnasium's."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(message))
    text = errors.printable(plain).removeprefix("WARN: ")
    return json_line("warning", message=text) if wants_json() else f"warning: {text}"


def describe(error: Exception) -> tuple[int, str]:
    """The exit code and the sentence of an exception."""
    if isinstance(error, errors.UnknownKey):
        from rl_training.config.settings import with_full_path

        error = with_full_path(error)
    code, text = WRONG_INPUT, str(error)
    if hasattr(error, "format_message"):  # a usage error of click's, or of typer's own copy of it
        text = _describe_usage(error)
    elif not isinstance(error, errors.UserError):
        code = FAILED
        if not isinstance(error, errors.EnvironmentFailure | errors.TrainingFailure):
            text = f"the run failed with {errors.kind_and_line(error)}"
    line = errors.one_line(text)
    return code, line if line.endswith((".", "?", "!", ")")) else f"{line}."


def _describe_usage(error: Any) -> str:
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    command = "rl-training" if context is None else context.info_name
    if hasattr(error, "possibilities") and context is not None:
        known = [name for option in context.command.params for name in option.opts if name.startswith("--")]
        hint = errors.did_you_mean(error.option_name, known)
        every = f"rl-training {command} --help shows them all." if hint.startswith("known:") else hint
        return f"{command} has no option {error.option_name!r}; {every}"
    if hasattr(error, "option_name"):
        return f"{error.option_name} has no value; give one after it"
    said = error.format_message()
    if parameter is not None and hasattr(error, "param_type"):  # it is missing
        wanted = f"{parameter.opts[-1]} {parameter.metavar or ''}".rstrip()
        return f"{command} needs {wanted}: {parameter.help[0].lower()}{parameter.help[1:]}"
    extra = re.search(r"extra argument.*\((.*)\)", said)
    wrong = f"{command} does not take {extra[1]!r}" if extra else f"{command}: {said[0].lower()}{said[1:].rstrip('.')}"
    return f"{wrong}; rl-training {command} --help shows what it takes"


def _stdout_is_gone() -> bool:
    try:
        sys.stdout.flush()
        watched = select.poll()
        watched.register(sys.stdout, 0)  # with mask 0, poll reports only that the reader has closed
        return bool(watched.poll(0))
    except OSError:
        return True
    except AttributeError:  # this system has no poll
        return False


class PlainConsole(Console):
    """A console that prints text without control characters; its own colors and cursor movements work."""

    def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
        """The segments of what is printed, their text made printable."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def make_console() -> Console:
    """The console on stdout; only rank 0 prints."""
    console = PlainConsole(highlight=False, quiet=not is_first_rank())
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def print_table(
    console: Console, head: Sequence[str], rows: Sequence[Sequence[Any]], *, words: Sequence[int] = (0,),
    title: str | None = None,
) -> None:  # fmt: skip
    """A table of text; the columns at `words` are aligned left, and the numbers in the others right."""
    table = Table(title=title and escape(title), **TABLE_STYLE)
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i in words else "right", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else escape(str(cell)) for cell in row))
    console.print()
    console.print(table)


def print_facts(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    """Names and values in two columns; a long path is never broken, so that it can be copied."""
    rows = [(name, value) for name, value in facts if value]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        console.print(f"  [dim]{name.ljust(width)}[/dim]  {value}", soft_wrap=True)


@contextmanager
def drawing_shown(directory: str | None) -> Iterator[Callable[[int, int], None] | None]:
    """Draw videos without a display where there is none; yield what says on stderr how, and how far the drawing is."""
    if directory is None:
        yield None
        return
    from rl_training.envs.rendering import drawn_by, without_screen

    console, told = PlainConsole(stderr=True, highlight=False), set[int]()

    def watch(episode: int, steps: int) -> None:
        if not told and (way := drawn_by()):
            console.print(f"MuJoCo draws with {way}", soft_wrap=True)
        if episode not in told and not console.is_terminal:
            console.print(f"drawing episode {episode + 1}", soft_wrap=True)
        told.add(episode)
        status.update(f"drawing episode {episode + 1}, step {steps:,}")

    with without_screen(), console.status("drawing") as status:
        yield watch


def ending(result: TrainResult) -> str:
    """The event of a run's end: `finished`, or `stopped` by a signal or a callback."""
    from rl_training.run.folder import COMPLETE

    return "finished" if result.metrics["stop_reason"] in COMPLETE else "stopped"


def describe_return(metrics: dict[str, Any]) -> str:
    """The return of the evaluation or, without one, of the training episodes."""
    if "eval_return_mean" in metrics:
        mean, std, count = (metrics[f"eval_{name}"] for name in ("return_mean", "return_std", "episodes"))
        solved = f", success rate {metrics['eval_success_rate']:.0%}" if "eval_success_rate" in metrics else ""
        return f"[bold]{mean:.1f} ± {std:.1f}[/bold] over {counted(count, 'evaluation episode')}{solved}"
    if "episode_return_mean" in metrics:
        return f"[bold]{metrics['episode_return_mean']:.1f}[/bold] over the last training episodes (not evaluated)"
    return "no episode ended yet"


def print_run(
    console: Console, result: TrainResult, title: str, names: str = "", *, trained: int | None = None
) -> None:
    """The summary of one run and the commands to run next; `names` are the `named_options` of its config."""
    if wants_json():
        facts = {"run": result.run_dir, "checkpoint": result.checkpoint_path, "metrics": result.metrics}
        typer.echo(json_line(ending(result), **facts))
        return
    from rl_training.record.logger import format_duration  # here because it imports numpy

    metrics, best = result.metrics, result.checkpoint_path.with_name("best.ckpt")
    steps, seconds = metrics["global_step"], metrics["train_seconds"]
    rate = f"({steps / seconds:,.0f} steps/s)" if seconds > 0 else ""
    reason = REASONS.get(str(metrics["stop_reason"]), str(metrics["stop_reason"]))
    console.print(f"\n[bold]{escape(title)}[/bold]: {escape(reason)}")
    if trained == 0 and (budget := larger_budget(metrics)):
        console.print(f"  the budget is used up; give a larger one, such as {budget}", style="yellow")
    print_facts(console, [
        ("return", describe_return(metrics)),
        ("steps", f"{steps:,} in {format_duration(seconds)} {rate}"),
        ("run", quote(result.run_dir)),
        ("metrics", quote(result.run_dir / "metrics.jsonl")),
        ("checkpoint", quote(result.checkpoint_path)),
        ("best", quote(best) if best.is_file() else ""),
    ])  # fmt: skip
    from rl_training.run.ranks import join_ranks, resume_command

    given = f"--checkpoint {quote(result.checkpoint_path)}{names}"
    console.print("\nnext")
    console.print(f"  rl-training eval {given} --num-episodes 20", soft_wrap=True)
    console.print(f"  {resume_command(join_ranks().count)} {given} {larger_budget(metrics)}".rstrip(), soft_wrap=True)


def larger_budget(metrics: dict[str, Any]) -> str:
    """The option of `resume` that doubles the budget that stopped the run; nothing after a signal."""
    reason = metrics["stop_reason"]
    if reason in ("SIGINT", "SIGTERM"):
        return ""
    if reason == "max_seconds":
        return f"--set max_seconds={math.ceil(2 * metrics['train_seconds'])}"
    if reason == "max_updates":
        return f"--set max_updates={2 * metrics['updates']}"
    return f"--total-timesteps {2 * metrics['global_step']}"


def quote(path: Path) -> str:
    """A path quoted for the shell, relative if that is shorter, with markup escaped."""
    here = Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    return escape(shlex.quote(str(shown)))


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and the half-width of its 95 % interval (Student's t); one value has no interval."""
    mean, freedom = fmean(values), len(values) - 1
    if freedom < 1:
        return mean, None
    factor = T_95[freedom - 1] if freedom <= len(T_95) else 1.96 + 2.5 / freedom
    return mean, factor * stdev(values) / math.sqrt(len(values))


def describe_interval(values: Sequence[float], what: str = "return") -> str:
    """The 95 % interval of the mean of several values, with what makes it doubtful; empty for one value."""
    mean, half = mean_interval(values)
    if half is None:
        return ""
    notes = ["Student's t"]
    if len(values) < FEW_SEEDS:
        notes.append(f"{counted(len(values), 'seed')} only")
    if mean + half > max(values):
        notes.append(f"reaches above the highest {what}, {max(values):.1f}")
    return f", 95 % interval {mean - half:.1f} to {mean + half:.1f} ({', '.join(notes)})"


def format_return(metrics: Mapping[str, Any], *, evaluated: bool) -> str:
    """A run's return; one of training episodes is marked as such among evaluations."""
    value = metrics.get("eval_return_mean", metrics.get("episode_return_mean"))
    if value is None:
        return "-"
    if "eval_return_std" in metrics:
        return f"{value:.1f} ± {metrics['eval_return_std']:.1f}"
    return f"{value:.1f} in training" if evaluated else f"{value:.1f}"


def print_seeds(console: Console, runs: Sequence[tuple[int, Any]], title: str) -> None:
    """One row per seed, then the mean over the seeds whose runs are finished, with its interval."""
    if wants_json():
        for seed, result in runs:
            typer.echo(json_line(ending(result), seed=seed, run=result.run_dir, metrics=result.metrics))
        return
    from rl_training.run.folder import COMPLETE

    finished = [result.metrics for _, result in runs if result.metrics["stop_reason"] in COMPLETE]
    evaluated = any("eval_return_mean" in metrics for metrics in finished)
    rows = []
    for seed, result in runs:
        steps, run = result.metrics["global_step"], Text.from_markup(quote(result.run_dir))
        rate = steps / max(result.metrics["train_seconds"], 1e-9)
        rows.append([seed, format_return(result.metrics, evaluated=evaluated), f"{steps:,}", f"{rate:,.0f}", run])
    print_table(console, ["seed", "return", "steps", "steps/s", "run"], rows, words=(4,), title=title)
    measure = "eval_return_mean" if evaluated else "episode_return_mean"
    returns = [float(metrics[measure]) for metrics in finished if measure in metrics]
    if returns:
        mean, _ = mean_interval(returns)
        kind = "" if evaluated else " of training episodes"
        over = f"mean over {counted(len(returns), 'seed')}{kind} [bold]{mean:.1f}[/bold]{describe_interval(returns)}"
        console.print(over, soft_wrap=True)
    reasons = {seed: str(result.metrics["stop_reason"]) for seed, result in runs}
    stopped = [f"seed {seed} ({REASONS.get(why, why)})" for seed, why in reasons.items() if why not in COMPLETE]
    if stopped:
        left_out = " and left out" if returns else ""  # of the mean
        console.print(f"unfinished{left_out}: {escape(', '.join(stopped))}", style="yellow", soft_wrap=True)
