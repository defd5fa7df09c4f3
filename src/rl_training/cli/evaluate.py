"""`rl-training eval`: whole episodes with a checkpoint's policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from rl_training.cli.options import (
    CheckpointOption,
    ImportOption,
    StochasticOption,
    Text,
    find_checkpoint,
    import_modules,
    option,
    whole_number,
)
from rl_training.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = 20  # returns printed one by one


def evaluate(
    checkpoint: CheckpointOption,
    num_episodes: Annotated[Text, option("Episodes; else as many as the run's config says.", metavar="N")] = None,
    stochastic: StochasticOption = False,
    seed: Annotated[Text, option("Seed of the episodes; else the run's.", metavar="N")] = None,
    render: Annotated[bool, option("Show the episodes in a window.", "--render")] = False,
    record_video: Annotated[Text, option("Write one video per episode.", metavar="DIR")] = None,
    modules: ImportOption = None,
) -> None:
    """Evaluate a checkpoint in environments of its own."""
    episodes = None if num_episodes is None else whole_number("--num-episodes", num_episodes, least=1)
    first = None if seed is None else whole_number("--seed", seed)
    if render and record_video is not None:
        raise UserError("--render and --record-video were both given; give one of them.")
    import_modules(modules)
    from rl_training.cli.screen import make_console
    from rl_training.runtime.workflows import evaluate_checkpoint

    path = find_checkpoint(checkpoint)
    metrics = evaluate_checkpoint(
        path, num_episodes=episodes, deterministic=not stochastic, seed=first, record_video_dir=record_video,
        render=render,
    )  # fmt: skip
    print_evaluation(make_console(), path, metrics, "sampled" if stochastic else "deterministic", record_video)


def print_evaluation(console: Console, path: str, metrics: dict[str, Any], kind: str, video: str | None) -> None:
    """Mean, deviation and range, then the returns themselves."""
    from pathlib import Path

    from rl_training.cli.screen import describe_return, print_facts, quote

    returns = metrics["eval_returns"]
    listed = ", ".join(f"{value:.1f}" for value in returns[:SHOWN])
    more = f" and {len(returns) - SHOWN} more" if len(returns) > SHOWN else ""
    print_facts(console, [
        ("return", f"{describe_return(metrics)}, {kind}"),
        ("range", f"{min(returns):.1f} to {max(returns):.1f}"),
        ("length", f"{metrics['eval_length_mean']:.1f} steps on average"),
        ("returns", f"{listed}{more}"),
        ("videos", "" if video is None else quote(Path(video))),
        ("checkpoint", quote(Path(path))),
    ])  # fmt: skip
