"""`rl-training eval`: whole episodes with a checkpoint's policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from rl_training.cli.options import (
    CheckpointOption,
    ImportOption,
    OwnEnvOption,
    StochasticOption,
    Text,
    find_checkpoint,
    name_environment,
    option,
    whole_number,
)
from rl_training.cli.screen import describe_return, make_console, print_facts, quote
from rl_training.errors import UserError

SHOWN = 20  # returns printed one by one


def evaluate(
    checkpoint: CheckpointOption,
    num_episodes: Annotated[Text, option("Episodes; default: eval_episodes of the run.", metavar="N")] = None,
    stochastic: StochasticOption = False,
    seed: Annotated[Text, option("Seed of the episodes; default: the run's seed.", metavar="N")] = None,
    render: Annotated[bool, option("Show the episodes in a window.", "--render")] = False,
    record_video: Annotated[Text, option("Write one video per episode.", metavar="DIR")] = None,
    imagine: Annotated[bool, option("Draw the world model's predictions next to the checkpoint.", "--imagine")] = False,
    env: OwnEnvOption = None,
    modules: ImportOption = None,
) -> None:
    """Evaluate a checkpoint on whole episodes."""
    episodes = None if num_episodes is None else whole_number("--num-episodes", num_episodes, least=1)
    first = None if seed is None else whole_number("--seed", seed)
    if render and record_video is not None:
        raise UserError("--render and --record-video were both given; give one of them.")
    named = name_environment(env, modules)
    from rl_training.run.workflows import evaluate_checkpoint

    path = find_checkpoint(checkpoint)
    pictures: list[Path] = []
    if imagine:
        from rl_training.tools.imagination import draw_imagination

        pictures = draw_imagination(path, Path(path).parent, seed=first, env=named)
    metrics = evaluate_checkpoint(
        path, num_episodes=episodes, deterministic=not stochastic, seed=first, record_video_dir=record_video,
        render=render, env=named, network=tuple(modules or ()),
    )  # fmt: skip
    kind = "sampled" if stochastic else "deterministic"
    print_evaluation(make_console(), path, metrics, kind, record_video, pictures)


def print_evaluation(
    console: Console, path: str, metrics: dict[str, Any], kind: str, video: str | None, pictures: Sequence[Path] = ()
) -> None:
    """Mean, standard deviation and range, then the returns."""
    returns = metrics["eval_returns"]
    listed = ", ".join(f"{value:.1f}" for value in returns[:SHOWN])
    more = f" and {len(returns) - SHOWN} more" if len(returns) > SHOWN else ""
    print_facts(console, [
        ("return", f"{describe_return(metrics)}, {kind}"),
        ("range", f"{min(returns):.1f} to {max(returns):.1f}"),
        ("length", f"{metrics['eval_length_mean']:.1f} steps on average"),
        ("returns", f"{listed}{more}"),
        ("videos", "" if video is None else quote(Path(video))),
        ("imagined", ", ".join(quote(picture) for picture in pictures)),
        ("checkpoint", quote(Path(path))),
    ])  # fmt: skip
