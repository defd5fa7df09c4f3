"""`rl-training dataset`: record transitions, check them, and convert between npz and Minari."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_training.cli.options import (
    EnvOption,
    ImportOption,
    StochasticOption,
    Text,
    find_checkpoint,
    name_environment,
    option,
    whole_number,
)
from rl_training.cli.screen import make_console, print_facts, repeat_names
from rl_training.errors import UserError, counted

if TYPE_CHECKING:
    from rl_training.data import TransitionDataset

SHOWN = 8  # dimensions or actions printed one by one

app = typer.Typer(rich_markup_mode="rich")


@app.callback(invoke_without_command=True)
def start(context: typer.Context) -> None:
    """Record transitions (collect), check them (check), convert them (convert)."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)
        raise typer.Exit


@app.command("collect")
def collect(
    output: Annotated[str, option("The npz file to write.", "--output", metavar="F.npz")],
    checkpoint: Annotated[Text, option("Act with this checkpoint's policy.", "--checkpoint", metavar="P")] = None,
    env: EnvOption = None,
    random: Annotated[bool, option("Act at random in --env.", "--random")] = False,
    from_replay: Annotated[bool, option("Use the replay buffer in --checkpoint instead.", "--from-replay")] = False,
    num_steps: Annotated[Text, option("Steps to record; from a replay buffer, the newest.", metavar="N")] = None,
    seed: Annotated[Text, option("Seed; default: the run's seed, or 0.", metavar="N")] = None,
    stochastic: StochasticOption = False,
    modules: ImportOption = None,
) -> None:
    """Record transitions to an npz file: --checkpoint P, or --env ID --random.

    Actions are stored as the environment takes them. The same seed records the same steps.
    """
    check_choice(checkpoint, env, random=random, from_replay=from_replay, stochastic=stochastic, seed=seed)
    if num_steps is None and not from_replay:
        raise UserError("collect needs --num-steps.")
    steps = None if num_steps is None else whole_number("--num-steps", num_steps, least=1)
    first = None if seed is None else whole_number("--seed", seed)
    target = check_output("--output", output)
    named = name_environment(env, modules)
    from rl_training.run import evaluation

    if checkpoint is None:
        assert env is not None  # `check_choice`
        dataset = evaluation.record_random(env, steps or 1, first or 0)
    elif from_replay:
        dataset = newest(evaluation.read_replay_buffer(find_checkpoint(checkpoint)), steps)
    else:
        path = find_checkpoint(checkpoint)
        dataset = evaluation.record_policy(path, steps or 1, seed=first, deterministic=not stochastic, env=named)
    save(dataset, target)
    print_saved(dataset, target, env, modules)


def check_choice(
    checkpoint: str | None, env: str | None, *, random: bool, from_replay: bool, stochastic: bool, seed: str | None
) -> None:
    """Refuse options that cannot be combined."""
    if (checkpoint is None) != random:
        both = "not both" if random else "one of them is needed"
        raise UserError(f"collect takes --checkpoint P, or --env ID --random; {both}.")
    if random and env is None:
        raise UserError("--random needs --env, the environment to act in.")
    if from_replay and not random and env is not None:
        raise UserError("--env cannot be used with --from-replay; no environment is stepped.")
    if random and (from_replay or stochastic):
        raise UserError(f"{'--from-replay' if from_replay else '--stochastic'} needs --checkpoint instead of --random.")
    if from_replay and (stochastic or seed is not None):
        raise UserError(f"{'--stochastic' if stochastic else '--seed'} has no meaning with --from-replay.")


