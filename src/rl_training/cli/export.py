"""`rl-training export`: write a checkpoint's policy to one file that runs without rl-training."""

from __future__ import annotations

from typing import Annotated, Any

from rich.markup import escape

from rl_training.cli.options import (
    CheckpointOption,
    ImportOption,
    OwnEnvOption,
    Text,
    find_checkpoint,
    name_environment,
    option,
    whole_number,
)
from rl_training.cli.screen import make_console, mean_interval, print_facts, quote
from rl_training.errors import UserError
from rl_training.safe_files import write_text

FRESH_SEED = 10_000  # added to the run's seed, so a card does not use the episodes that chose `best.ckpt`


def export(
    checkpoint: CheckpointOption,
    file_format: Annotated[
        str, option("onnx, for onnxruntime; torch, for torch.export.load.", "--format", metavar="NAME")
    ] = "onnx",
    output: Annotated[Text, option("The file to write; default: next to the checkpoint.", metavar="FILE")] = None,
    card: Annotated[bool, option("Evaluate the policy and write a model card next to it.", "--card")] = False,
    num_episodes: Annotated[str, option("Evaluation episodes for the card.", metavar="N")] = "20",
    env: OwnEnvOption = None,
    modules: ImportOption = None,
) -> None:
    """Write the deterministic policy to a file that acts without rl-training.

    It maps the environment's observations to its actions; normalizer, scaling and masks are included.
    """
    episodes = whole_number("--num-episodes", num_episodes, least=2)
    if not card and env is not None:
        raise UserError("--env is for --card, which was not given; without it no environment is made.")
    named = name_environment(env, modules)
    from rl_training.run.learner import load_algorithm, read_checkpoint
    from rl_training.run.workflows import evaluate_checkpoint
    from rl_training.tools.export import export_policy

    path, names = find_checkpoint(checkpoint), tuple(modules or ())
    scores: dict[str, Any] = {}
    if card:  # first, so a missing environment leaves no partial result
        *_, config = load_algorithm(path, read_checkpoint(path), names)
        seed = config.seed + FRESH_SEED
        scores = evaluate_checkpoint(path, num_episodes=episodes, seed=seed, env=named, network=names)
    made = export_policy(path, file_format, output, names)
    facts, parity = made.facts, made.facts["parity"]
    if card:
        from rl_training.tools.report import render_card

        mean, half = mean_interval(scores["eval_returns"])
        interval = (mean - (half or 0.0), mean + (half or 0.0))
        text = render_card(made, config, scores, interval)
        write_text(made.path.with_name(f"{made.path.name}.md"), text)
    print_facts(make_console(), [
        ("policy", quote(made.path)),
        ("inputs", escape(describe(facts["inputs"]))),
        ("outputs", escape(describe(facts["outputs"]))),
        ("checked", f"{parity['observations']:,} observations, {parity['different']} actions differ from predict, "
                    f"largest difference {parity['max_abs_difference']:.2g}"),
        ("details", quote(made.path.with_name(f"{made.path.name}.json"))),
        ("card", quote(made.path.with_name(f"{made.path.name}.md")) if card else ""),
    ])  # fmt: skip


def describe(values: list[dict[str, Any]]) -> str:
    """`obs float32 (batch, 4)`."""
    return ", ".join(f"{value['name']} {value['dtype']} ({', '.join(map(str, value['shape']))})" for value in values)
