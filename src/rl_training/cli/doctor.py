"""`rl-training doctor`: check this machine, or an environment with an algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from rl_training.cli.options import AlgoOption, EnvOption, ImportOption, SetOption, StepsOption, name_environment
from rl_training.cli.screen import make_console, print_facts
from rl_training.errors import UserError

if TYPE_CHECKING:
    from rl_training.tools.doctor import Check

NEEDED = ("torch", "gymnasium", "numpy", "pydantic", "PyYAML", "typer", "rich", "tensorboard")
OPTIONAL = {
    "ale-py": ("atari", "Atari games"), "opencv-python-headless": ("atari", "Atari preprocessing"),
    "mujoco": ("mujoco", "MuJoCo tasks"), "pygame": ("video", "eval --render"),
    "moviepy": ("video", "eval --record-video"), "matplotlib": ("results", "learning curves"),
    "stable-baselines3": ("bench", "the speed comparison"),
}  # fmt: skip
MARKS = {"ok": "[green]✓[/green]", "warn": "[yellow]![/yellow]", "fail": "[red]✗[/red]"}


def doctor(
    env: EnvOption = None,
    algo: AlgoOption = None,
    total_timesteps: StepsOption = None,
    modules: ImportOption = None,
    settings: SetOption = None,
) -> None:
    """Check this machine or, with --env ID [--algo NAME], an environment and the cost of training on it."""
    console = make_console()
    if env is not None:
        name_environment(env, modules)
        _check_environment(console, env, algo, settings or [], total_timesteps)
        return
    if algo is not None or settings or total_timesteps:
        raise UserError("--env is missing; give the environment to check, e.g. doctor --env CartPole-v1 --algo ppo.")
    _show_machine(console)


def _show_machine(console: Console) -> None:
    import os
    import platform

    import torch

    import rl_training

    console.print("[bold]versions[/bold]")
    python = f"{platform.python_version()} on {platform.platform()}"
    print_facts(console, [("rl-training", rl_training.__version__), ("python", python),
                          *((name, _version(name) or "[red]missing[/red]") for name in NEEDED)])  # fmt: skip
    console.print("\n[bold]devices[/bold]")
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    print_facts(console, [
        ("cpu", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads unless a run chooses"),
        *((f"cuda:{i}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB") for i, gpu in enumerate(gpus)),
        ("gpu", "" if gpus else "none available to torch; everything runs on the CPU"),
    ])  # fmt: skip
    console.print("\n[bold]optional packages[/bold]")
    print_facts(console, [(name, _describe_package(name, *use)) for name, use in OPTIONAL.items()])


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _describe_package(name: str, extra: str, use: str) -> str:
    version = _version(name)
    if version is not None:
        return f"{version} [dim]({use})[/dim]"
    return rf"[yellow]not installed[/yellow], needed for {use}: pip install 'rl-training\[{extra}]'"


def _check_environment(console: Console, env: str, algo: str | None, settings: list[str], budget: str | None) -> None:
    from rl_training.cli.overrides import apply_settings, build_config
    from rl_training.config.spec import get_algorithm_spec
    from rl_training.envs.probe import probe
    from rl_training.envs.recipe import read_recipe
    from rl_training.tools import doctor as checks

    if algo is None:
        if outside := [setting for setting in settings if not setting.startswith("env_kwargs.")]:
            raise UserError(f"--set {outside[0]!r} is not an env_kwargs key; add --algo NAME, or set env_kwargs.KEY.")
        config, spec, data = None, None, apply_settings({"env_id": env}, settings)
        recipe = read_recipe(env, data.get("env_kwargs", {}), env)
    else:
        spec = get_algorithm_spec(algo)
        config = build_config(None, algo, env, settings, total_timesteps=budget)
        recipe = read_recipe(config.env_id, config.env_kwargs, config.named)
    limit = checks.PROCESS_SECONDS if config is None else config.worker_timeout
    lives = checks.check_process(recipe, timeout=limit)
    looked = probe(recipe) if lives.status != "fail" else None  # it might never return
    console.print(f"[bold]{escape(env)}[/bold]" + (f" with [bold]{algo}[/bold]" if algo else ""))
    found = [_show(console, lives)]
    if looked is not None:
        found += [_show(console, check) for check in checks.check_environment(recipe, looked, spec)]
    if config is not None and not any(check.status == "fail" for check in found):
        found += [_show(console, check) for check in checks.check_algorithm(config)]
    _show_fixes(console, found)
    if any(check.status == "fail" for check in found):
        raise typer.Exit(1)


def _show(console: Console, check: Check) -> Check:
    console.print(f"  {MARKS[check.status]} {check.name.ljust(16)} {escape(check.detail)}", soft_wrap=True)
    return check


def _show_fixes(console: Console, found: list[Any]) -> None:
    fixes = [check for check in found if check.fix]
    console.print("\n[bold]to do[/bold]" if fixes else "\nnothing to fix")
    for check in fixes:
        console.print(f"  {MARKS[check.status]} {check.name}: {escape(check.fix)}", soft_wrap=True)
