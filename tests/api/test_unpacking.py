"""`action, _ = model.predict(obs)`, as in Stable-Baselines3, cannot be missed; all else works as with plain ints."""

# ruff: noqa: RUF059 - what is unpacked is not used
from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from env_zoo import BoxActions, MultiBinaryActions, MultiDiscreteActions, ScalarActions, ShiftedDiscrete, Walk
from resume_cases import tiny
from rl_training.api import managed as managed_module
from rl_training.api.managed import ManagedAlgorithm
from rl_training.run.learner import DiscreteAction, TrainedPolicy
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


def returning(monkeypatch: pytest.MonkeyPatch, action: Any) -> ManagedAlgorithm:
    """A model that predicts this."""
    monkeypatch.setattr(managed_module, "_seen", {})
    monkeypatch.setattr(TrainedPolicy, "predict", lambda *_, **__: action)
    monkeypatch.setattr(ManagedAlgorithm, "_loaded", lambda _: TrainedPolicy.__new__(TrainedPolicy))
    return managed("sac")("Pendulum-v1")


def test_an_action_of_two_numbers_that_is_unpacked_as_theirs_is_warned_about_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = returning(monkeypatch, np.array([0.25, 0.75]))
    obs, self = np.zeros(3), type("Agent", (), {})()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            action, _ = model.predict(obs)
            action, _states = model.predict(obs, deterministic=True)
            action, state = model.predict(
                obs,
                deterministic=False,
            )
            self.action, _state = model.predict(obs)
    assert [warning.lineno - caught[0].lineno for warning in caught] == [0, 1, 2, 6]
    assert {Path(warning.filename).name for warning in caught} == {"test_unpacking.py"}
    assert {str(warning.message) for warning in caught} == {HINT.replace("\\", "")}


def test_numbers_of_an_action_may_be_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model = returning(monkeypatch, np.array([0.25, 0.75]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        throttle, steering = model.predict(None)
        action, _ = model.predict(None), 1
        first, _rest = list(map(float, model.predict(None)))
        pair = model.predict(None)
        left, _ = pair
    assert (throttle, steering, first, left, list(action)) == (0.25, 0.75, 0.25, 0.25, [0.25, 0.75])
    assert type(action) is np.ndarray


@pytest.mark.parametrize("action", [np.array(0.5), np.zeros(1), np.zeros(3)])
def test_an_action_that_cannot_be_unpacked_into_two_gets_the_hint_before_pythons_error(
    monkeypatch: pytest.MonkeyPatch, action: Any
) -> None:
    model = returning(monkeypatch, action)

    def theirs() -> None:
        action, _ = model.predict(None)

    with pytest.warns(UserWarning, match=HINT), pytest.raises((TypeError, ValueError)):
        theirs()


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
