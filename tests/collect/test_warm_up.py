"""Random actions before learning starts: held for a while, so that they move an environment somewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from rl_training.algorithms.base import Algorithm
from rl_training.collect.local import Behaviour
from rl_training.envs.factory import read_recipe
from rl_training.envs.probe import probe_spaces

STEPS = 4_000


def make_behaviour(env_id: str, num_envs: int) -> Behaviour:
    learner = Algorithm()
    learner.weight = nn.Parameter(torch.zeros(1))  # its device is that of its parameters
    return Behaviour(learner, probe_spaces(read_recipe(env_id, {})), num_envs, np.random.default_rng(0))


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "CartPole-v1"])
@pytest.mark.parametrize("hold", [1.0, 8.0])
def test_a_random_action_is_held_for_as_long_as_asked_in_the_mean(env_id: str, hold: float) -> None:
    behaviour = make_behaviour(env_id, 3)
    actions = np.stack([behaviour.act_randomly(3, None, hold) for _ in range(STEPS)]).reshape(STEPS, 3)
    changed = (actions[1:] != actions[:-1]).mean(0)
    drawn_equal = 0.5 if env_id == "CartPole-v1" else 0.0  # a new draw of two actions is half of the time the old one
    assert changed == pytest.approx(np.full(3, (1 - drawn_equal) / hold), rel=0.2)
    assert not np.array_equal(actions[:, 0], actions[:, 1])


def test_with_masks_every_action_is_new_and_legal() -> None:
    behaviour = make_behaviour("CartPole-v1", 2)
    behaviour.act_randomly(2, None, 100.0)
    for legal in (0, 1, 0, 1):
        masks = np.zeros((2, 2), dtype=bool)
        masks[:, legal] = True
        assert behaviour.act_randomly(2, masks, 100.0).tolist() == [legal, legal]


def test_held_actions_go_on_after_a_resume() -> None:
    first, second = make_behaviour("Pendulum-v1", 4), make_behaviour("Pendulum-v1", 4)
    for _ in range(5):
        first.act_randomly(4, None, 8.0)
    second.load_state_dict(first.state_dict())
    second.rng.bit_generator.state = first.rng.bit_generator.state
    for _ in range(30):
        assert np.array_equal(first.act_randomly(4, None, 8.0), second.act_randomly(4, None, 8.0))
