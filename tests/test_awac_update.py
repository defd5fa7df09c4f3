"""AWAC's mathematics: critics of the policy, one sample as the baseline, weights by 1 / lambda."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from continuous_cases import (
    assert_numpy_acts_like_torch,
    assert_only_termination_stops_bootstrapping,
    make_batch,
    make_learner,
    move_target,
)
from rl_training.algorithms.awac import AWAC, advantage_weights
from rl_training.models.mlp_awac import MLPAWACModel

make = partial(make_learner, AWAC, MLPAWACModel)


@pytest.mark.parametrize(
    ("temperature", "expected"), [(1.0, [1.648721, 0.367879, 100.0]), (0.3333, [4.482361, 0.049772, 100.0])]
)
def test_the_weights(temperature: float, expected: list[float]) -> None:
    weights = advantage_weights(torch.tensor([0.5, -1.0, 6.0]), 1.0 / temperature)
    torch.testing.assert_close(weights, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_the_critics_learn_first_and_the_advantage_is_that_of_the_new_critics() -> None:
    learner, batch = make(learning_rate=0.01, temperature=0.5), make_batch()
    move_target(learner)
    model, obs = learner.model, batch["obs"]
    noise = torch.ones(8, 2), torch.full((8, 2), -0.5)
    actions = [model.actor.draw(batch["next_obs"], noise[0]).detach(), model.actor.draw(obs, noise[1]).detach()]
    logprobs = model.actor.log_prob(obs, batch["actions"]).detach()
    following = learner.target_critics(model.features(batch["next_obs"]), actions[0]).amin(0).detach()
    metrics = learner.update_step(batch, *noise)
    targets = batch["rewards"] + 0.9 * following
    assert float(metrics["target_q_mean"]) == pytest.approx(float(targets.mean()), rel=1e-5)
    with torch.no_grad():
        values = [model.ensemble_values(obs, given).amin(0) for given in (batch["actions"], actions[1])]
    advantages = values[0] - values[1]
    weights = (advantages / 0.5).exp().clamp(max=100.0)
    assert float(metrics["advantage_mean"]) == pytest.approx(float(advantages.mean()), abs=1e-5)
    assert float(metrics["actor_loss"]) == pytest.approx(float(-(weights * logprobs).mean()), rel=1e-4)


def test_only_termination_stops_bootstrapping() -> None:
    def next_value(learner: AWAC, obs: torch.Tensor) -> torch.Tensor:
        actions = learner.model.actor.draw(obs, learner.draw_noise(obs))
        return learner.target_critics(learner.model.features(obs), actions).amin(0)

    assert_only_termination_stops_bootstrapping(make, next_value)


def test_samples_are_clipped_and_acting_in_numpy_is_the_same() -> None:
    learner = make()
    assert float(learner.act(torch.zeros(1000, 3)).actions.abs().max()) == 1.0
    with torch.no_grad():
        learner.model.actor.log_std.fill_(-2.0)
    assert_numpy_acts_like_torch(learner)
