"""What there is, what works and how fast: `rl-training list`, `config`, `doctor` and `bench`."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

import rl_training
from rl_training.cli import options
from rl_training.cli.options import Text, option, whole_number
from rl_training.cli.screen import make_console, print_facts
from rl_training.errors import UserError, counted, install

if TYPE_CHECKING:
    from rl_training.tools.bench import Breakdown

LIST_WIDTH = 80  # where there is no terminal
NEEDED = ("torch", "gymnasium", "numpy", "pydantic", "PyYAML", "typer", "rich", "tensorboard", "matplotlib")
OPTIONAL = {
    "ale-py": ("atari", "Atari games"), "opencv-python-headless": ("atari", "Atari preprocessing"),
    "mujoco": ("mujoco", "MuJoCo tasks"), "pygame": ("video", "eval --render"),
    "moviepy": ("video", "eval --record-video"), "mujoco-warp": ("warp", "MuJoCo on a GPU"),
    "stable-baselines3": ("bench", "the speed comparison"),
}  # fmt: skip
MARKS = {"ok": "[green]✓[/green]", "warn": "[yellow]![/yellow]", "fail": "[red]✗[/red]"}
DEFAULT_SECONDS = 10.0
BAR, WIDTH = 24, 80  # of the longest bar, and of the lines below the table


def list_algorithms() -> None:
    """Show every algorithm, and every preset with its result in recorded runs."""
    from rl_training.config.train_config import list_presets, read_reached
    from rl_training.experiment.registry import list_algorithm_specs

    specs, reached = list_algorithm_specs(), read_reached()
    every = max((spec.action_kinds for spec in specs), key=len)
    algorithms = Table(
        Column("name", style="bold cyan", no_wrap=True), "year", Column("actions", max_width=10), "images",
        "what it is", header_style="bold", box=SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    for spec in specs:
        actions = "any" if set(spec.action_kinds) == set(every) else ", ".join(spec.action_kinds)
        images = "yes" if "image" in spec.observation_kinds else "no"
        algorithms.add_row(spec.name, str(spec.year), actions, images, spec.scope.partition(";")[0].rstrip("."))
    names, scores = Column("preset", style="bold cyan", no_wrap=True), Column("reached", no_wrap=True)
    presets = Table(names, scores, header_style="bold", box=SIMPLE_HEAD)
    for name in list_presets():
        presets.add_row(name, describe_score(reached.get(name)))
    console = make_console()
    width = console.width if console.is_terminal else LIST_WIDTH
    console.print(algorithms, width=width)
    console.print(f"any: {', '.join(every)}", style="dim")
    console.print(presets, width=width)
    console.print("reached: median return over seeds in recorded runs (docs/results/gates.md)", style="dim")


def describe_score(score: Mapping[str, float] | None) -> str:
    """The result of a preset, in words."""
    if score is None:
        return "untrained"
    return f"{score['score']:,g} in {score['steps']:,} steps ({counted(int(score['seeds']), 'seed')})"


def show_config(
    preset: options.PresetArgument = None,
    config: options.ConfigOption = None,
    algo: options.AlgoOption = None,
    env: options.EnvOption = None,
    settings: options.SetOption = None,
    modules: options.ImportOption = None,
    schema: Annotated[bool, option("Print the JSON schema; --algo adds its hyper-parameters.", "--schema")] = False,
    presets: Annotated[bool, option("List the packaged presets.", "--list")] = False,
) -> None:
    """Print a config as YAML with every default filled in; nothing in it is called."""
    from rl_training.config.choices import resolve
    from rl_training.config.params import read_params
    from rl_training.config.spec import get_algorithm_spec
    from rl_training.config.train_config import dump_yaml, list_presets, load_config
    from rl_training.envs.factory import read_recipe

    config = options.one_config(preset, config)
    if presets:
        typer.echo("\n".join(list_presets()))
    elif schema:
        typer.echo(json.dumps(config_schema(algo if config is None else load_config(config).algo), indent=2))
    else:
        built = options.build_config(config, algo, env, settings, modules)
        params = read_params(get_algorithm_spec(built.algo).params, built.algo_kwargs)
        resolved = resolve(built, params, read_recipe(built.env_id, built.env_kwargs))
        typer.echo(dump_yaml(resolved.model_dump(mode="json")), nl=False)


def config_schema(algo: str | None) -> dict[str, Any]:
    """The JSON schema of a config file; for one algorithm also of its hyper-parameters under `algo_kwargs`."""
    from rl_training.config.settings import hyper_parameters
    from rl_training.config.train_config import TrainConfig
    from rl_training.envs.wrappers import WrapperOptions
    from rl_training.experiment.registry import get_algorithm_spec, list_algorithm_specs

    schema = TrainConfig.model_json_schema()
    parts = schema["properties"]
    parts["algo"]["enum"] = [spec.name for spec in list_algorithm_specs()] if algo is None else [algo]
    wrappers = WrapperOptions.model_json_schema()
    definitions = wrappers.pop("$defs", {})
    limit = {"type": "integer", "minimum": 1, "description": "Steps after which an episode is truncated."}
    parts["env_kwargs"]["properties"] = {"max_episode_steps": limit, "wrappers": wrappers}
    if algo is not None:
        hyper = get_algorithm_spec(algo).params.model_json_schema()
        definitions |= hyper.pop("$defs", {})
        fields = hyper["properties"]
        fields.pop("schedules", None)  # a config has them under the names of their numbers
        fields |= {name: {"$ref": "#/$defs/Schedule"} for name in hyper_parameters(algo) if name not in fields}
        parts["algo_kwargs"] = hyper | {"description": parts["algo_kwargs"]["description"]}
    return schema | {"$defs": definitions | schema.get("$defs", {})}


def doctor(
    env: options.EnvOption = None,
    algo: options.AlgoOption = None,
    total_timesteps: options.StepsOption = None,
    modules: options.ImportOption = None,
    settings: options.SetOption = None,
) -> None:
    """Check this machine or, with --env ID [--algo NAME], an environment and the cost of training on it."""
    console = make_console()
    if env is not None:
        options.name_environment(env, modules)
        _check_environment(console, env, algo, settings or [], total_timesteps)
    elif algo is not None or settings or total_timesteps:
        raise UserError("--env is missing; give the environment to check, e.g. doctor --env CartPole-v1 --algo ppo.")
    else:
        _show_machine(console)


def _show_machine(console: Console) -> None:
    import torch

    console.print("[bold]versions[/bold]")
    python = f"{platform.python_version()} on {platform.platform()}"
    print_facts(console, [("rl-training", rl_training.__version__), ("python", python),
                          *((name, _version(name, "[red]missing[/red]")) for name in NEEDED)])  # fmt: skip
    console.print("\n[bold]devices[/bold]")
    threads = counted(torch.get_num_threads(), "thread")
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    print_facts(console, [
        ("cpu", f"{os.cpu_count()} cores, torch uses {threads} unless a run chooses"),
        *((f"cuda:{i}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB") for i, gpu in enumerate(gpus)),
        ("gpu", "" if gpus else "none available to torch; everything runs on the CPU"),
    ])  # fmt: skip
    console.print("\n[bold]optional packages[/bold]")
    missing = "[yellow]not installed[/yellow], extra {}"
    print_facts(console, [(name, f"{_version(name, missing.format(extra))} [dim]({use})[/dim]")
                          for name, (extra, use) in OPTIONAL.items()])  # fmt: skip
    console.print(f"\nan extra is installed by {escape(install('NAME'))}", soft_wrap=True)


def _version(package: str, missing: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return missing


def _check_environment(console: Console, env: str, algo: str | None, settings: list[str], budget: str | None) -> None:
    from rl_training.config.spec import get_algorithm_spec
    from rl_training.envs.factory import read_recipe
    from rl_training.tools.doctor import Check, run_checks

    outside = [setting for setting in settings if not setting.startswith("env_kwargs.")]
    if algo is None and outside:
        raise UserError(f"--set {outside[0]!r} is not an env_kwargs key; add --algo NAME, or set env_kwargs.KEY.")
    spec = None if algo is None else get_algorithm_spec(algo)
    algo_or_any = algo or "ppo"  # which supports every environment
    config = options.build_config(None, algo_or_any, env, settings, total_timesteps=budget)
    kwargs = config.env_kwargs if algo else options.apply_settings({}, settings).get("env_kwargs", {})
    found: list[Check] = []
    for check in run_checks(read_recipe(env, kwargs, config.named), spec, config):
        if not found:
            console.print(f"[bold]{escape(env)}[/bold]" + (f" with [bold]{algo}[/bold]" if algo else ""))
        console.print(f"  {MARKS[check.status]} {check.name.ljust(16)} {escape(check.detail)}", soft_wrap=True)
        found.append(check)
    fixes = [check for check in found if check.fix]
    console.print("\n[bold]to do[/bold]" if fixes else "\nnothing to fix")
    for check in fixes:
        console.print(f"  {MARKS[check.status]} {check.name}: {escape(check.fix)}", soft_wrap=True)
    if any(check.status == "fail" for check in found):
        raise typer.Exit(1)


def bench(
    preset: options.PresetArgument = None,
    config: options.ConfigOption = None,
    algo: options.AlgoOption = None,
    env: options.EnvOption = None,
    total_timesteps: Annotated[Text, option("Steps to run; default: about ten seconds.", metavar="N")] = None,
    num_envs: options.NumEnvsOption = None,
    device: options.DeviceOption = None,
    modules: options.ImportOption = None,
    settings: options.SetOption = None,
) -> None:
    """Run a config briefly and show where the time goes and which settings would help; no files are kept."""
    source = options.one_config(preset, config)
    built = options.build_config(source, algo, env, settings, modules, num_envs=num_envs, device=device)
    limits: dict[str, float] = {"max_seconds": min(built.max_seconds or DEFAULT_SECONDS, DEFAULT_SECONDS)}
    if total_timesteps is not None:
        limits = {"total_timesteps": whole_number("--total-timesteps", total_timesteps, least=1)}
    from rl_training.tools.bench import benchmark

    console = make_console()
    if console.is_terminal:
        console.print("measuring, for half a minute or more (a minute where compiling is tried)", style="dim")
    print_breakdown(console, benchmark(built.model_copy(update=limits)))


def print_breakdown(console: Console, result: Breakdown) -> None:
    """One row per part: seconds, share, microseconds per environment step."""
    config = result.config
    console.print(
        f"[bold]{config.algo} on {config.env_id}[/bold]: {result.steps:,} steps, {result.updates:,} updates in "
        f"{result.total_seconds:.2f} s, [bold]{result.steps_per_second:,.0f} steps/s[/bold]"
    )
    console.print(
        f"device {config.device}, accelerate {config.accelerate}, threads {config.threads}, "
        f"{counted(config.num_envs, 'environment')} ({config.vectorization})",
        style="dim",
    )
    table = Table(header_style="bold")
    for name in ("part", "seconds", "share", "µs/step"):
        table.add_column(name, justify="left" if name == "part" else "right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for part, seconds in [(part, seconds) for part, seconds in result.seconds.items() if seconds]:
        share = result.share(part)
        cost = f"{1e6 * seconds / result.steps:,.1f}" if result.steps else "-"
        table.add_row(part, f"{seconds:.3f}", f"{share:.1%}", cost, "█" * round(BAR * share))
    console.print(table)
    lines = {
        "floor": result.describe_floor() if result.floor else "",
        "bottleneck": result.describe_bottleneck(),
        "faster": result.describe_trials() if result.trials else "",
    }
    grid = Table.grid(padding=(0, 2))
    for name, said in lines.items():
        if said:
            grid.add_row(f"[bold]{name}[/bold]", said)
    console.print(grid, width=WIDTH)
