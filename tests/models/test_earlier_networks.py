"""Checkpoints of networks that have changed since: one sentence says so, and nothing is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from registry_contract import first_kind, kind_config
from rl_training.errors import UserError
from rl_training.record.checkpoints import load_checkpoint, save_checkpoint
from rl_training.run.learner import load_policy
from rl_training.run.workflows import resume_training, train


def with_the_layer_before_the_product(state: dict[str, Any]) -> dict[str, Any]:
    """IQN and FQF on images had the layer after the convolutions in psi."""
    return {name.replace("_network.middle.", "_network.trunk."): value for name, value in state.items()}


def without_the_normalization(state: dict[str, Any]) -> dict[str, Any]:
    """TD3, DDPG and D4PG had no LayerNorm behind the convolutions."""
    return {name: value for name, value in state.items() if ".encoder.4." not in name}


EARLIER = {
    "iqn": (with_the_layer_before_the_product, "q_network.middle.0.bias"),
    "fqf": (with_the_layer_before_the_product, "q_network.middle.0.bias"),
    "td3": (without_the_normalization, "model.actor.encoder.4.bias"),
    "d4pg": (without_the_normalization, "model.actor.encoder.4.bias"),
}


@pytest.mark.parametrize("algo", EARLIER)
def test_an_earlier_network_is_refused_in_one_sentence(algo: str, tmp_path: Path) -> None:
    path = train(kind_config(algo, tmp_path, first_kind(algo), "image"), console=False).checkpoint_path
    tree, (earlier, missing) = load_checkpoint(path), EARLIER[algo]
    tree["algorithm"] = earlier(tree["algorithm"])
    save_checkpoint(path, tree)
    for load in (load_policy, lambda path: resume_training(path, total_timesteps=96, console=False)):
        with pytest.raises(UserError, match=f"lacks '{missing}'; .* whose networks were different.$"):
            load(path)
