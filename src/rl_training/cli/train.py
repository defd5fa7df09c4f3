"""`rl-training train`: one run, or one per seed, in turn or several at a time; `tune`: a search over runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from rl_training.cli import grid, options, screen
from rl_training.cli.options import Text, Texts, option, whole_number
from rl_training.errors import UserError, counted
from rl_training.tools.processes import Job, run_jobs

if TYPE_CHECKING:
    from rl_training.config.train_config import TrainConfig
    from rl_training.tools.tune import Study

LARGEST_SEED = 2**32 - 1


def train(
    preset: options.PresetArgument = None,
    config: options.ConfigOption = None,
    algo: options.AlgoOption = None,
    env: options.EnvOption = None,
    output_dir: options.OutputOption = None,
    total_timesteps: options.StepsOption = None,
    num_envs: options.NumEnvsOption = None,
    eval_episodes: Annotated[Text, option("Episodes per evaluation; 0 for none.", metavar="N")] = None,
    seed: Annotated[Text, option("Seed of all random numbers.", metavar="N")] = None,
    seeds: Annotated[Text, option("One run per seed, then the mean and its interval.", metavar="1,2,3")] = None,
    jobs: Annotated[Text, option("How many runs go in parallel.", metavar="N")] = None,
    with_grid: Annotated[
        bool, option("One run per combination of values: --set gamma=0.9,0.99. Then a table.", "--grid")
    ] = False,
    name: Annotated[
        Text, option("Name of the run's folder; -s<seed> is added with --seeds.", "--name", metavar="NAME")
    ] = None,
    continues: Annotated[
        bool, option("Resume the run of that --name, start it if there is none, or end if it is done.", "--continue")
    ] = False,
    execution_backend: Annotated[Text, option("Where environments are stepped.", metavar="NAME")] = None,
    device: options.DeviceOption = None,
    modules: options.ImportOption = None,
    settings: options.SetOption = None,
) -> None:
    """Train a policy: a preset such as ppo/cartpole, --config C, or --algo NAME --env ID.

    Ctrl-C or SIGTERM stops after the current update and saves (exit code 130 or 143); a second one stops at once.
    """
    if seed is not None and seeds is not None:
        raise UserError("--seed and --seeds were both given; give one of them.")
    every = None if seeds is None else read_seeds(seeds)
    processes = 1 if jobs is None else whole_number("--jobs", jobs, least=1)
    if every is None and processes > 1 and not with_grid:
        raise UserError(f"--jobs is {processes}, but there is one run; give several --seeds, such as 1,2,3, or --grid.")

    def build(given: list[str] | None) -> TrainConfig:
        made = options.build_config(
            options.one_config(preset, config), algo, env, given, modules, output_dir=output_dir,
            total_timesteps=total_timesteps, num_envs=num_envs, eval_episodes=eval_episodes, seed=seed,
            execution_backend=execution_backend, device=device, name=name,
        )  # fmt: skip
        options.check_parameters(made)
        return made

    if with_grid:
        configs, belong = grid.grid_configs(build, settings or [], every)
        run_grid(configs, belong, processes, modules, continues)
        return
    with grid.hint(settings or []):
        built = build(settings)
    if every is None:
        run_one(built, continues)
        return
    changes = [{"seed": one, "name": built.name and f"{built.name}-s{one}"} for one in every]
    run_seeds([built.model_copy(update=change) for change in changes], processes, modules, continues)


def read_seeds(text: str) -> list[int]:
    """The seeds in `1,2,3`; each may occur once."""
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise UserError(f"--seeds is {text!r}; it must be whole numbers with commas between them, such as 1,2,3.")
    seeds = [whole_number("--seeds", part.strip(), most=LARGEST_SEED) for part in text.split(",")]
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds is {text!r}; each seed may be given only once.")
    return seeds


def run_one(config: TrainConfig, continues: bool) -> None:
    """Run the config and print the result."""
    from rl_training.run import workflows

    result = workflows.train(config, console=True, raise_on_signal=False, continues=continues)
    title = f"{config.algo} on {config.env_id}"
    screen.print_run(screen.make_console(), result, title, config.named_options)
    screen.exit_after_signal(result)


def run_seeds(configs: list[TrainConfig], processes: int, modules: list[str] | None, continues: bool) -> None:
    """Run the configs, which differ by their seeds, and print the results."""
    console = screen.make_console()
    names = [f"seed {config.seed}" for config in configs]
    results, code = run_all(console, configs, names, processes, modules, continues)
    if runs := [(config.seed, one) for config, one in zip(configs, results, strict=True) if one is not None]:
        screen.print_seeds(console, runs, f"{configs[0].algo} on {configs[0].env_id}")
    raise typer.Exit(code)


def run_grid(
    configs: list[TrainConfig], belong: list[grid.Combination], processes: int, modules: list[str] | None,
    continues: bool,
) -> None:  # fmt: skip
    """Run the configs of a grid and print a table of the combinations that they belong to."""
    console = screen.make_console()
    grid.print_plan(console, configs, belong)
    names = [f"{grid.describe(one)}, seed {config.seed}" for one, config in zip(belong, configs, strict=True)]
    results, code = run_all(console, configs, names, processes, modules, continues)
    if runs := [(one, result) for one, result in zip(belong, results, strict=True) if result is not None]:
        grid.print_grid(console, runs, configs[0].output_dir)
    raise typer.Exit(code)


def run_all(
    console: Console, configs: list[TrainConfig], names: list[str], processes: int, modules: list[str] | None,
    continues: bool,
) -> tuple[list[Any], int]:  # fmt: skip
    """Run the configs, in turn or in parallel; return the result of each that has one, and the exit code.

    A signal ends the series.
    """
    from rl_training.run import workflows

    if processes > 1:
        jobs = [named_job(console, config, name) for config, name in zip(configs, names, strict=True)]
        code = run_parallel(console, jobs, names, processes, modules or [], continues)
        return [job if job.metrics is not None else None for job in jobs], code
    results: list[Any] = [None] * len(configs)
    for i, config in enumerate(configs):
        results[i] = workflows.train(config, console=True, raise_on_signal=False, continues=continues)
        if results[i].stop_signal is not None:
            return results, screen.BY_SIGNAL + results[i].stop_signal
    return results, 0


def named_job(console: Console, config: TrainConfig, name: str) -> Job:
    """A run in a process, which prints its warnings and how it ended."""

    def say(what: str) -> None:
        console.print(f"{name}{what}", markup=False, soft_wrap=True)

    def ended(job: Job) -> None:
        if job.error is not None:
            say(f" failed: {screen.describe(job.error)[1]}")
        elif not console.is_terminal:
            say(f": {job.state} at step {job.step:,}")

    return Job(config, ended, warned=lambda warning: say(f": {screen.describe_warning(warning)}"))


def run_parallel(
    console: Console, jobs: list[Job], names: list[str], processes: int, modules: list[str], continues: bool
) -> int:
    """Run the jobs, shown in one table; return the exit code."""
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show() -> None:
            live.update(show_jobs(jobs, names), refresh=console.is_terminal)

        stopped = run_jobs(iter(jobs), processes, modules, show, continues)
    if stopped:
        return screen.BY_SIGNAL + stopped
    failed = [screen.describe(job.error)[0] for job in jobs if job.error]
    ended = [screen.BY_SIGNAL + job.signal for job in jobs if job.signal and not job.error]
    return max([0, *failed, *ended])


def show_jobs(jobs: list[Job], names: list[str]) -> Table:
    """One row per run: progress, speed and return."""
    from rl_training.record.logger import format_duration

    first = jobs[0].config
    table = Table(title=f"{counted(len(jobs), 'run')} of {first.algo} on {first.env_id}", **screen.TABLE_STYLE)
    widths = {"state": 8, "steps": len(f"{first.total_timesteps:,}"), "": 4, "eta": 7, "return": 6}
    for column in ("run", "state", "steps", "", "steps/s", "eta", "return"):  # the same width in every frame
        justify: Any = "left" if column in ("run", "state") else "right"
        table.add_column(column, justify=justify, no_wrap=True, min_width=widths.get(column))
    for job, name in zip(jobs, names, strict=True):
        share = min(1.0, job.step / job.config.total_timesteps)
        table.add_row(
            escape(name), job.state, f"{job.step:,}", f"{share:.0%}", f"{job.speed:,.0f}" if job.speed else "",
            format_duration(job.seconds_left) if job.state == "running" and job.speed else "",
            "" if job.mean is None else f"{job.mean:.1f}",
        )  # fmt: skip
    return table


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
    count, workers = whole_number("--trials", trials, least=1), whole_number("--jobs", jobs, least=1)
    seeds = whole_number("--final-seeds", final_seeds)
    if seeds == 1:
        raise UserError("--final-seeds is '1'; an interval needs at least 2, and 0 compares nothing.")
    source = options.one_config(preset, config)
    built = options.build_config(source, algo, env, settings, modules, total_timesteps=total_timesteps)
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

    console, folder = screen.make_console(), opened.folder
    title = escape(f"{built.algo} on {built.env_id}")
    console.print(f"[bold]{title}[/bold]: {counted(count, 'trial')} in {screen.quote(folder)}")
    screen.print_facts(console, [(name, escape(one.describe())) for name, one in opened.space.items()])
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
        console.print(f"\nstopped; the same command continues the study in {screen.quote(folder)}")
        raise typer.Exit(screen.BY_SIGNAL + stopped)
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
            lines.append(f"{name} on {len(scores)} new seeds: {mean:.1f}{screen.describe_interval(scores)}.")
    tuned, default = returns.values()
    pairs = [(tuned.get(seed), default[seed]) for seed in default]
    gains = [one - other for one, other in pairs if one is not None and other is not None]
    if len(gains) > 1:
        mean, half = screen.mean_interval(gains)
        verdict = "no difference shown" if half is None or abs(mean) <= half else "better" if mean > 0 else "worse"
        lines.append(f"difference: {mean:.1f}{screen.describe_interval(gains, 'difference')}; {verdict}.")
    path = study.write_preset(config, "\n".join([f"Found by rl-training tune: {lines[0]}", *lines[1:]]))
    console.print()
    for line in lines:
        console.print(line, soft_wrap=True)
    screen.print_facts(console, [
        *((name, escape(shorten(value))) for name, value in best.params.items()),
        ("preset", screen.quote(path)), ("train", f"rl-training train --config {screen.quote(path)}"),
    ])  # fmt: skip
