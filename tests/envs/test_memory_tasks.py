"""The tasks that need memory: a sign that is seen once, and CartPole without velocities."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rl_training.envs.memory_tasks import CartPolePositions, TMaze


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_only_the_first_observation_of_the_maze_says_where_to_turn(seed: int) -> None:
    env = TMaze(length=5)
    first, _ = env.reset(seed=seed)
    sign = int(first[0] > 0)
    later = [env.step(0)[0].tolist() for _ in range(5)]
    assert later == [[0.0, 0.0]] * 4 + [[0.0, 1.0]]
    assert env.step(sign)[1:4] == (1.0, True, False)
    env.reset(seed=seed)
    for _ in range(5):
        env.step(1)
    assert env.step(1 - sign)[1] == 0.0


def test_positions_are_those_of_cartpole() -> None:
    env, plain = CartPolePositions(), gym.make("CartPole-v1")
    seen, known = env.reset(seed=3)[0], plain.reset(seed=3)[0]
    for _ in range(5):
        np.testing.assert_array_equal(seen, known[[0, 2]])
        seen, known = env.step(1)[0], plain.step(1)[0]


def test_the_maze_is_an_environment_of_gymnasium() -> None:
    check_env(TMaze(), skip_render_check=True)
