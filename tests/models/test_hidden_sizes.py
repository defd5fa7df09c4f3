"""`hidden_sizes` and its kin over the whole registry: no hidden layer at all, and layers behind an image encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium.spaces as gs
import numpy as np
import pytest
from torch import nn

import env_zoo
from resume_cases import ONE_PER_LEARNER, SPECS, tiny
from rl_training.config.params import read_params
from rl_training.envs.factory import read_recipe
from rl_training.envs.probe import probe_spaces
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError
from rl_training.models.mlp_q_network import NoisyLinear
from rl_training.run.workflows import train


@pytest.mark.parametrize("algo", ONE_PER_LEARNER)
def test_every_algorithm_learns_without_a_hidden_layer(algo: str, tmp_path: Path) -> None:
    """For Dreamer an empty list means the widths of its `size`."""
    names = [name for name in SPECS[algo].params.model_fields if name.endswith("hidden_sizes")]
    config = tiny(algo, tmp_path, total_timesteps=64, eval_episodes=1, kwargs={name: [] for name in names})
    result = train(config, console=False)
    assert result.metrics["updates"] > 0


class Screen(env_zoo.Image):
    """Large enough for the three convolutions of the DQN paper, whose features are 3 x 3 x 64 here."""

    shape = (52, 52, 1)


LARGE = probe_spaces(read_recipe("Screen", {}, Screen))
SMALL = probe_spaces(read_recipe("env_zoo:MinAtarLike", {}))


def layers_of(algo: str, spaces: EnvSpaces, **kwargs: Any) -> list[tuple[bool, int, int]]:
    """(noisy, inputs, outputs) of every layer behind the convolutions."""
    spec = SPECS[algo]
    network = spec.build(spec.params(**kwargs), spaces).q_network  # type: ignore[attr-defined]
    layers = [part for part in network.modules() if isinstance(part, (nn.Linear, NoisyLinear))]
    return [(isinstance(part, NoisyLinear), part.weight.shape[1], part.weight.shape[0]) for part in layers]


def test_heads_on_images_are_those_of_the_papers() -> None:
    assert layers_of("dqn", LARGE) == [(False, 576, 512), (False, 512, 2)]
    assert layers_of("noisy_dqn", LARGE) == [(True, 576, 512), (True, 512, 2)]
    # both streams' hidden layers stand as one
    assert layers_of("dueling_dqn", LARGE) == [(False, 576, 1024), (False, 512, 1), (False, 512, 2)]
    assert layers_of("rainbow_dqn", LARGE, num_atoms=11) == [(True, 576, 1024), (True, 512, 11), (True, 512, 22)]
    inputs = layers_of("dqn", SMALL)[0][1]
    assert layers_of("noisy_dqn", SMALL)[0] == (True, inputs, 128)


@pytest.mark.parametrize("algo", ["iqn", "fqf"])
def test_fractions_multiply_the_features_of_the_convolutions(algo: str) -> None:
    """Dabney et al. 2018, section 3: psi is the convolutions, then come phi and two layers on their product."""
    fractions = [(False, 3136, 32)] if algo == "fqf" else []
    atari = EnvSpaces.from_gym("Screen", gs.Box(0, 255, (4, 84, 84), np.uint8), gs.Discrete(6))
    assert layers_of(algo, atari) == [(False, 64, 3136), (False, 3136, 512), (False, 512, 6), *fractions]
    fractions = [(False, 576, 32)] if algo == "fqf" else []
    embedding = (False, 4, 576)
    assert layers_of(algo, LARGE, embedding_dim=4, noisy=True) == [
        embedding, (True, 576, 512), (True, 512, 2), *fractions,
    ]  # fmt: skip
    assert layers_of(algo, LARGE, embedding_dim=4, dueling=True) == [
        embedding, (False, 576, 1024), (False, 512, 1), (False, 512, 2), *fractions,
    ]  # fmt: skip
    assert layers_of(algo, LARGE, embedding_dim=4, head_hidden_sizes=(7, 9), noisy=True) == [
        embedding, (False, 576, 7), (True, 7, 9), (True, 9, 2), *fractions,
    ]  # fmt: skip
    assert layers_of(algo, LARGE, embedding_dim=4, head_hidden_sizes=()) == [embedding, (False, 576, 2), *fractions]
    vectors = probe_spaces(read_recipe("CartPole-v1", {}))
    fractions = [(False, 5, 32)] if algo == "fqf" else []
    assert layers_of(algo, vectors, hidden_sizes=(7, 5), embedding_dim=4, noisy=True) == [
        (False, 4, 7), (True, 7, 5), (False, 4, 5), (True, 5, 2), *fractions,
    ]  # fmt: skip


def test_hidden_layers_behind_the_convolutions_may_be_given() -> None:
    assert layers_of("dqn", LARGE, head_hidden_sizes=(7, 9)) == [(False, 576, 7), (False, 7, 9), (False, 9, 2)]
    assert layers_of("dqn", LARGE, head_hidden_sizes=()) == [(False, 576, 2)]
    assert layers_of("noisy_dqn", LARGE, head_hidden_sizes=(7, 9)) == [(False, 576, 7), (True, 7, 9), (True, 9, 2)]
    assert layers_of("dueling_dqn", LARGE, head_hidden_sizes=(7, 9))[:2] == [(False, 576, 7), (False, 7, 18)]
    vectors = probe_spaces(read_recipe("CartPole-v1", {}))
    assert layers_of("dqn", vectors, hidden_sizes=(5,), head_hidden_sizes=(7,)) == [(False, 4, 5), (False, 5, 2)]


@pytest.mark.parametrize("width", [-1, 0, 16385])
def test_a_layer_without_units_or_with_too_many_is_refused_by_name(width: int) -> None:
    tried = set()
    for spec in SPECS.values():
        for name in (name for name in spec.params.model_fields if name.endswith("hidden_sizes")):
            with pytest.raises(UserError, match=rf"{name}\.0 is {width}"):
                read_params(spec.params, {name: [width]})
            tried.add(name)
    assert {"hidden_sizes", "head_hidden_sizes", "model_hidden_sizes", "discriminator_hidden_sizes"} <= tried
