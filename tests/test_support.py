"""The support of categorical returns: derived from rewards, stored, not measured again, and watched in learning."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import env_zoo
from resume_cases import SPECS, StopAt, assert_same_run, tiny
from rl_training.algorithms.base import UpdateResult
from rl_training.algorithms.ops.distributional import outside_mass
from rl_training.envs.probe import probe_spaces
from rl_training.envs.recipe import read_recipe
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.runtime.session import open_session
from rl_training.runtime.workflows import resume_training, train
from rl_training.stores import support
from rl_training.stores.support import derive_support, random_returns

HEADS = ["c51_dqn", "rainbow_dqn", "d4pg"]


class Rewarded(env_zoo.Walk):
    """A walk of ten steps with the rewards that are given, in turn."""

    def __init__(self, rewards: tuple[float, ...] = (0.0,), reward_range: tuple[float, float] | None = None) -> None:
        super().__init__(10)
        self.rewards = rewards
        if reward_range is not None:
            self.reward_range = reward_range

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, _, _, truncated, info = super().step(action)
        return observation, self.rewards[(self.t - 1) % len(self.rewards)], False, truncated, info


def derived(gamma: float = 0.5, **kwargs: Any) -> tuple[float, float]:
    recipe = read_recipe("Rewarded", kwargs, Rewarded)
    return derive_support(recipe, probe_spaces(recipe), gamma, seed=0)


def test_every_step_of_the_longest_episode_is_the_limit_where_rewards_never_change() -> None:
    assert derived(rewards=(1.0,)) == pytest.approx((-0.1, 2.1), rel=1e-2)
    assert derived(rewards=(-1.0,)) == pytest.approx((-2.1, 0.1), rel=1e-2)
    assert derived(rewards=(-1.0,), max_episode_steps=1, gamma=0.99) == pytest.approx((-1.05, 0.05), rel=1e-2)
    recipe = read_recipe("CartPole-v1", {})
    low, high = derive_support(recipe, probe_spaces(recipe), 0.99, seed=0)
    assert -10 < low <= 0
    assert 99.3 < high < 110  # what a policy earns that never falls


def test_rare_rewards_are_not_taken_for_rewards_at_every_step() -> None:
    low, high = derived(gamma=0.99, rewards=(0.0,) * 9 + (100.0,))
    assert low <= 0
    assert 100 < high < 500  # ten of them would be 956


def test_a_declared_range_goes_before_random_play_and_no_reward_gives_the_papers_support() -> None:
    assert derived(rewards=(1.0,), reward_range=(-2.0, 4.0)) == pytest.approx((-4.6, 8.6), rel=1e-2)
    assert derived(rewards=(1.0,), reward_range=(-float("inf"), 4.0)) == derived(rewards=(1.0,))
    assert derived() == (-10.0, 10.0)


def test_returns_are_discounted_sums_from_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = read_recipe("Rewarded", {"rewards": (1.0, 2.0, 4.0), "max_episode_steps": 3}, Rewarded)
    monkeypatch.setattr(support, "EPISODES", 2)
    rewards, returns = random_returns(recipe, probe_spaces(recipe), 0.5, 0)
    assert rewards == [1.0, 2.0, 4.0] * 2
    assert returns == [4.0, 4.0, 3.0] * 2


def test_an_environment_that_breaks_while_it_is_measured_is_named() -> None:
    recipe = read_recipe("Rewarded", {"rewards": (float("nan"),)}, Rewarded)
    with pytest.raises(EnvironmentFailure, match="Rewarded"):
        derive_support(recipe, probe_spaces(recipe), 0.5, 0)


class LeavesIn(Rewarded):
    """Calls sys.exit in the method that is named."""

    def __init__(self, method: str) -> None:
        super().__init__((1.0,))
        setattr(self, method, lambda *_: sys.exit(0))


def test_an_environment_that_leaves_while_it_is_looked_at_does_not_end_the_command() -> None:
    recipe = read_recipe("LeavesIn", {"method": "close"}, LeavesIn)
    assert derive_support(recipe, probe_spaces(recipe), 0.5, 0) == derived(rewards=(1.0,))
    recipe = read_recipe("LeavesIn", {"method": "step"}, LeavesIn)
    with pytest.raises(EnvironmentFailure, match=r"LeavesIn called sys\.exit\(0\)"):
        derive_support(recipe, probe_spaces(recipe), 0.5, 0)


@pytest.mark.parametrize("algo", HEADS)
def test_a_support_is_stored_as_numbers_and_a_resume_does_not_measure_again(
    algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SPECS[algo].params().v_min is None  # type: ignore[attr-defined]
    config = tiny(algo, tmp_path, eval_episodes=0)
    whole = train(config, console=False)
    stored = yaml.safe_load((whole.run_dir / "config.yaml").read_text())["algo_kwargs"]
    assert stored["v_min"] < 0 < stored["v_max"]
    assert load_checkpoint(whole.checkpoint_path)["config"]["algo_kwargs"]["v_min"] == stored["v_min"]
    given = {name: stored[name] for name in ("v_min", "v_max")}
    told = open_session(tiny(algo, tmp_path, kwargs=given))
    told.close()
    assert f"returns from {stored['v_min']:g} to {stored['v_max']:g}" in told.store.describe()

    halfway = train(config, callbacks=[StopAt(64)], console=False)

    def measure(*args: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(support, "derive_support", measure)
    assert_same_run(whole, resume_training(halfway.checkpoint_path, console=False))
    assert_same_run(whole, train(tiny(algo, tmp_path, eval_episodes=0, kwargs=given), console=False))


def test_one_end_may_be_given(tmp_path: Path) -> None:
    for given, (low, high) in (({"v_min": -3.0}, (-3.0, 100.0)), ({"v_max": -7.0}, (-8.0, -7.0))):
        session = open_session(tiny("c51_dqn", tmp_path, kwargs=given))
        session.close()
        ends = session.config.algo_kwargs["v_min"], session.config.algo_kwargs["v_max"]
        assert ends == pytest.approx((low, high), rel=0.1)
    with pytest.raises(UserError, match=r"v_max is 1\.0; it must be above v_min \(1\.0\)"):
        open_session(tiny("d4pg", tmp_path, kwargs={"v_min": 1.0, "v_max": 1.0}))


def test_the_mass_outside_of_the_support_is_counted() -> None:
    atoms, probs = torch.tensor([[-2.0, -1.0, 0.0, 1.0, 5.0]]), torch.tensor([[0.1, 0.2, 0.3, 0.3, 0.1]])
    support_points = torch.linspace(-1.0, 1.0, 3)
    torch.testing.assert_close(outside_mass(atoms, probs, support_points), torch.tensor([0.2]))
    torch.testing.assert_close(outside_mass(atoms + 1e-6, probs, support_points), torch.tensor([0.2]))


@pytest.mark.parametrize("algo", HEADS)
def test_targets_outside_of_the_support_are_a_metric(algo: str, tmp_path: Path) -> None:
    env_id = "Pendulum-v1" if algo == "d4pg" else "MountainCar-v0"
    shares = []
    for ends in ({"v_min": 0.0, "v_max": 100.0}, {"v_min": -5000.0, "v_max": 1.0}):
        result = train(tiny(algo, tmp_path, env_id=env_id, eval_episodes=0, kwargs=ends), console=False)
        shares.append(result.metrics["clipped_targets"])
    assert shares[0] > 0.01
    assert shares[1] == 0.0


def test_clipping_that_stays_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(tiny("c51_dqn", tmp_path, kwargs={"v_min": 0.0, "v_max": 1.0}))
    store: Any = session.store
    session.close()

    def said(share: float, updates: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(updates):
                store.feedback({}, UpdateResult({"clipped_targets": torch.tensor([share, share])}))
        return [str(warning.message) for warning in caught]

    assert said(0.05, 2_000) == []
    assert said(0.4, 900) == []
    assert said(0.05, 100) == []  # it has to stay high
    expected = "40% of the targets are outside the support (v_min is 0 and v_max 1); widen them."
    assert said(0.4, 3_000) == [expected]
