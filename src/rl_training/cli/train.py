"""`rl-training train`: one run, or one per seed, in turn or several at a time."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from rl_training.cli import options
from rl_training.cli.exits import BY_SIGNAL, describe, describe_warning, exit_after_signal
from rl_training.cli.options import Text, option, whole_number
from rl_training.cli.screen import TABLE_STYLE, make_console, print_run, print_seeds, repeat_names
from rl_training.errors import UserError, counted
from rl_training.tools.processes import Job, run_jobs

if TYPE_CHECKING:
    from rl_training.config.train_config import TrainConfig

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
    jobs: Annotated[Text, option("How many seeds run in parallel.", metavar="N")] = None,
    name: Annotated[Text, option("Name of the run's folder; -s<seed> is added with --seeds.", metavar="NAME")] = None,
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
    from rl_training.cli.options import build_config

    if seed is not None and seeds is not None:
        raise UserError("--seed and --seeds were both given; give one of them.")
    every = None if seeds is None else read_seeds(seeds)
    processes = 1 if jobs is None else whole_number("--jobs", jobs, least=1)
    if every is None and processes > 1:
        raise UserError(f"--jobs is {processes}, but there is one run; give several --seeds, such as 1,2,3.")
    built = build_config(
        options.one_config(preset, config), algo, env, settings, modules, output_dir=output_dir,
        total_timesteps=total_timesteps, num_envs=num_envs, eval_episodes=eval_episodes, seed=seed,
        execution_backend=execution_backend, device=device, name=name,
    )  # fmt: skip
    if every is None:
        run_one(built, modules, continues)
        return
    changes = [{"seed": one, "name": built.name and f"{built.name}-s{one}"} for one in every]
    configs = [built.model_copy(update=change) for change in changes]
    run_seeds(configs, processes, modules, continues)


def read_seeds(text: str) -> list[int]:
    """The seeds in `1,2,3`; each may occur once."""
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise UserError(f"--seeds is {text!r}; it must be whole numbers with commas between them, such as 1,2,3.")
    seeds = [whole_number("--seeds", part.strip(), most=LARGEST_SEED) for part in text.split(",")]
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds is {text!r}; each seed may be given only once.")
    return seeds


def run_one(config: TrainConfig, modules: list[str] | None, continues: bool) -> None:
    """Run the config and print the result."""
    from rl_training.run import workflows

    result = workflows.train(config, console=True, raise_on_signal=False, continues=continues)
    named = config.env_id if ":" in config.env_id and config.env_id in config.named else None
    networks = [name for name in config.callables[1:] if name in config.named]
    title = f"{config.algo} on {config.env_id}"
    print_run(make_console(), result, title, repeat_names(named, modules, networks))
    exit_after_signal(result)


def run_seeds(configs: list[TrainConfig], processes: int, modules: list[str] | None, continues: bool) -> None:
    """Run the configs, in turn or in parallel, and print the results; a signal ends the series."""
    from rl_training.run import workflows

    console = make_console()
    runs: list[tuple[int, Any]] = []
    code = 0
    if processes > 1:
        jobs = [seed_job(console, config) for config in configs]
        code = run_parallel(console, jobs, processes, modules or [], continues)
        runs = [(job.config.seed, job) for job in jobs if job.metrics is not None]
    for config in configs if processes == 1 else ():
        result = workflows.train(config, console=True, raise_on_signal=False, continues=continues)
        runs.append((config.seed, result))
        if result.stop_signal is not None:
            code = BY_SIGNAL + result.stop_signal
            break
    if runs:
        print_seeds(console, runs, f"{configs[0].algo} on {configs[0].env_id}")
    raise typer.Exit(code)


def seed_job(console: Console, config: TrainConfig) -> Job:
    """The run of one seed in a process, which prints its warnings and how it ended."""

    def say(what: str) -> None:
        console.print(f"seed {config.seed}{what}", markup=False, soft_wrap=True)

    def ended(job: Job) -> None:
        if job.error is not None:
            say(f" failed: {describe(job.error)[1]}")
        elif not console.is_terminal:
            say(f": {job.state} at step {job.step:,}")

    return Job(config, ended, warned=lambda warning: say(f": {describe_warning(warning)}"))


def run_parallel(console: Console, jobs: list[Job], processes: int, modules: list[str], continues: bool) -> int:
    """Run the jobs, shown in one table; return the exit code."""
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show() -> None:
            live.update(show_jobs(jobs), refresh=console.is_terminal)

        stopped = run_jobs(iter(jobs), processes, modules, show, continues)
    if stopped:
        return BY_SIGNAL + stopped
    return max(describe(job.error)[0] if job.error else BY_SIGNAL + job.signal if job.signal else 0 for job in jobs)


def show_jobs(jobs: list[Job]) -> Table:
    """One row per run: progress, speed and return."""
    from rl_training.record.logger import format_duration

    first = jobs[0].config
    table = Table(title=f"{counted(len(jobs), 'run')} of {first.algo} on {first.env_id}", **TABLE_STYLE)
    widths = {"state": 8, "steps": len(f"{first.total_timesteps:,}"), "": 4, "eta": 7, "return": 6}
    for name in ("seed", "state", "steps", "", "steps/s", "eta", "return"):  # the same width in every frame
        justify: Any = "left" if name == "state" else "right"
        table.add_column(name, justify=justify, no_wrap=True, min_width=widths.get(name))
    for job in jobs:
        share = min(1.0, job.step / job.config.total_timesteps)
        table.add_row(
            str(job.config.seed), job.state, f"{job.step:,}", f"{share:.0%}", f"{job.speed:,.0f}" if job.speed else "",
            format_duration(job.seconds_left) if job.state == "running" and job.speed else "",
            "" if job.mean is None else f"{job.mean:.1f}",
        )  # fmt: skip
    return table
