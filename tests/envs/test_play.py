"""Playing environments: the loop of steps, who is told what breaks, and actions at random."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

import env_zoo
from resume_cases import tiny
from rl_training.data import load_transition_dataset
from rl_training.envs.factory import read_recipe
from rl_training.envs.probe import probe_spaces
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.play import closed_after, play, random_actions
from rl_training.run import evaluation
from rl_training.run.learner import load_policy
from rl_training.run.workflows import train


class Counts(gym.Env[Any, Any]):
    """An episode of as many steps as its seed says; observations are written into one array."""

    observation_space = gym.spaces.Box(-1e9, 1e9, (1,), np.float64)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, fails: str = "") -> None:
        self.obs, self.fails, self.closed = np.zeros(1), fails, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.length, self.t = seed, 0
        self.obs[0] = 0
        return self.obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.fails:
            raise RuntimeError(self.fails)
        self.t += 1
        self.obs[0] = self.t
        return self.obs, 1.0, False, self.t == self.length, {}

    def close(self) -> None:
        self.closed += 1
        if self.fails:
            raise RuntimeError("the close broke too")


def test_environments_take_the_next_episode_in_the_order_in_which_they_end_one() -> None:
    seen: list[Any] = []

    def act(rows: list[Any], infos: list[Any], is_first: Any) -> list[int]:
        seen.append(is_first.tolist())
        return [1, 2]

    steps = list(play([Counts(), Counts()], act, lambda episode: [3, 1, 2, 1][episode], "counts", 4))
    assert [(step.episode, step.action) for step in steps] == [
        (0, 1), (1, 2), (0, 1), (2, 2), (0, 1), (2, 2), (3, 1),
    ]  # fmt: skip
    assert seen == [[True, True], [False, True], [False, False], [True, True]]
    lengths = [sum(step.episode == episode for step in steps) for episode in range(4)]
    assert lengths == [3, 1, 2, 1]


def test_a_step_keeps_the_observation_that_the_environment_writes_over() -> None:
    steps = play([Counts()], lambda *_: [0], lambda _: 3, "counts")
    pairs = [(float(step.obs[0]), float(step.next_obs[0])) for step in islice(steps, 5)]
    assert pairs == [(0, 1), (1, 2), (2, 3), (0, 1), (1, 2)]


def test_what_an_environment_raises_is_named_and_what_acts_raises_is_not() -> None:
    with pytest.raises(EnvironmentFailure, match="the environment counts raised RuntimeError: the pole"):
        next(play([Counts("the pole")], lambda *_: [0], lambda _: 3, "counts"))

    def broken(*_: Any) -> list[int]:
        raise RuntimeError("the policy")

    with pytest.raises(RuntimeError, match=r"^the policy$"):
        next(play([Counts()], broken, lambda _: 3, "counts"))
    with pytest.raises(EnvironmentFailure, match="the environment counts raised RuntimeError: the pole"):
        load_transition_dataset("random", env_id="counts", make_env=lambda: Counts("the pole"), size=5)


def test_a_close_that_breaks_is_told_but_not_instead_of_the_first_error() -> None:
    envs = [Counts("the pole"), Counts("the pole")]
    with pytest.raises(KeyError, match="first"), closed_after(envs, "counts"):
        raise KeyError("first")
    assert [env.closed for env in envs] == [1, 1]
    broken = pytest.raises(EnvironmentFailure, match="counts raised RuntimeError: the close broke too")
    with broken, closed_after(envs, "counts"):
        pass
    told: list[str] = []
    with closed_after(envs, "counts", told.append):
        pass
    assert "the close broke too" in told[0]


def test_a_video_that_fails_closes_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "find_spec", lambda _: True)  # the package itself is not needed here
    monkeypatch.setattr(gym.wrappers, "RecordVideo", lambda env, *_, **__: gym.Wrapper(env))
    policy = load_policy(train(tiny("ppo", tmp_path), console=False).checkpoint_path)
    closed: list[int] = []
    cart = gym.make("CartPole-v1").unwrapped.__class__
    monkeypatch.setattr(cart, "step", lambda *_: (_ for _ in ()).throw(RuntimeError("the pole")))
    monkeypatch.setattr(cart, "close", lambda _: closed.append(1))
    evaluator = evaluation.Evaluator(read_recipe("CartPole-v1", {}), policy.spaces, 0)
    with pytest.raises(EnvironmentFailure, match="CartPole-v1 raised RuntimeError: the pole"):
        evaluator.evaluate(policy.algorithm, 1, videos=tmp_path)
    assert closed


class CannotClose(CartPoleEnv):
    """Raises when it is closed."""

    def close(self) -> None:
        raise RuntimeError("the close broke too")


def test_a_run_that_cannot_start_says_why_whatever_its_environments_do(tmp_path: Path) -> None:
    config = tiny("ppo", tmp_path, num_envs=2, vectorization="sync")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="no folder can be made"):
        train(config.model_copy(update={"output_dir": str(tmp_path / "file")}), env=CannotClose)


def test_random_actions_are_drawn_as_runs_before_drew_them() -> None:
    def generator() -> np.random.Generator:
        return np.random.default_rng(7)

    masks = generator().random((20, 4)) < 0.7
    masks[:, 0] = True
    expected = np.where(masks, generator().random(masks.shape), -1.0).argmax(-1)
    assert np.array_equal(random_actions(generator(), 20, (4,), masks), expected)
    assert np.array_equal(random_actions(generator(), 20, (4,)), generator().integers(4, size=20))
    floats = random_actions(generator(), 20, (1, 1), kind="continuous")
    assert floats.dtype == np.float32
    assert np.array_equal(floats, generator().uniform(-1.0, 1.0, (20, 2)).astype(np.float32))


@pytest.mark.parametrize("name", ["Masked", "MaskedFactors", "MultiDiscreteActions", "MultiBinaryActions"])
def test_random_actions_are_legal_and_all_of_them_come(name: str) -> None:
    spaces = probe_spaces(read_recipe(name, {}, getattr(env_zoo, name)))
    rng = np.random.default_rng(0)
    masks = np.ones((500, spaces.action_dim), dtype=bool)
    masks[:, 0] = False
    free, held = spaces.random_actions(rng, 500), spaces.random_actions(rng, 500, masks)
    assert held.shape == (500, *spaces.action_shape)
    for factor, size in enumerate(spaces.action_sizes):
        parts = [drawn.reshape(500, -1)[:, factor] for drawn in (free, held)]
        assert [sorted(set(part.tolist())) for part in parts] == [
            list(range(size)), list(range(1 if factor == 0 else 0, size)),
        ]  # fmt: skip
