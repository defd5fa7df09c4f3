"""`rl-training zoo` and `enjoy`: packaged trained policies, and watching any policy play."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from rl_training.cli import options, screen
from rl_training.cli.options import Text, option

app = typer.Typer(rich_markup_mode="rich")
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A policy of the zoo, such as ppo/halfcheetah_gpu.")]


@app.callback(invoke_without_command=True)
def start(context: typer.Context) -> None:
    """Trained policies that come with the package: list, show, get. Loading one runs no code."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)


@app.command("list")
def list_policies() -> None:
    """Show every packaged policy with the return of its episodes."""
    from rl_training.run.zoo import list_zoo, read_card

    name, number = Column("policy", style="bold cyan", no_wrap=True), Column("return", justify="right")
    table = Table(name, "environment", number, Column("steps", justify="right"), header_style="bold", box=SIMPLE_HEAD)
    for policy in list_zoo():
        card = read_card(policy)
        table.add_row(policy, card.env_id, f"{fmean(card.returns):,.1f}", f"{card.steps:,}")
    screen.make_console().print(table)


@app.command("show")
def show_policy(name: NameArgument) -> None:
    """Show the card of a packaged policy: what it reaches, and how it was trained."""
    from rl_training.run.zoo import find_policy, read_card

    card, path = read_card(name), find_policy(name)
    screen.print_facts(screen.make_console(), [
        ("return", f"{fmean(card.returns):,.1f}{screen.describe_interval(card.returns)}"),
        ("episodes", f"{len(card.returns)}, with the seed {card.episode_seed}, which chose nothing"),
        ("environment", card.env_id),
        ("trained", f"{card.steps:,} steps in {card.train_seconds:,.0f} s on {card.machine}, seed {card.seed}"),
        ("command", card.command),
        ("commit", card.commit),
        ("file", f"{screen.quote(path)} ({path.stat().st_size / 1000:,.0f} kB, {card.weights})"),
        ("sha256", card.sha256),
    ])  # fmt: skip


@app.command("get")
def get_policy(
    name: NameArgument,
    output: Annotated[str, option("The file or the folder to write to.", "--output", metavar="F")] = ".",
) -> None:
    """Copy a packaged policy; eval, predict and export take the copy as --checkpoint."""
    from rl_training.run import zoo

    typer.echo(zoo.get_policy(name, Path(output)))


def enjoy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A policy of the zoo, a checkpoint or a run's folder.")],
    num_episodes: Annotated[str, option("Episodes.", metavar="N")] = "3",
    seed: Annotated[Text, option("Seed of the episodes; default: the run's seed.", metavar="N")] = None,
    record_video: Annotated[Text, option("Write one video per episode instead.", metavar="DIR")] = None,
    env: options.OwnEnvOption = None,
    modules: options.ImportOption = None,
) -> None:
    """Watch a policy play in a window; without a display, write videos to the folder `enjoy`."""
    episodes = options.whole_number("--num-episodes", num_episodes, least=1)
    first = None if seed is None else options.whole_number("--seed", seed)
    named = options.name_environment(env, modules)
    from rl_training.envs.rendering import has_display
    from rl_training.run.workflows import evaluate_checkpoint
    from rl_training.run.zoo import find_policy

    path = options.find_checkpoint(name) if os.path.exists(name) else find_policy(name)
    if record_video is None and not has_display():
        record_video = "enjoy"
    with screen.drawing_shown(record_video) as watch:
        metrics = evaluate_checkpoint(
            path, num_episodes=episodes, seed=first, env=named, network=tuple(modules or ()),
            render=record_video is None, record_video_dir=record_video, watch=watch,
        )  # fmt: skip
    screen.print_facts(screen.make_console(), [
        ("return", screen.describe_return(metrics)),
        ("videos", "" if record_video is None else screen.quote(Path(record_video))),
    ])  # fmt: skip
