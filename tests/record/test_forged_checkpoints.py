"""A checkpoint with a value of the wrong kind in any place is refused in one sentence, or the value does not matter."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resume_cases import StopAt, tiny
from rl_training.cli.checkpoint import read_changes
from rl_training.errors import UserError
from rl_training.record.checkpoints import load_checkpoint, save_checkpoint
from rl_training.run.learner import load_policy
from rl_training.run.workflows import evaluate_checkpoint, resume_training, train

ODD: dict[str, Any] = {
    "array": np.arange(2), "empty": np.empty(0), "tensor": torch.arange(2.0), "scalar": np.float32(1), "text": "x",
    "none": None, "list": [1, [2]], "mapping": {"a": 1}, "negative": -5, "nan": float("nan"), "bytes": b"ab",
}  # fmt: skip
USES = {
    "predict": load_policy,
    "eval": lambda path: evaluate_checkpoint(path, num_episodes=1),
    "resume": lambda path: resume_training(path, total_timesteps=66, console=False),
    "resume --set": lambda path: read_changes(path, ["learning_rate=0.1"]),
}
UNREAD = ("source", "run", "machine")  # parts that an evaluation does not read
PARTS = ("schema", "config", "spaces", "algorithm", *UNREAD)
SLOW = pytest.mark.slow


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where plain values, lists and mappings are; of a long list only the first two entries."""
    if isinstance(tree, np.ndarray | torch.Tensor):
        return
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree[:2]) if isinstance(tree, list) else ()
    for key, part in inside:
        yield from places(part, (*at, key))
    if at:
        yield at


def put(tree: Any, at: tuple[Any, ...], value: Any) -> Any:
    """A copy of the tree with another value in one place."""
    first, *rest = at
    changed = copy.copy(tree)
    changed[first] = put(tree[first], tuple(rest), value) if rest else value
    return changed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("algo", "kinds", "parts"),
    [
        ("ppo", ["array"], ("config", "spaces", "run", "machine")),
        ("dqn", ["array"], ("source",)),
        *(pytest.param(algo, list(ODD), PARTS, marks=SLOW) for algo in ("ppo", "dqn")),
        *(pytest.param(algo, ["array"], PARTS, marks=SLOW) for algo in ("sac", "dreamer", "rlpd", "mbpo", "bc")),
    ],
)
def test_a_value_of_the_wrong_kind_is_one_sentence(
    algo: str, kinds: list[str], parts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tree = load_checkpoint(train(tiny(algo, Path("runs")), callbacks=[StopAt(64)], console=False).checkpoint_path)
    refused = 0
    for at in [at for at in places(tree) if at[0] in parts]:
        for kind in kinds:
            path = save_checkpoint("forged.ckpt", put(tree, at, ODD[kind]), durable=False)
            for name, use in USES.items():
                if at[0] in UNREAD and name in ("predict", "eval"):
                    continue
                try:
                    use(path)
                except UserError:
                    refused += 1
                except Exception as error:
                    pytest.fail(f"{name} with {kind} in {'.'.join(map(str, at))}: {type(error).__name__}: {error}")
    assert refused > 10
