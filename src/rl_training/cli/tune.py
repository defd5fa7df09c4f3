"""`rl-training tune`: a hyper-parameter search that can be stopped and continued."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from rl_training.cli import options
from rl_training.cli.exits import BY_SIGNAL
from rl_training.cli.options import Text, Texts, option, whole_number
from rl_training.cli.screen import describe_interval, make_console, mean_interval, print_facts, quote
from rl_training.errors import UserError, counted

if TYPE_CHECKING:
    from rl_training.config.train_config import TrainConfig
    from rl_training.tools.tune import Study


def tune(
    preset: options.PresetArgument = None,
    config: options.ConfigOption = None,
    algo: options.AlgoOption = None,
    env: options.EnvOption = None,
    trials: Annotated[str, option("Number of trials, including those already in the study.", metavar="N")] = "30",
    jobs: Annotated[str, option("Trials that run in parallel.", metavar="K")] = "1",
    names: Annotated[
        Texts, option("Tune this hyper-parameter; default: those that matter most.", "--tune", metavar="NAME")
    ] = None,
    final_seeds: Annotated[
        str, option("New seeds on which best and default are compared; 0: none.", metavar="N")
    ] = "5",
    study: Annotated[Text, option("Folder of the study; the same command continues it.", metavar="DIR")] = None,
    total_timesteps: options.StepsOption = None,
    modules: options.ImportOption = None,
    settings: options.SetOption = None,
) -> None:
    """Search for better hyper-parameters, then compare them with the config's own on new seeds.

    Trials that fall behind are stopped early. The same command continues a study that was stopped or killed.
    """
    from rl_training.cli.options import build_config

    count, workers = whole_number("--trials", trials, least=1), whole_number("--jobs", jobs, least=1)
    seeds = whole_number("--final-seeds", final_seeds)
    if seeds == 1:
        raise UserError("--final-seeds is '1'; an interval needs at least 2, and 0 compares nothing.")
    source = options.one_config(preset, config)
    built = build_config(source, algo, env, settings, modules, total_timesteps=total_timesteps)
    from rl_training.run.folder import locked
    from rl_training.safe_files import output_written
    from rl_training.tools.tune import Study, search_space

    space = search_space(built, names or ())
    folder = Path(study or f"{built.output_dir}/tune-{built.algo}-{built.env_id.replace('/', '_').replace(':', '_')}")
    with output_written(folder, "--study"):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, "another --study"):
        search(Study(built, space, folder), built, count, workers, seeds, modules or [])


def search(opened: Study, built: TrainConfig, count: int, workers: int, seeds: int, modules: list[str]) -> None:
    """Run the trials, then the comparison on new seeds, and print both."""
    from rl_training.tools.processes import run_jobs

    console, folder = make_console(), opened.folder
    title = escape(f"{built.algo} on {built.env_id}")
    console.print(f"[bold]{title}[/bold]: {counted(count, 'trial')} in {quote(folder)}")
    print_facts(console, [(name, escape(one.describe())) for name, one in opened.space.items()])
    before = len(opened.trials())
    if before:
        console.print(f"continuing after {counted(before, 'trial')}")
    console.print("trial state return evals hyper-parameters")
    stopped = run_jobs(opened.jobs(count), workers, modules, print_new(console, lambda: trial_lines(opened.trials())))
    if not stopped:
        best = opened.best()
        if best.number == 0:
            console.print("\nno trial was better than the config itself")
        elif seeds:
            console.print(f"\ncomparing trial {best.number} with the default on {seeds} new seeds each")
            show_final = print_new(console, lambda: final_lines(opened))
            stopped = run_jobs(opened.finals(seeds), workers, modules, show_final)
    if stopped:
        console.print(f"\nstopped; the same command continues the study in {quote(folder)}")
        raise typer.Exit(BY_SIGNAL + stopped)
    print_result(console, opened, built, best)


def print_new(console: Console, lines: Callable[[], list[str]]) -> Callable[[], None]:
    """A function that prints the lines that have come since its last call."""
    printed = set(lines())

    def show() -> None:
        for line in lines():
            if line not in printed:
                printed.add(line)
                console.print(line, soft_wrap=True)

    return show


def final_lines(study: Study) -> list[str]:
    """One line for each finished run on a new seed."""
    ended = [(name, seed, value) for name, by_seed in study.final_returns().items() for seed, value in by_seed.items()]
    return [f"{name}, new seed {seed}: {'failed' if value is None else f'{value:.1f}'}" for name, seed, value in ended]


def trial_lines(trials: list[Any]) -> list[str]:
    """Number, state, return, evaluations and hyper-parameters of each trial that has ended."""
    lines = []
    for trial in [trial for trial in trials if trial.state.is_finished()]:
        values = trial.intermediate_values
        value = trial.value if trial.value is not None else values[max(values)] if values else None
        shown = "-" if value is None else f"{value:.1f}"
        state = "done" if trial.state.name == "COMPLETE" else trial.state.name.lower()
        params = " ".join(f"{name}={shorten(given)}" for name, given in trial.params.items())
        result = trial.user_attrs.get("error", params) if state == "fail" else params
        lines.append(f"{trial.number:4d} {state:7} {shown:>8} {len(values):3d} {escape(result)}")
    return lines


def shorten(value: Any) -> str:
    """A value in four digits."""
    value = json.loads(value) if isinstance(value, str) else value
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value, separators=(",", ":"))


def print_result(console: Console, study: Study, config: Any, best: Any) -> None:
    """Print the best hyper-parameters, the comparison on new seeds, and the preset file."""
    returns = study.final_returns()
    lines = [f"trial {best.number} of a study of {len(study.trials())} trials reached {best.value:.1f} in its own run."]
    for name, by_seed in returns.items():
        scores = [value for value in by_seed.values() if value is not None]
        if len(scores) > 1:
            mean = sum(scores) / len(scores)
            lines.append(f"{name} on {len(scores)} new seeds: {mean:.1f}{describe_interval(scores)}.")
    tuned, default = returns.values()
    pairs = [(tuned.get(seed), default[seed]) for seed in default]
    gains = [one - other for one, other in pairs if one is not None and other is not None]
    if len(gains) > 1:
        mean, half = mean_interval(gains)
        verdict = "no difference shown" if half is None or abs(mean) <= half else "better" if mean > 0 else "worse"
        lines.append(f"difference: {mean:.1f}{describe_interval(gains, 'difference')}; {verdict}.")
    path = study.write_preset(config, "\n".join([f"Found by rl-training tune: {lines[0]}", *lines[1:]]))
    console.print()
    for line in lines:
        console.print(line, soft_wrap=True)
    print_facts(console, [
        *((name, escape(shorten(value))) for name, value in best.params.items()),
        ("preset", quote(path)), ("train", f"rl-training train --config {quote(path)}"),
    ])  # fmt: skip
