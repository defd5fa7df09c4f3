"""The support of categorical returns: derived from rewards, stored, not measured again, and widened in learning."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import env_zoo
from resume_cases import SPECS, StopAt, assert_same, assert_same_run, tiny
from rl_training.algorithms.c51_dqn import C51DQN
from rl_training.collect.local import Behaviour
from rl_training.config import replay_params
from rl_training.config.replay_params import derive_support, random_returns
from rl_training.data.replay_store import SupportWatch
from rl_training.data.store import Experience, ExperienceLayout
from rl_training.envs.factory import read_recipe
from rl_training.envs.probe import probe_spaces
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.models.blocks import CriticEnsemble
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.ops.distributional import carry_over, outside_mass
from rl_training.record.checkpoints import load_checkpoint
from rl_training.run.build import open_session
from rl_training.run.learner import load_algorithm, read_checkpoint
from rl_training.run.workflows import resume_training, train

HEADS = ["c51_dqn", "rainbow_dqn", "d4pg"]


class Rewarded(env_zoo.Walk):
    """A walk of `length` steps with the rewards that are given, in turn."""

    def __init__(
        self, rewards: tuple[float, ...] = (0.0,), reward_range: tuple[float, float] | None = None, length: int = 10,
        action: str = "discrete",
    ) -> None:  # fmt: skip
        super().__init__(length, action)
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


def test_a_declared_range_is_of_one_reward_and_no_reward_gives_the_papers_support() -> None:
    assert derived(gamma=0.99, reward_range=(0.0, 1.0)) == (-0.05, 1.05)  # a goal that random play does not find
    assert derived(rewards=(1.0,), reward_range=(-2.0, 4.0)) == pytest.approx((-2.5, 8.5), rel=1e-2)
    recipe = read_recipe("FrozenLake-v1", {"is_slippery": False})
    low, high = derive_support(recipe, probe_spaces(recipe), 0.99, seed=0)
    assert -1 < low <= 0
    assert 1 <= high < 5  # its returns are from 0 to 1
    assert derived(rewards=(1.0,), reward_range=(-float("inf"), 4.0)) == derived(rewards=(1.0,))
    assert derived() == (-10.0, 10.0)


def test_returns_are_discounted_sums_from_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = read_recipe("Rewarded", {"rewards": (1.0, 2.0, 4.0), "max_episode_steps": 3}, Rewarded)
    monkeypatch.setattr(replay_params, "EPISODES", 2)
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
    assert stored["widen_support"] == "both"
    given["widen_support"] = "both"
    told = open_session(tiny(algo, tmp_path, kwargs=given))
    told.close()
    assert f"returns from {stored['v_min']:g} to {stored['v_max']:g}" in told.store.describe()

    halfway = train(config, callbacks=[StopAt(64)], console=False)

    def measure(*args: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(replay_params, "derive_support", measure)
    assert_same_run(whole, resume_training(halfway.checkpoint_path, console=False))
    assert_same_run(whole, train(tiny(algo, tmp_path, eval_episodes=0, kwargs=given), console=False))


def test_one_end_may_be_given(tmp_path: Path) -> None:
    for given, (low, high) in (({"v_min": -3.0}, (-3.0, 100.0)), ({"v_max": -7.0}, (-8.0, -7.0))):
        session = open_session(tiny("c51_dqn", tmp_path, kwargs=given))
        session.close()
        ends = session.config.algo_kwargs["v_min"], session.config.algo_kwargs["v_max"]
        assert ends == pytest.approx((low, high), rel=0.1)
        moving = "v_max" if "v_min" in given else "v_min"
        assert session.config.algo_kwargs["widen_support"] == moving
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


# widening -------------------------------------------------------------------------------------------------------

GOAL = {"rewards": (-0.1,) * 39 + (100.0,), "length": 40}  # the first one comes after 24 steps of learning


def goal_config(algo: str, folder: Path, **fields: Any) -> Any:
    """A run whose support begins far below the goal at the end of every episode."""
    kwargs = {"v_min": -10.0, "v_max": 1.0, "widen_support": "both"} | fields.pop("kwargs", {})
    env_kwargs = GOAL | {"action": "continuous" if algo == "d4pg" else "discrete"}
    given = {"env_id": "test_support:Rewarded", "env_kwargs": env_kwargs, "eval_episodes": 0, "kwargs": kwargs}
    return tiny(algo, folder, **given, **fields)


def support_of(checkpoint: Path) -> list[float]:
    """The first and the last atom of the learner in a checkpoint, as prediction and export load it."""
    algorithm: Any = load_algorithm(checkpoint, read_checkpoint(checkpoint))[0]
    atoms = algorithm.model.support if hasattr(algorithm, "model") else algorithm.support
    assert atoms.diff().min() > 0
    return [float(atoms[0]), float(atoms[-1])]


@pytest.mark.parametrize("algo", HEADS)
def test_a_goal_beyond_the_support_widens_it_and_a_resume_is_exact(algo: str, tmp_path: Path) -> None:
    config = goal_config(algo, tmp_path)
    whole = train(config, console=False)
    low, high = support_of(whole.checkpoint_path)
    assert low == -10.0
    assert 100.0 < high < 120.0
    assert whole.metrics["v_max"] == pytest.approx(high)
    assert whole.metrics["v_min"] == -10.0
    for stop in (32, 64):  # before and after the first goal
        early = train(config, callbacks=[StopAt(stop)], console=False)
        assert (support_of(early.checkpoint_path)[1] > 1.0) == (stop > 40)
        assert_same_run(whole, resume_training(early.checkpoint_path, console=False))


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["c51_dqn", "d4pg"])
def test_workers_act_on_the_widened_support_and_a_resume_is_exact(algo: str, tmp_path: Path) -> None:
    config = goal_config(algo, tmp_path, execution_backend="local_async", num_workers=2, num_envs=2)
    whole = train(config, console=False)
    assert support_of(whole.checkpoint_path)[1] > 100.0
    early = train(config, callbacks=[StopAt(100)], console=False)
    resumed = resume_training(early.checkpoint_path, console=False)
    one, other = (load_checkpoint(result.checkpoint_path)["algorithm"] for result in (whole, resumed))
    assert_same(one, other)


def test_given_ends_stay_and_the_first_return_beyond_them_is_said_once(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = train(goal_config("c51_dqn", tmp_path, kwargs={"widen_support": "auto"}), console=False)
    said = [str(warning.message) for warning in caught if "support" in str(warning.message)]
    expected = "a reward of 100 was stored, above v_max (1): values there are clipped; widen the support, or leave"
    assert said == [f"{expected} v_max out."]
    assert support_of(result.checkpoint_path) == [-10.0, 1.0]
    assert "v_max" not in result.metrics


def watch(widen: str, low: float = -1.0, high: float = 1.0, num_envs: int = 1) -> SupportWatch:
    return SupportWatch(SimpleNamespace(v_min=low, v_max=high, widen_support=widen), num_envs)


def experience(rewards: list[list[float]], ended: list[list[bool]], **more: Any) -> Experience:
    """Rows of rewards and ends; nothing else is read."""
    made = Experience(ExperienceLayout(len(rewards), len(rewards[0]), (1,), "float32", holds_resets="valid" in more))
    made.steps, made.has_resets = len(rewards), "valid" in more
    made.rewards[:], made.truncated[:] = rewards, ended
    if made.valid is not None:
        made.valid[:] = more["valid"]
    return made


def test_returns_of_whole_episodes_count_not_only_rewards() -> None:
    seen = watch("both")
    seen.look(experience([[0.8], [0.8]], [[False], [False]]), gamma=0.5)
    assert seen.ends == [-1.0, 1.0]  # the episode goes on
    seen.look(experience([[0.8]], [[True]]), gamma=0.5)
    assert seen.ends == [-1.0, 3.0]  # 0.8 * 1.75, and at least twice as wide
    seen.look(experience([[0.9]], [[True]]), gamma=0.5)
    assert seen.ends == [-1.0, 3.0]  # a new episode has its own return
    seen.look(experience([[-50.0]], [[False]]), gamma=0.5)
    assert seen.ends == [pytest.approx(-50.0 - 0.05 * 53.0, rel=1e-2), 3.0]
    far_from_zero = watch("both", 1000.0, 1010.0)
    far_from_zero.look(experience([[1021.0]], [[False]]), gamma=0.5)
    assert far_from_zero.ends == [1000.0, pytest.approx(1022.05)]
    one_end = watch("v_min")
    one_end.look(experience([[-5.0]], [[True]]), gamma=0.5)
    with pytest.warns(UserWarning, match=r"a reward of 5 was stored, above v_max \(1\)"):
        one_end.look(experience([[5.0]], [[True]]), gamma=0.5)
    assert one_end.ends == [pytest.approx(-5.3), 1.0]


def test_rows_that_only_reset_and_columns_of_workers_are_told_apart() -> None:
    seen = watch("both", num_envs=2)
    rows = experience([[0.9, 0.9], [9.0, 0.9]], [[True, False], [True, True]], valid=[[True, True], [False, True]])
    seen.look(rows, gamma=1.0)
    assert seen.ends == [-1.0, 3.0]  # 1.8 in the second environment; the 9 came with a reset
    seen = watch("both", num_envs=2)
    for env in (0, 1, 0, 1):
        part, late = experience([[0.9]], [[False]]), experience([[0.0, 0.0]], [[False, False]])
        late.steps, late.parts = 1, [(np.array([env]), part)]
        seen.look(late, gamma=1.0)
    assert seen._rewards == [pytest.approx([0.9, 0.9])] * 2


def test_a_turn_that_was_abandoned_before_it_widened_is_made_up_for() -> None:
    stored, learner = watch("both"), C51DQN(q_network=q_network(), v_min=-1.0, v_max=1.0, num_atoms=5)
    stored.look(experience([[7.0]], [[False]]), gamma=0.5)
    resumed = watch("both")
    resumed.load_state_dict(stored.state_dict())
    resumed.widen(learner)
    assert learner.support[-1] == pytest.approx(resumed.ends[1])
    resumed.look(experience([[7.0]], [[True]]), gamma=1.0)
    assert resumed.ends[1] > 14.0  # with the reward of the episode's first part


def test_a_state_of_other_environments_or_with_a_forged_support_is_noticed() -> None:
    stored, resumed = watch("both", num_envs=2), watch("both", num_envs=1)
    stored.look(experience([[7.0, 0.0]], [[False, False]]), gamma=0.5)
    resumed.load_state_dict(stored.state_dict())
    assert resumed.ends == stored.ends
    assert resumed._rewards == [[]]
    for ends in ([1.0, 1.0], [float("nan"), 1.0], [0.0, float("inf")], ["a", 1.0], [1.0]):
        with pytest.raises(ValueError, match=r"support|convert|unpack"):
            resumed.load_state_dict({"support": {"ends": ends, "rewards": []}})
    assert watch("none").state_dict() == {}  # as in older checkpoints


def test_learners_widen_together() -> None:
    learner: Any = C51DQN(q_network=q_network(), v_min=-1.0, v_max=1.0, num_atoms=5)
    others = {1.0: 1.0, 7.4: 40.0}  # -low and high here, and the largest of all ranks
    learner.ranks = SimpleNamespace(largest=others.__getitem__)
    seen = watch("both")
    seen.look(experience([[7.0]], [[False]]), gamma=0.5)
    assert seen.widen(learner) == {"v_min": -1.0, "v_max": 40.0}
    assert learner.support[-1] == 40.0


def q_network(**options: Any) -> MLPQNetwork:
    return MLPQNetwork(obs_dim=3, action_dim=2, hidden_sizes=(16, 16), num_outputs=5, **options)


@pytest.mark.parametrize("options", [{}, {"dueling": True}, {"noisy": True}, {"dueling": True, "noisy": True}])
def test_the_last_layer_combines_its_outputs(options: dict[str, Any]) -> None:
    network, rows = q_network(**options), torch.randn(7, 3)
    weights, offsets = torch.randn(5, 5), torch.randn(5)
    expected = network(rows) @ weights.T + offsets
    network.combine_outputs(weights, offsets)
    torch.testing.assert_close(network(rows), expected, rtol=1e-4, atol=1e-4)


def test_the_last_layer_of_critics_combines_its_outputs() -> None:
    critics, rows = CriticEnsemble(num_critics=2, inputs=4, hidden_sizes=(16,), outputs=5), torch.randn(7, 3)
    weights, offsets = torch.randn(5, 5), torch.randn(5)
    before = critics(rows, torch.ones(7, 1))
    critics.combine_outputs(weights, offsets)
    torch.testing.assert_close(critics(rows, torch.ones(7, 1)), before @ weights.T + offsets, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ends", [(-8.5, 105.0), (-8.5, 9.0), (-30.0, 0.4), (-20.0, 20.0), (-9.0, 0.5)])
@pytest.mark.parametrize("deviation", [0.1, 0.4, 2.0])
def test_predicted_values_are_carried_over(ends: tuple[float, float], deviation: float) -> None:
    old, new = torch.linspace(-8.5, 0.4, 51), torch.linspace(*ends, 51)
    centers = torch.linspace(-8.0, 0.0, 33).unsqueeze(1)
    logits = (-((old - centers) ** 2) / (2 * deviation**2)).clamp(min=-12.0)
    weights, offsets = carry_over(old, new)
    values, carried = logits.softmax(-1) @ old, (logits @ weights.T + offsets).softmax(-1) @ new
    assert (carried - values).abs().max() < 0.6 * (new[1] - new[0])
    assert torch.corrcoef(torch.stack([values, carried]))[0, 1] > 0.97


def test_a_widened_learner_and_its_target_keep_their_values_and_workers_get_the_atoms() -> None:
    torch.manual_seed(0)
    make = partial(C51DQN, v_min=0.0, v_max=4.0, num_atoms=41)
    learners: list[Any] = [
        make(q_network=MLPQNetwork(obs_dim=3, action_dim=2, hidden_sizes=(16,), num_outputs=41)) for _ in range(2)
    ]
    learner, worker = learners
    rows, memory = torch.randn(50, 3), learner.support.data_ptr()
    before = [learner.values(network(rows)) for network in (learner.q_network, learner.target_network)]
    learner.widen_support(-4.0, 8.0)
    after = [learner.values(network(rows)) for network in (learner.q_network, learner.target_network)]
    assert learner.support.data_ptr() == memory  # what a graph has captured
    for old, new in zip(before, after, strict=True):
        assert (old - new).abs().max() < 0.15  # half the distance of two atoms
    spaces = probe_spaces(read_recipe("CartPole-v1", {}))
    ends = [Behaviour(one, spaces, 1, np.random.default_rng(0)) for one in (learner, worker)]
    ends[1].unpack(ends[0].pack())
    torch.testing.assert_close(worker.act(rows, deterministic=True).actions, after[0].argmax(-1))
    assert torch.equal(worker.support, learner.support)
