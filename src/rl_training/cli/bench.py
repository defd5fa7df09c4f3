"""`rl-training bench`: show where the time of a short run goes, and what would make it faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table

from rl_training.cli import options
from rl_training.cli.options import Text, option, whole_number
from rl_training.cli.screen import make_console
from rl_training.errors import counted

if TYPE_CHECKING:
    from rl_training.tools.bench import Breakdown

DEFAULT_SECONDS = 10.0
BAR, WIDTH = 24, 80  # of the longest bar, and of the lines below the table


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
    from rl_training.cli.options import build_config

    source = options.one_config(preset, config)
    built = build_config(source, algo, env, settings, modules, num_envs=num_envs, device=device)
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
