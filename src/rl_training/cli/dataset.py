"""`rl-training dataset`: record transitions, check them, and convert between npz and Minari."""

from __future__ import annotations

import errno
import os
import shlex
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from rl_training.cli import options
from rl_training.cli.options import Text, option
from rl_training.cli.screen import make_console, print_facts
from rl_training.errors import UserError, counted
from rl_training.safe_files import output_written

if TYPE_CHECKING:
    from rl_training.data import TransitionDataset

SHOWN = 8  # dimensions or actions printed one by one
USELESS = {"--random": ("--from-replay", "--stochastic"), "--from-replay": ("--env", "--stochastic", "--seed")}

app = typer.Typer(rich_markup_mode="rich")


@app.callback(invoke_without_command=True)
def start(context: typer.Context) -> None:
    """Record transitions (collect), check them (check), convert them (convert)."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)


@app.command("collect")
def collect(
    output: Annotated[str, option("The npz file to write.", "--output", metavar="F.npz")],
    checkpoint: Annotated[Text, option("Act with this checkpoint's policy.", "--checkpoint", metavar="P")] = None,
    env: options.EnvOption = None,
    random: Annotated[bool, option("Act at random in --env.", "--random")] = False,
    from_replay: Annotated[bool, option("Use the replay buffer in --checkpoint instead.", "--from-replay")] = False,
    num_steps: Annotated[Text, option("Steps to record; from a replay buffer, the newest.", metavar="N")] = None,
    seed: Annotated[Text, option("Seed; default: the run's seed, or 0.", metavar="N")] = None,
    stochastic: options.StochasticOption = False,
    modules: options.ImportOption = None,
) -> None:
    """Record transitions to an npz file: --checkpoint P, or --env ID --random.

    Actions are stored as the environment takes them. The same seed records the same steps.
    """
    if (checkpoint is None) != random:
        both = "not both" if random else "one of them is needed"
        raise UserError(f"collect takes --checkpoint P, or --env ID --random; {both}.")
    if random and env is None:
        raise UserError("--random needs --env, the environment to act in.")
    source = "--random" if random else "--from-replay" if from_replay else "--checkpoint"
    given = {"--env": env, "--from-replay": from_replay, "--stochastic": stochastic, "--seed": seed}
    if useless := [name for name in USELESS.get(source, ()) if given[name] not in (None, False)]:
        raise UserError(f"{useless[0]} has no meaning with {source}; leave it out.")
    if num_steps is None and not from_replay:
        raise UserError("collect needs --num-steps.")
    steps = None if num_steps is None else options.whole_number("--num-steps", num_steps, least=1)
    first = None if seed is None else options.whole_number("--seed", seed)
    target = check_output("--output", output)
    dataset = record(checkpoint, options.name_environment(env, modules), steps, first, from_replay, not stochastic)
    with output_written(target, "--output"):
        dataset.save_npz(target)
    console, path, returns = make_console(), shlex.quote(str(target)), dataset.episode_returns
    print_facts(console, [
        ("transitions", f"{len(dataset):,} in {counted(len(returns), 'episode')}"),
        ("return", f"{returns.mean():.1f} ({returns.min():.1f} to {returns.max():.1f})"),
        ("file", escape(path)),
    ])  # fmt: skip
    from rl_training.config.train_config import name_again

    given_again = f"--path {path}{name_again(env or str(dataset.metadata.get('env_id')), modules or ())}"
    console.print(f"\nnext\n  rl-training dataset check {escape(given_again)}", soft_wrap=True)


def record(
    checkpoint: str | None, env: Any, steps: int | None, seed: int | None, from_replay: bool, deterministic: bool
) -> TransitionDataset:
    """The transitions: of random actions without a checkpoint, from its replay buffer, or of its policy."""
    from rl_training.run import evaluation

    if checkpoint is None:
        return evaluation.record_random(env, steps or 1, seed or 0)
    path = options.find_checkpoint(checkpoint)
    if not from_replay:
        return evaluation.record_policy(path, steps or 1, seed=seed, deterministic=deterministic, env=env)
    dataset = evaluation.read_replay_buffer(path)
    if steps is not None and steps > len(dataset):
        raise UserError(f"--num-steps is {steps}, but the replay buffer holds {len(dataset)} transitions.")
    return dataset if steps is None else dataset.take(slice(len(dataset) - steps, None))


def check_output(name: str, given: str) -> Path:
    """The npz file to write; a UserError before any work if it cannot be written."""
    target = Path(given if given.endswith(".npz") else f"{given}.npz")
    with output_written(target, name):
        target.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=target.parent).close()
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return target


@app.command("check")
def check(
    path: Annotated[Text, option("An npz file.", "--path", metavar="F.npz")] = None,
    dataset_id: Annotated[Text, option("A local Minari data set.", "--dataset-id", metavar="ID")] = None,
    env: options.EnvOption = None,
    modules: options.ImportOption = None,
) -> None:
    """Show what a data set contains and its problems; exit code 1 if there are any."""
    if (path is None) == (dataset_id is None):
        raise UserError("check takes one of --path F.npz and --dataset-id ID.")
    options.name_environment(env, modules)
    import numpy as np

    from rl_training.data import load_transition_dataset
    from rl_training.run.evaluation import recipe_of, spaces_of

    dataset = load_transition_dataset("npz" if dataset_id is None else "minari", path=path, dataset_id=dataset_id)
    recipe = None if env is None else recipe_of(dataset, env)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinities are reported below
        report = dataset.check(**({} if recipe is None else spaces_of(recipe)))
    console, against = make_console(), "not compared with an environment (--env ID does)"
    console.print(f"[bold]{escape(path or dataset_id or '')}[/bold]")
    print_facts(console, [(name, escape(value)) for name, value in describe_report(report)])
    if not report["problems"]:
        console.print(f"[green]no problems[/green], {escape(f'compared with {env}' if env is not None else against)}")
        return
    for problem in report["problems"]:
        console.print(f"[red]problem:[/red] {escape(problem)}", soft_wrap=True)
    raise typer.Exit(1)


def describe_report(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows of the table, in words."""
    spread = "{min:.4g} to {max:.4g}, mean {mean:.4g} ± {std:.3g}"
    made_by = {name: report["metadata"].get(name) for name in ("env_id", "policy", "seed")}
    missing = ", ".join(f"{count:,} in {name}" for name, count in report["not_finite"].items())
    open_end = ", the last one incomplete" if report["last_episode_is_open"] else ""
    return [
        ("transitions", f"{report['transitions']:,}"),
        ("episodes", f"{report['episodes']:,}{open_end}"),
        ("terminated", f"{report['terminated']:,}"),
        ("truncated", f"{report['truncated']:,}"),
        ("return", spread.format(**report["episode_return"])),
        ("length", spread.format(**report["episode_length"])),
        ("reward", spread.format(**report["reward"])),
        ("obs", describe_array(report["obs"])),
        ("actions", describe_array(report["actions"])),
        ("coverage", describe_coverage(report["coverage"], report["transitions"])),
        ("NaN or infinite", missing or "none"),
        ("made by", ", ".join(f"{name} {value}" for name, value in made_by.items() if value is not None)),
        ("sha256", report["sha256"]),
    ]


def describe_array(part: dict[str, Any]) -> str:
    """Kind and range, per dimension if there are few."""
    lows, highs = (values if isinstance(values, list) else [values] for values in (part["min"], part["max"]))
    each = zip(lows, highs, strict=True) if len(lows) <= SHOWN else [(min(lows), max(highs))]
    ranges = ", ".join(f"{low:.4g} to {high:.4g}" for low, high in each)
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
    modules: options.ImportOption = None,
) -> None:
    """Convert npz to Minari or Minari to npz: a name that ends in .npz is a file."""
    if source.endswith(".npz") == target.endswith(".npz"):
        raise UserError(f"one of {source} and {target} must be an npz file and the other a Minari id.")
    if env is not None and target.endswith(".npz"):
        raise UserError("--env is for writing a Minari data set; a Minari source names its own environment.")
    is_export = target.endswith(".npz")
    if is_export:
        check_output("TARGET", target)
    options.name_environment(env, modules)
    from rl_training.data.loading import load_transition_dataset, write_minari

    if is_export:
        dataset = load_transition_dataset("minari", dataset_id=source)
        with output_written(target, "TARGET"):
            dataset.save_npz(target)
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