def check_output(name: str, given: str) -> str:
    """The npz file to write; a UserError before any work if it cannot be written."""
    target = given if given.endswith(".npz") else f"{given}.npz"
    folder = os.path.dirname(target) or "."
    try:
        os.makedirs(folder, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{name} {target} cannot be written: {reason}.") from None
    if os.path.isdir(target):
        raise UserError(f"{name} {target} is a folder; give the name of a file.")
    if not os.access(target if os.path.exists(target) else folder, os.W_OK):
        raise UserError(f"{name} {target} cannot be written: permission denied.")
    return target


def newest(dataset: TransitionDataset, steps: int | None) -> TransitionDataset:
    """The newest rows of a replay buffer."""
    if steps is not None and steps > len(dataset):
        raise UserError(f"--num-steps is {steps}, but the replay buffer holds {len(dataset)} transitions.")
    return dataset if steps is None else dataset.take(slice(len(dataset) - steps, None))


def save(dataset: TransitionDataset, target: str) -> None:
    """Write the file."""
    try:
        dataset.save_npz(target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}.") from None


def print_saved(dataset: TransitionDataset, target: str, env: str | None, modules: list[str] | None) -> None:
    """Print what was recorded and the next command."""
    console, path = make_console(), shlex.quote(target)
    returns = dataset.episode_returns
    print_facts(console, [
        ("transitions", f"{len(dataset):,} in {counted(len(returns), 'episode')}"),
        ("return", f"{returns.mean():.1f} ({returns.min():.1f} to {returns.max():.1f})"),
        ("file", escape(path)),
    ])  # fmt: skip
    console.print("\nnext")
    options = f"--path {path}{repeat_names(env or str(dataset.metadata.get('env_id')), modules)}"
    console.print(f"  rl-training dataset check {escape(options)}", soft_wrap=True)


@app.command("check")
def check(
    path: Annotated[Text, option("An npz file.", "--path", metavar="F.npz")] = None,
    dataset_id: Annotated[Text, option("A local Minari data set.", "--dataset-id", metavar="ID")] = None,
    env: EnvOption = None,
    modules: ImportOption = None,
) -> None:
    """Show what a data set contains and its problems; exit code 1 if there are any."""
    if (path is None) == (dataset_id is None):
        raise UserError("check takes one of --path F.npz and --dataset-id ID.")
    name_environment(env, modules)
    import numpy as np

    from rl_training.data import load_transition_dataset
    from rl_training.run.evaluation import recipe_of, spaces_of

    dataset = load_transition_dataset("npz" if dataset_id is None else "minari", path=path, dataset_id=dataset_id)
    recipe = None if env is None else recipe_of(dataset, env)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinities are reported below
        report = dataset.check(**({} if recipe is None else spaces_of(recipe)))
    print_report(make_console(), report, title=path or dataset_id or "", env=env)
    if report["problems"]:
        raise typer.Exit(1)


def print_report(console: Console, report: dict[str, Any], *, title: str, env: str | None) -> None:
    """Print a table of the contents, then one line for each problem."""
    table = Table(title=escape(title), title_justify="left", title_style="bold", show_header=False, box=SIMPLE)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in describe_report(report):
        table.add_row(name, escape(value))
    console.print(table)
    against = f"compared with {env}" if env is not None else "not compared with an environment (--env ID does)"
    if not report["problems"]:
        console.print(f"[green]no problems[/green], {escape(against)}")
    for problem in report["problems"]:
        console.print(f"[red]problem:[/red] {escape(problem)}", soft_wrap=True)


def describe_report(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows of the table, in words."""
    returns, lengths, reward = (report[name] for name in ("episode_return", "episode_length", "reward"))
    made_by = {name: report["metadata"].get(name) for name in ("env_id", "policy", "seed")}
    open_end = ", the last one incomplete" if report["last_episode_is_open"] else ""
    named = ", ".join(f"{name} {value}" for name, value in made_by.items() if value is not None)
    missing = ", ".join(f"{count:,} in {name}" for name, count in report["not_finite"].items())
    return [
        ("transitions", f"{report['transitions']:,}"),
        ("episodes", f"{report['episodes']:,}{open_end}"),
        ("terminated", f"{report['terminated']:,}"),
        ("truncated", f"{report['truncated']:,}"),
        ("return", f"{spread(returns)}, mean {returns['mean']:.4g} ± {returns['std']:.3g}"),
        ("length", f"{spread(lengths)}, mean {lengths['mean']:.4g}"),
        ("reward", f"{spread(reward)}, mean {reward['mean']:.4g}"),
        ("obs", describe_array(report["obs"])),
        ("actions", describe_array(report["actions"])),
        ("coverage", describe_coverage(report["coverage"], report["transitions"])),
        ("NaN or infinite", missing or "none"),
        ("made by", named or "not in the data"),
        ("sha256", report["sha256"]),
    ]


def spread(summary: dict[str, Any]) -> str:
    """`0 to 12.5`."""
    return f"{summary['min']:.4g} to {summary['max']:.4g}"


def describe_array(part: dict[str, Any]) -> str:
    """Kind and range, per dimension if there are few."""
    low, high = part["min"], part["max"]
    if isinstance(low, Sequence) and len(low) <= SHOWN:
        ranges = ", ".join(spread({"min": a, "max": b}) for a, b in zip(low, high, strict=True))
    else:
        lows, highs = (values if isinstance(values, Sequence) else [values] for values in (low, high))
        ranges = spread({"min": min(lows), "max": max(highs)})
    return f"{part['dtype']} {part['shape'] or 'one number'}: {ranges}"


def describe_coverage(coverage: dict[str, Any], transitions: int) -> str:
    """How often each action occurs, or how much of each dimension's range is visited."""
    if "distinct_actions" in coverage:
        return f"{coverage['distinct_actions']:,} different actions"
    if "action_counts" in coverage:
        counts = coverage["action_counts"]
        more = f" and {len(counts) - SHOWN} more" if len(counts) > SHOWN else ""
        return ", ".join(f"{value}: {count / transitions:.1%}" for value, count in counts[:SHOWN]) + more
    shares = coverage["visited_bins"]
    if len(shares) <= SHOWN:
        return f"{', '.join(f'{share:.0%}' for share in shares)} of ten bins per action dimension"
    return f"{min(shares):.0%} to {max(shares):.0%} of ten bins over {len(shares)} action dimensions"


@app.command("convert")
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="An npz file, or the id of a local Minari data set.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The other of the two formats.")],
    env: Annotated[Text, option("The environment, if the npz file does not name it.", "--env", metavar="ID")] = None,
    modules: ImportOption = None,
) -> None:
    """Convert npz to Minari or Minari to npz: a name that ends in .npz is a file."""
    if source.endswith(".npz") == target.endswith(".npz"):
        raise UserError(f"one of {source} and {target} must be an npz file and the other a Minari id.")
    if env is not None and target.endswith(".npz"):
        raise UserError("--env is for writing a Minari data set; a Minari source names its own environment.")
    if target.endswith(".npz"):
        check_output("TARGET", target)
    name_environment(env, modules)
    from rl_training.data.loading import load_transition_dataset, write_minari

    if target.endswith(".npz"):
        dataset = load_transition_dataset("minari", dataset_id=source)
        save(dataset, target)
    else:
        dataset = load_transition_dataset("npz", path=source)
        write_minari(dataset, target, **minari_options(dataset, source, env))
    facts = [("transitions", f"{len(dataset):,}"), ("from", escape(source)), ("to", escape(target))]
    print_facts(make_console(), facts)


def minari_options(dataset: TransitionDataset, source: str, env: str | None) -> dict[str, Any]:
    """The environment that Minari stores with the data; only its spaces if Gymnasium cannot make it by id."""
    from rl_training.run.evaluation import recipe_of, spaces_of

    recipe = recipe_of(dataset, env)
    if recipe is None:
        raise UserError(f"{source} does not name its environment, which Minari stores; give --env ID.")
    registered = recipe.named_by_user or ":" not in recipe.env_id  # Gymnasium imports the module of module:Name-v0
    if registered and recipe.is_plain and not recipe.kwargs and recipe.max_episode_steps is None:
        return {"env_id": recipe.env_id}
    return spaces_of(recipe)
