"""The command `rl-training`: its commands and their exit codes.

Heavy modules are imported inside the command functions, so that `--help` is fast.
"""

from __future__ import annotations

import faulthandler
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import rl_training
from rl_training.cli import catalog, checkpoint, dataset, report, train, zoo
from rl_training.cli.options import option
from rl_training.cli.screen import describe_warning, run_to_exit_code
from rl_training.errors import UserError, did_you_mean
from rl_training.record.json_lines import check_log_format

NAME = "rl-training"


class CommandGroup(TyperGroup):
    """Ends every command with an exit code and at most one sentence; `--debug` may be anywhere."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **extra: Any) -> Any:
        """Run the command line and exit."""
        words, debug = _take_debug(list(sys.argv[1:] if args is None else args))

        self._main_shell_completion({}, NAME)

        def invoke() -> None:
            check_log_format()
            with self.make_context(NAME, words) as context:
                self.invoke(context)

        sys.exit(run_to_exit_code(invoke, debug=debug))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of that name; a UserError suggests the nearest name."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise UserError(f"there is no command {args[0]!r}; {did_you_mean(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


def _take_debug(words: list[str]) -> tuple[list[str], bool]:
    """The arguments without `--debug`, and whether it was given before a bare `--`."""
    end = words.index("--") if "--" in words else len(words)
    kept = [word for word in words[:end] if word != "--debug"]
    return kept + words[end:], len(kept) < end


app = typer.Typer(
    cls=CommandGroup, rich_markup_mode="rich", pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[bool, option("Print the version.", "--version")] = False,
    debug: Annotated[bool, option("Show the traceback of an error; also after a command.", "--debug")] = False,
) -> None:
    """Reinforcement learning for Gymnasium environments: one loop, many algorithms.

    First steps: [bold]rl-training train --config ppo/cartpole[/bold], then the commands that it prints.
    """
    if version:
        typer.echo(f"{NAME} {rl_training.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)
    else:
        return
    raise typer.Exit


app.command("train")(train.train)
app.command("eval")(checkpoint.evaluate)
app.command("resume")(checkpoint.resume)
app.command("predict")(checkpoint.predict)
app.command("runs")(report.list_runs)
app.command("compare")(report.compare)
app.command("report")(report.report)
app.command("plot")(report.plot)
app.command("tune")(train.tune)
app.command("export")(checkpoint.export)
app.command("list")(catalog.list_algorithms)
app.command("config")(catalog.show_config)
app.command("doctor")(catalog.doctor)
app.command("bench")(catalog.bench)
app.command("enjoy")(zoo.enjoy)
app.add_typer(dataset.app, name="dataset", cls=CommandGroup)
app.add_typer(zoo.app, name="zoo", cls=CommandGroup)


def main() -> None:
    """The console entry point."""
    if sys.stderr is not None:
        faulthandler.enable()  # prints a traceback if an environment or library crashes the process
    warnings.formatwarning = lambda message, *_: f"{describe_warning(message)}\n"
    app()
