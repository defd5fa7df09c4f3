"""SAC's mathematics: squashed log-probabilities, soft targets, temperature, and the critics' batched network."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from continuous_cases import (
    SIZES,
    assert_numpy_acts_like_torch,
    assert_only_termination_stops_bootstrapping,
    assert_solves_bandit,
    make_batch,
    make_learner,
    same,
    tensors,
)
from rl_training.algorithms.sac import SAC, sac_loss
from rl_training.models.blocks import CriticEnsemble
from rl_training.models.mlp_sac import MLPSACModel, SquashedGaussianActor

make = partial(make_learner, SAC, MLPSACModel)


def test_squashed_log_probabilities_agree_with_torch() -> None:
    torch.manual_seed(0)
    actor = SquashedGaussianActor(obs_dim=3, action_dim=2, hidden_sizes=(8,), activation="relu")
    nn.init.normal_(actor.network[-1].weight, std=0.5)
    actor.double()
    obs, noise = torch.randn(64, 3).double(), torch.randn(64, 2).double()
    mean, log_std = actor.network(obs).chunk(2, -1)
    actor.observation_input = nn.Identity()  # type: ignore[assignment]  # it would make float32 of them
    sampled = actor.sample(obs, noise)
    reference = TransformedDistribution(Independent(Normal(mean, log_std.exp()), 1), [TanhTransform(cache_size=1)])
    actions = torch.tanh(mean + log_std.exp() * noise)
    torch.testing.assert_close(sampled.actions, actions, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sampled.logprobs, reference.log_prob(actions), rtol=1e-7, atol=1e-7)
    parameters = list(actor.parameters())
    mine = torch.autograd.grad(sampled.logprobs.sum(), parameters, retain_graph=True)
    draw = torch.tanh(mean + log_std.exp() * noise)
    theirs = torch.autograd.grad(reference.log_prob(draw).sum(), parameters)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_log_deviation_is_clamped() -> None:
    actor = SquashedGaussianActor(obs_dim=1, action_dim=1, hidden_sizes=(), activation="relu")
    for bias, bound in ((100.0, 2.0), (-100.0, -20.0)):
        nn.init.constant_(actor.network[-1].bias, bias)
        assert actor.gaussian(torch.zeros(1, 1))[1].item() == bound


def test_sac_loss_on_numbers_made_by_hand() -> None:
    common = {
        "target_q_values": torch.tensor([1.0, 2]), "sampled_logprobs": torch.tensor([-1.0, -3]),
        "alpha": torch.tensor(0.5),
    }  # fmt: skip
    twins = {"q1_values": torch.tensor([0.0, 2]), "q2_values": torch.tensor([1.0, 4])}
    sampled = {"sampled_q1": torch.tensor([1.0, 5]), "sampled_q2": torch.tensor([2.0, 3])}
    losses = sac_loss({**common, **twins, **sampled})
    assert {name: float(value) for name, value in losses.items()} == {
        "critic_loss": 1.25, "actor_loss": -3.0, "target_q_mean": 1.5, "entropy_term": -1.0,
    }  # fmt: skip
    stacked = {"q_values": torch.stack([*twins.values()]), "sampled_q_values": torch.stack([*sampled.values()])}
    assert sac_loss({**common, **stacked}) == losses


def test_critics_as_one_network_equal_critics_one_by_one() -> None:
    torch.manual_seed(0)
    for layer_norm in (False, True):
        critics = CriticEnsemble(num_critics=3, inputs=5, hidden_sizes=(8, 7), layer_norm=layer_norm)
        for parameter in critics.parameters():
            nn.init.normal_(parameter)
        features, actions = torch.randn(4, 3), torch.randn(4, 2)
        together = critics(features, actions)
        assert together.shape == (3, 4)
        weights = dict(critics.named_parameters())
        for i in range(3):
            x = torch.cat([features, actions], -1)
            for layer in range(2):
                x = x @ weights[f"weight{layer}"][i] + weights[f"bias{layer}"][i]
                if layer_norm:
                    x = nn.functional.layer_norm(x, x.shape[-1:])
                    x = x * weights[f"scale{layer}"][i] + weights[f"shift{layer}"][i]
                x = x.relu()
            alone = (x @ weights["weight2"][i] + weights["bias2"][i]).squeeze(-1)
            torch.testing.assert_close(together[i], alone, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(critics(features, actions, torch.tensor([i]))[0], together[i])
            torch.testing.assert_close(critics(features, actions, slice(i, i + 1))[0], together[i])


def test_critics_start_different() -> None:
    values = MLPSACModel(**SIZES).q_values(make_batch()["obs"], make_batch()["actions"])
    assert not torch.allclose(values[0], values[1])


def test_target_is_soft_and_only_termination_stops_bootstrapping() -> None:
    def next_value(learner: SAC, obs: Tensor) -> Tensor:
        actions, logprobs = learner.model.actor.sample(obs, learner.draw_noise(obs))
        return learner.target_critics(obs, actions).amin(0) - 0.3 * logprobs

    assert_only_termination_stops_bootstrapping(lambda: make(alpha=0.3), next_value)


def test_actor_and_critic_steps_touch_only_their_own_network() -> None:
    learner, batch = make(), make_batch()
    actor, critics = tensors(learner.model.actor), tensors(learner.model.critics)
    learner.actor_step(batch["obs"], torch.randn(8, 2))
    assert all(same(critics, learner.model.critics))
    assert not any(same(actor, learner.model.actor))
    actor = tensors(learner.model.actor)
    learner.critic_step(batch, torch.randn(8, 2), None)
    assert all(same(actor, learner.model.actor))
    assert not any(same(critics, learner.model.critics))


def test_the_actor_step_follows_the_gradient_of_its_loss() -> None:
    learner, batch, noise = make(alpha=0.2, optimizer="sgd", learning_rate=0.1), make_batch(), torch.randn(8, 2)
    actions, logprobs = learner.model.actor.sample(batch["obs"], noise)
    values = learner.model.q_values(batch["obs"], actions)
    loss = (0.2 * logprobs - torch.minimum(values[0], values[1])).mean()
    parameters = list(learner.model.actor.parameters())
    expected = [p - 0.1 * g for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True)]
    losses = learner.actor_step(batch["obs"], noise)
    for one, other in zip(parameters, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert losses["actor_loss"].item() == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize(("target_entropy", "grows"), [(50.0, True), (-50.0, False)])
def test_temperature_grows_when_the_entropy_is_below_its_target(target_entropy: float, grows: bool) -> None:
    learner = make(target_entropy=target_entropy)
    assert learner.update(make_batch()).metrics["alpha"] == 1.0  # the one that this update used
    assert (float(learner.alpha) > 1.0) == grows


def test_temperature_step_equals_autograd() -> None:
    learner, noise = make(optimizer="sgd"), torch.randn(8, 2)
    logprobs = learner.model.actor.sample(make_batch()["obs"], noise).logprobs.detach()
    log_alpha = torch.zeros((), requires_grad=True)
    loss = -(log_alpha * (logprobs + learner.target_entropy)).mean()
    (gradient,) = torch.autograd.grad(loss, log_alpha)
    learner.actor_step(make_batch()["obs"], noise)
    assert learner.log_alpha is not None
    assert learner.log_alpha.item() == pytest.approx(-1e-3 * gradient.item(), rel=1e-5)


def test_a_fixed_temperature_stays() -> None:
    learner = make(alpha=0.25)
    metrics = learner.update(make_batch()).metrics
    assert metrics["alpha"] == learner.alpha == 0.25
    assert "log_alpha" not in learner.state_dict()
    assert make().target_entropy == -2.0


def test_targets_move_by_tau() -> None:
    learner = make()
    before = tensors(learner.target_critics)
    learner.update(make_batch())
    for old, new, source in zip(
        before, learner.target_critics.parameters(), learner.model.critics.parameters(), strict=True
    ):
        torch.testing.assert_close(new, old + 0.1 * (source - old), rtol=0, atol=1e-7)


def test_update_reports_metrics_and_priorities() -> None:
    result = make().update(make_batch())
    assert {"critic_loss", "actor_loss", "target_q_mean", "entropy_term", "alpha"} <= set(result.metrics)
    assert all(np.isfinite(value) for value in result.metrics.values())
    assert result.priorities is not None
    assert result.priorities.shape == (8,)


def test_deterministic_actions_are_tanh_of_the_mean_and_samples_vary() -> None:
    learner, obs = make(), make_batch()["obs"]
    mean = learner.model.actor.gaussian(obs)[0]
    torch.testing.assert_close(learner.act(obs, deterministic=True).actions, mean.tanh())
    assert not torch.equal(learner.act(obs).actions, learner.act(obs).actions)
    assert_numpy_acts_like_torch(learner)


def test_sac_solves_a_bandit() -> None:
    torch.manual_seed(0)
    model = MLPSACModel(obs_dim=3, action_dim=1, hidden_sizes=(32, 32))
    assert_solves_bandit(SAC(model=model, learning_rate=3e-3, alpha=0.01), 500)
