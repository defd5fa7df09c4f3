"""`rl-training train`: one run, or one per seed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_training.cli.exits import exit_after_signal
from rl_training.cli.options import (
    AlgoOption,
    ConfigOption,
    DeviceOption,
    EnvOption,
    ImportOption,
    NumEnvsOption,
    OutputOption,
    PresetArgument,
    SetOption,
    StepsOption,
    Text,
    one_config,
    option,
    whole_number,
)
from rl_training.cli.screen import make_console, print_run, print_seeds, repeat_names
from rl_training.errors import UserError

if TYPE_CHECKING:
    from rl_training.config.train_config import TrainConfig

LARGEST_SEED = 2**32 - 1


def train(
    preset: PresetArgument = None,
    config: ConfigOption = None,
    algo: AlgoOption = None,
    env: EnvOption = None,
    output_dir: OutputOption = None,
    total_timesteps: StepsOption = None,
    num_envs: NumEnvsOption = None,
    eval_episodes: Annotated[Text, option("Episodes per evaluation; 0 for none.", metavar="N")] = None,
    seed: Annotated[Text, option("Seed of all random numbers.", metavar="N")] = None,
    seeds: Annotated[Text, option("One run per seed, then the mean and its interval.", metavar="1,2,3")] = None,
    jobs: Annotated[Text, option("How many seeds run in parallel.", metavar="N")] = None,
    name: Annotated[Text, option("Name of the run's folder; -s<seed> is added with --seeds.", metavar="NAME")] = None,
    continues: Annotated[
        bool, option("Resume the run of that --name, start it if there is none, or end if it is done.", "--continue")
    ] = False,
    execution_backend: Annotated[Text, option("Where environments are stepped.", metavar="NAME")] = None,
    device: DeviceOption = None,
    modules: ImportOption = None,
    settings: SetOption = None,
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
    source = one_config(preset, config)
    built = build_config(
        source, algo, env, settings, modules, output_dir=output_dir, total_timesteps=total_timesteps, num_envs=num_envs,
        eval_episodes=eval_episodes, seed=seed, execution_backend=execution_backend, device=device,
        name=name,
    )  # fmt: skip
    named = built.name
    changes = [{"seed": one, "name": named and f"{named}-s{one}"} for one in every or ()]
    configs = [built] if every is None else [built.model_copy(update=change) for change in changes]
    run_all(configs, several=every is not None, jobs=processes, modules=modules, continues=continues)


def read_seeds(text: str) -> list[int]:
    """The seeds in `1,2,3`; each may occur once."""
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise UserError(f"--seeds is {text!r}; it must be whole numbers with commas between them, such as 1,2,3.")
    seeds = [whole_number("--seeds", part.strip(), most=LARGEST_SEED) for part in text.split(",")]
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds is {text!r}; each seed may be given only once.")
    return seeds


def run_all(
    configs: list[TrainConfig], *, several: bool, jobs: int = 1, modules: list[str] | None = None,
    continues: bool = False,
) -> None:  # fmt: skip
    """Run the configs, in turn or in parallel, and print the results; a signal ends the series."""
    console = make_console()
    runs: list[tuple[int, Any]] = []
    title = f"{configs[0].algo} on {configs[0].env_id}"
    if jobs > 1:
        from rl_training.cli.parallel import run_parallel

        ended, code = run_parallel(console, configs, jobs, modules, continues)
        runs = [(job.config.seed, job) for job in ended if job.metrics is not None]
        if runs:
            print_seeds(console, runs, title)
        raise typer.Exit(code)
    from rl_training.run import workflows

    for config in configs:
        result = workflows.train(config, console=True, raise_on_signal=False, continues=continues)
        runs.append((config.seed, result))
        if not several:
            named = config.env_id if ":" in config.env_id and config.env_id in config.named else None
            networks = [name for name in config.callables[1:] if name in config.named]
            print_run(console, result, title, repeat_names(named, modules, networks))
        if result.stop_signal is not None:
            break
    if several:
        print_seeds(console, runs, title)
    exit_after_signal(result)
