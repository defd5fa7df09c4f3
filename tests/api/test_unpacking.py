"""`action, _ = model.predict(obs)`, as in Stable-Baselines3, is refused for an int; else it works as a plain int."""

# ruff: noqa: RUF059 - what is unpacked is not used
from __future__ import annotations

import json
import pickle
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from env_zoo import BoxActions, MultiBinaryActions, MultiDiscreteActions, ScalarActions, ShiftedDiscrete, Walk
from resume_cases import tiny
from rl_training.api.managed import ManagedAlgorithm
from rl_training.run.learner import DiscreteAction
from rl_training.run.workflows import train
from test_checkpoint_workflows import managed

HINT = r"predict returns the action alone, not \(action, state\); write action = model.predict\(obs\)"


@pytest.fixture(scope="module")
def discrete(tmp_path_factory: pytest.TempPathFactory) -> ManagedAlgorithm:
    result = train(tiny("a2c", tmp_path_factory.mktemp("discrete"), total_timesteps=16), console=False)
    return managed("a2c").load(result.checkpoint_path)


def test_a_discrete_action_cannot_be_unpacked(discrete: ManagedAlgorithm) -> None:
    with pytest.raises(TypeError, match=f"^{HINT}$"):
        action, _ = discrete.predict(np.zeros(4, np.float32))
    with pytest.raises(TypeError, match=f"^{HINT}$"):
        action, _states = discrete.predict(np.zeros(4, np.float32), deterministic=True)


def test_a_discrete_action_is_an_int_otherwise(discrete: ManagedAlgorithm) -> None:
    action = discrete.predict(np.zeros(4, np.float32))
    assert isinstance(action, int)
    assert action in (0, 1)
    assert gym.spaces.Discrete(2).contains(action)
    env = gym.make("CartPole-v1")
    env.reset(seed=0)
    env.step(action)
    one = DiscreteAction(1)
    assert (np.asarray(one).dtype, np.asarray(one).shape) == (np.int64, ())
    assert (np.array([one, one]).tolist(), torch.tensor([one]).tolist()) == ([1, 1], [1])
    assert (json.dumps([one]), str(one), repr(one), ["a", "b"][one], {1: "x"}[one]) == ("[1]", "1", "1", "b", "x")
    assert type(pickle.loads(pickle.dumps(one))) is int


@pytest.mark.parametrize(
    "kind", [Walk, ShiftedDiscrete, MultiDiscreteActions, MultiBinaryActions, BoxActions, ScalarActions]
)
def test_every_action_can_be_stepped_with(tmp_path: Path, kind: type[Walk]) -> None:
    result = train(
        tiny("a2c", tmp_path, env_id=f"env_zoo:{kind.__name__}", total_timesteps=16, eval_episodes=0), console=False
    )
    model, env = managed("a2c").load(result.checkpoint_path), kind()
    obs, _ = env.reset(seed=0)
    action = model.predict(obs)
    assert env.action_space.contains(action)
    env.step(action)
