"""Checkpoints of networks that have changed since: one sentence says so, and nothing is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from registry_contract import kind_config
from rl_training.errors import UserError
from rl_training.experiment.checkpointing import load_checkpoint, save_checkpoint
from rl_training.runtime.workflows import load_policy, resume_training, train

EARLIER = {"q_network.middle.": "q_network.trunk.", "target_network.middle.": "target_network.trunk."}


@pytest.mark.parametrize("algo", ["iqn", "fqf"])
def test_an_earlier_network_is_refused_in_one_sentence(algo: str, tmp_path: Path) -> None:
    """IQN and FQF used to have the layer after the convolutions before the product with the fractions."""
    path = train(kind_config(algo, tmp_path, "discrete", "image"), console=False).checkpoint_path
    tree = load_checkpoint(path)
    for new, old in EARLIER.items():
        names = [name for name in tree["algorithm"] if name.startswith(new)]
        assert names
        tree["algorithm"] |= {name.replace(new, old): tree["algorithm"].pop(name) for name in names}
    save_checkpoint(path, tree)
    for load in (load_policy, lambda path: resume_training(path, total_timesteps=96, console=False)):
        with pytest.raises(UserError, match=r"lacks 'q_network\.middle\.0\.bias'; .* whose networks were different\.$"):
            load(path)
