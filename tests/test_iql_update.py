"""IQL's mathematics: expectiles, weights, their order in an update, and the bounded Gaussian."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from continuous_cases import assert_numpy_acts_like_torch, make_batch, make_learner, move_target
from rl_training.algorithms.awac import advantage_weights
from rl_training.algorithms.iql import IQL, expectile_loss
from rl_training.models.mlp_awac import MLPIQLModel

make = partial(make_learner, IQL, MLPIQLModel)


@pytest.mark.parametrize(("expectile", "expected"), [(0.7, 0.391667), (0.9, 0.408333), (0.5, 0.375)])
def test_the_expectile_loss(expectile: float, expected: float) -> None:
    errors = torch.tensor([1.0, -1.0, 0.5])
    assert float(expectile_loss(errors, expectile)) == pytest.approx(expected, abs=1e-6)


def test_weights_grow_with_the_advantage_up_to_100_and_have_no_gradient() -> None:
    advantages = torch.tensor([0.5, 2.0], requires_grad=True)
    weights = advantage_weights(advantages, 3.0)
    torch.testing.assert_close(weights, torch.tensor([4.481689, 100.0]))
    assert not weights.requires_grad


def test_v_learns_first_from_the_target_critics_and_both_others_use_the_new_v() -> None:
    learner, batch = make(learning_rate=0.01, gamma=0.9), make_batch()
    move_target(learner)
    model, obs = learner.model, batch["obs"]
    targets = learner.target_critics(model.features(obs), batch["actions"]).amin(0).detach()
    old = model.state_values(obs).detach()
    logprobs = model.actor.log_prob(obs, batch["actions"]).detach()
    metrics = learner.update(batch).metrics
    new, following = model.state_values(obs).detach(), model.state_values(batch["next_obs"]).detach()
    assert not torch.allclose(old, new, atol=1e-3)
    assert metrics["value_loss"] == pytest.approx(float(expectile_loss(targets - old, 0.7)), rel=1e-5)
    weights = (3.0 * (targets - new)).exp().clamp(max=100.0)
    assert metrics["actor_loss"] == pytest.approx(float(-(weights * logprobs).mean()), rel=1e-4)
    assert metrics["advantage_mean"] == pytest.approx(float((targets - new).mean()), rel=1e-4)
    assert metrics["target_q_mean"] == pytest.approx(float((batch["rewards"] + 0.9 * following).mean()), rel=1e-4)


def test_only_termination_stops_bootstrapping() -> None:
    batch, ended = make_batch(), torch.ones(8)
    rewards = batch["rewards"].mean()
    truncated = {**batch, "terminated": torch.zeros(8, dtype=torch.bool), "truncated": ended.bool(), "dones": ended}
    for given, goes_on in (({**batch, "dones": ended}, False), (truncated, True), (batch, True)):
        learner = make()
        found = learner.update(given).metrics["target_q_mean"]
        following = float(learner.model.state_values(batch["next_obs"]).mean())  # after V's step, as in the update
        assert found == pytest.approx(float(rewards) + (0.9 * following if goes_on else 0.0), abs=1e-5)


def test_a_high_expectile_finds_the_best_recorded_action() -> None:
    """Two actions are recorded in the same state, of which one earns 1 and the other 0."""
    obs = torch.ones(64, 3)
    actions = torch.where(torch.arange(64).unsqueeze(1) % 2 == 0, 0.5, -0.5).expand(64, 2).contiguous()
    rewards = (actions[:, 0] > 0).float()
    batch = {"obs": obs, "next_obs": obs, "actions": actions, "rewards": rewards, "dones": torch.ones(64)}
    values = {}
    for expectile in (0.5, 0.9):
        learner = make(expectile=expectile, learning_rate=0.01, tau=0.2, beta=10.0)
        for _ in range(400):
            learner.update(batch)
        values[expectile] = float(learner.model.state_values(obs[:1]))
        greedy = learner.act(obs[:1], deterministic=True).actions
        torch.testing.assert_close(greedy, torch.full((1, 2), 0.5), atol=0.1, rtol=0.0)
    assert values[0.5] == pytest.approx(0.5, abs=0.05)
    assert values[0.9] == pytest.approx(0.9, abs=0.05)  # |tau - 1(u < 0)|: nine times the weight on what is better


def test_the_mean_is_bounded_but_the_density_is_a_plain_gaussian() -> None:
    learner, obs = make(), torch.randn(5, 3)
    actor = learner.model.actor
    with torch.no_grad():
        actor.network[-2].bias.fill_(10.0)
        actor.log_std.fill_(math.log(0.5))
    torch.testing.assert_close(actor(obs), torch.ones(5, 2))
    expected = torch.distributions.Normal(1.0, 0.5).log_prob(torch.tensor(0.2)) * 2
    torch.testing.assert_close(actor.log_prob(obs, torch.full((5, 2), 0.2)), expected.expand(5), atol=1e-3, rtol=1e-3)
    with torch.no_grad():
        actor.log_std.fill_(-9.0)
    drawn = actor.draw(obs, -torch.ones(5, 2))
    torch.testing.assert_close(drawn, torch.full((5, 2), 1.0 - math.exp(-5.0)), atol=1e-4, rtol=0.0)


def test_acting_in_numpy_is_the_same() -> None:
    learner = make()
    with torch.no_grad():
        learner.model.actor.log_std.fill_(-2.0)
    assert_numpy_acts_like_torch(learner)
