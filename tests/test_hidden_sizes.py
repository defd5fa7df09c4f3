"""`hidden_sizes` and its kin over the whole registry: no hidden layer at all, and layers behind an image encoder."""

from __future__ import annotations

from pathlib import Path

import pytest

from resume_cases import SPECS, tiny
from rl_training.runtime.workflows import train


@pytest.mark.parametrize("algo", SPECS)
def test_every_algorithm_learns_without_a_hidden_layer(algo: str, tmp_path: Path) -> None:
    """For Dreamer an empty list means the widths of its `size`."""
    names = [name for name in SPECS[algo].params.model_fields if name.endswith("hidden_sizes")]
    config = tiny(algo, tmp_path, total_timesteps=64, eval_episodes=1, kwargs={name: [] for name in names})
    result = train(config, console=False)
    assert result.metrics["updates"] > 0
