"""A model card in Markdown: what an exported policy is, how well it plays, how to use it and train it again."""

from __future__ import annotations

from typing import Any

from rl_training.config.train_config import TrainConfig, dump_yaml
from rl_training.tools.export import Export

USES = {
    "onnx": 'from rl_training.deploy import Policy\n\naction = Policy("{}").predict(obs)  # numpy and onnxruntime',
    "torch": 'import torch\n\nprogram = torch.export.load("{}").module()\naction = program(obs)[0]  # a batch of rows',
}


def render_card(export: Export, config: TrainConfig, scores: dict[str, Any], interval: tuple[float, float]) -> str:
    """The card of a policy; `scores` are an evaluation's metrics and `interval` that of its mean return."""
    facts, parity, returns = export.facts, export.facts["parity"], scores["eval_returns"]
    low, high = interval
    values = "".join(
        f"| {kind} | `{one['name']}` | {one['dtype']} | {', '.join(map(str, one['shape']))} |\n"
        for kind in ("inputs", "outputs")
        for one in facts[kind]
    )
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    return f"""# {config.algo} on {config.env_id}

The deterministic policy after {facts["step"]:,} environment steps, trained with seed {config.seed}.

## Scores

| Mean return | 95 % interval | Range | Mean length | Episodes |
| --- | --- | --- | --- | --- |
| {scores["eval_return_mean"]:.1f} | {low:.1f} to {high:.1f} | {min(returns):.1f} to {max(returns):.1f} | \
{scores["eval_length_mean"]:.1f} | {len(returns)} |

The episodes were not used in training. The interval (Student's t) is of this one policy over episodes; it does not say
how another training seed would do.

## Use

```python
{USES[facts["format"]].format(export.path.name)}
```

| | Name | Type | Shape |
| --- | --- | --- | --- |
{values}
Compared with the checkpoint on {parity["observations"]:,} random observations: {parity["different"]} actions differ \
by more than {parity["tolerance"]:g}, the largest difference is {parity["max_abs_difference"]:.2g}.

## Train it again

Save this as `config.yaml` and run `rl-training train --config config.yaml`.

```yaml
{dump_yaml(config.model_dump(mode="json")).rstrip()}
```

Made with {versions}.
"""
