"""`rl-training export`: a checkpoint's policy as one file for elsewhere."""

from __future__ import annotations

from typing import Annotated

from rl_training.cli.options import CheckpointOption, Text, find_checkpoint, option
from rl_training.cli.screen import make_console, print_facts, quote


def export(
    checkpoint: CheckpointOption,
    file_format: Annotated[
        str, option("onnx, for onnxruntime; torch, for torch.export.load.", "--format", metavar="NAME")
    ] = "onnx",
    output: Annotated[Text, option("The file to write; else next to the checkpoint.", metavar="FILE")] = None,
) -> None:
    """Write the deterministic policy to a file that acts without rl-training.

    It takes the environment's observations and gives its actions: normaliser, scaling and masks are inside.
    """
    from rl_training.tools.export import export_policy

    made = export_policy(find_checkpoint(checkpoint), file_format, output)
    facts, parity = made.facts, made.facts["parity"]
    print_facts(make_console(), [
        ("policy", quote(made.path)),
        ("inputs", describe(facts["inputs"])),
        ("outputs", describe(facts["outputs"])),
        ("checked", f"{parity['observations']:,} observations, {parity['different']} actions differ from predict, "
                    f"largest difference {parity['max_abs_difference']:.2g}"),
        ("details", quote(made.path.with_name(f"{made.path.name}.json"))),
    ])  # fmt: skip


def describe(values: list[dict[str, object]]) -> str:
    """`obs float32 (batch, 4)`."""
    return ", ".join(f"{v['name']} {v['dtype']} ({', '.join(map(str, v['shape']))})" for v in values)  # type: ignore[call-overload]
