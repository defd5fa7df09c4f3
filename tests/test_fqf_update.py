"""FQF: proposed fractions, the exact gradient of the Wasserstein error, two optimizers that do not touch each other."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from rl_training.algorithms.fqf import FQF
from rl_training.algorithms.q_learning import choose
from rl_training.errors import UserError
from rl_training.models.mlp_fqf_network import MLPFQFNetwork
from rl_training.ops.distributional import fraction_gradient


def make_learner(**options):
    network = MLPFQFNetwork(obs_dim=3, action_dim=2, hidden_sizes=(16,), num_quantiles=8, embedding_dim=16)
    return FQF(q_network=network, num_quantiles=8, **{"learning_rate": 1e-3, **options})


def make_batch(size=16):
    g = torch.Generator().manual_seed(0)
    return {
        "obs": torch.randn(size, 3, generator=g), "next_obs": torch.randn(size, 3, generator=g),
        "actions": torch.randint(2, (size,), generator=g), "rewards": torch.randn(size, generator=g),
        "dones": (torch.rand(size, generator=g) < 0.2).float(),
    }  # fmt: skip


def test_fractions_run_from_zero_to_one():
    network = make_learner().q_network
    network.fraction_layer.weight.data.normal_(0, 2)
    output = network(torch.randn(9, 3))
    assert torch.equal(output.taus[:, 0], torch.zeros(9))
    assert torch.equal(output.taus[:, -1], torch.ones(9))
    assert (output.taus.diff(dim=-1) >= 0).all()
    torch.testing.assert_close(output.tau_hats, (output.taus[:, 1:] + output.taus[:, :-1]) / 2)
    assert not output.tau_hats.requires_grad
    assert output.taus.requires_grad
    assert not torch.equal(output.taus[0], output.taus[1])  # they depend on the state


def test_first_fractions_are_about_even():
    taus = make_learner().q_network(torch.randn(9, 3)).taus
    torch.testing.assert_close(taus, torch.linspace(0, 1, 9).expand(9, 9), atol=0.02, rtol=0)


def test_update_reports_the_contract_metrics_and_priorities():
    learner = make_learner()
    result = learner.update(make_batch())
    names = {"loss", "q_value_mean", "target_mean", "td_error_mean", "fraction_loss", "entropy_loss", "fraction_shift"}
    assert names <= set(result.metrics)
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert result.metrics["entropy_loss"] == pytest.approx(-math.log(8), abs=1e-2)
    assert learner.last_td_errors.shape == (16,)
    assert result.priorities is learner.last_td_errors
    assert not learner.last_td_errors.requires_grad


def test_optimizers_do_not_touch_each_others_parameters():
    def moved(learner, **extra):
        before = {name: p.clone() for name, p in learner.q_network.named_parameters()}
        learner.update({**make_batch(), **extra})
        return {name for name, p in learner.q_network.named_parameters() if not torch.equal(p, before[name])}

    every = {name for name, _ in make_learner().q_network.named_parameters()}
    fraction = {"fraction_layer.weight", "fraction_layer.bias"}
    assert moved(make_learner(learning_rate=0.0, fraction_learning_rate=1e-2)) == fraction
    assert moved(make_learner(fraction_learning_rate=0.0)) == every - fraction
    learner = make_learner()
    assert learner.fraction_optimizer.kind == "rmsprop"
    learner.learning_rate = 0.5  # a schedule of the one leaves the other
    assert learner.fraction_learning_rate == 2.5e-9
    learner.fraction_learning_rate = 0.25
    assert (learner.optimizer.learning_rate, learner.fraction_optimizer.learning_rate) == (0.5, 0.25)


def head_gradients(learner, rows, targets):
    """The fraction layer's gradients on these rows, and the other terms."""
    outputs, backward = learner.trace(rows)
    terms = learner.terms(rows, outputs, targets)
    found = torch.autograd.grad(terms.head_loss, learner.fraction_optimizer._params)
    return found, terms, backward(torch.ones_like(outputs))


def test_values_and_fractions_have_gradients_of_their_own():
    learner = make_learner()
    rows = learner.rows(make_batch(), {})
    found, _, values = head_gradients(learner, rows, learner.targets(rows).detach())
    assert [g.shape for g in values] == [p.shape for p in learner.value_parameters()]  # none for the fraction layer
    own = list(learner.q_network.fraction_layer.parameters())
    assert [g.shape for g in found] == [p.shape for p in own]
    assert all(g.abs().sum() > 0 for g in found)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
def test_fraction_loss_has_the_gradient_of_the_paper_and_the_entropy_s(entropy_coef):
    learner = make_learner(entropy_coef=entropy_coef)
    network = learner.q_network
    network.fraction_layer.weight.data.normal_()
    batch = make_batch()
    rows = learner.rows(batch, {})
    with torch.no_grad():
        hats, inner = (choose(q, batch["actions"]) for q in (network(batch["obs"])[0], network(batch["obs"])[3]))
    found, _, _ = head_gradients(learner, rows, learner.targets(rows).detach())
    fractions = network.propose(network.features(batch["obs"]))
    slopes = fraction_gradient(quantiles_tau=inner, quantile_hats=hats)
    loss = (slopes * fractions.taus[:, 1:-1]).sum(-1).mean() - entropy_coef * fractions.entropy.mean()
    wanted = torch.autograd.grad(loss, list(network.fraction_layer.parameters()))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


class SquareQuantiles(MLPFQFNetwork):
    """F^-1(tau) = tau^2 for every state and action."""

    def quantiles(self, features, taus):
        square = taus.square().unsqueeze(1).expand(-1, self.action_dim, -1)
        return square + 0.0 * self.head.bias[:1]


def wasserstein(logits):
    """1-Wasserstein distance in float64 between F^-1(w) = w^2 and its steps at the fractions softmax(logits)."""
    edges = torch.cat([torch.zeros(1, dtype=torch.float64), logits.softmax(0).cumsum(0)])
    total = torch.zeros((), dtype=torch.float64)
    for low, high in pairwise(edges):
        w = low + (high - low) * torch.linspace(0, 1, 20_001, dtype=torch.float64)
        total = total + torch.trapezoid((w.square() - ((low + high) / 2).square()).abs(), w)
    return total


def test_fraction_gradient_is_that_of_the_wasserstein_distance():
    network = SquareQuantiles(obs_dim=3, action_dim=2, hidden_sizes=(4,), num_quantiles=4)
    network.fraction_layer = nn.Linear(4, 4)
    network.fraction_layer.weight.data.zero_()
    network.fraction_layer.bias.data = torch.tensor([0.2, 0.3, 0.2, 0.3]).log()  # tau = 0, .2, .5, .7, 1
    learner = FQF(q_network=network, num_quantiles=4, learning_rate=0.0)
    rows = learner.rows(make_batch(1), {})
    found, terms, _ = head_gradients(learner, rows, torch.zeros(1, 4))
    gradient = found[1]
    logits, step = network.fraction_layer.bias.detach().double(), 1e-5
    numerical = [
        float(wasserstein(logits + step * unit) - wasserstein(logits - step * unit)) / (2 * step)
        for unit in torch.eye(4, dtype=torch.float64)
    ]
    torch.testing.assert_close(gradient.double(), torch.tensor(numerical, dtype=torch.float64), rtol=1e-3, atol=1e-5)
    taus = torch.tensor([0.2, 0.5, 0.7])
    golden = torch.tensor([-0.0525, 0.0175, -0.1025])
    torch.testing.assert_close(terms.metrics["fraction_loss"][0], (golden * taus).sum(), rtol=1e-4, atol=1e-6)


def test_fractions_descend_to_a_smaller_wasserstein_distance():
    network = SquareQuantiles(obs_dim=3, action_dim=2, hidden_sizes=(4,), num_quantiles=4)
    learner = FQF(q_network=network, num_quantiles=4, learning_rate=0.0, fraction_learning_rate=3e-3)
    network.fraction_layer.weight.data.zero_()
    network.fraction_layer.bias.data.copy_(torch.tensor([0.2, 0.3, 0.2, 0.3]).log())
    before = wasserstein(network.fraction_layer.bias.detach().double())
    for _ in range(200):
        learner.update(make_batch(1), sync=False)
        network.fraction_layer.weight.data.zero_()
    after = wasserstein(network.fraction_layer.bias.detach().double())
    assert after < 0.97 * before


def test_entropy_keeps_fractions_from_collapsing():
    def entropy(coefficient):
        torch.manual_seed(0)
        learner = make_learner(learning_rate=0.0, fraction_learning_rate=1e-2, entropy_coef=coefficient)
        learner.q_network.fraction_layer.bias.data.copy_(torch.linspace(-2, 2, 8))
        for _ in range(100):
            result = learner.update(make_batch())
        return -result.metrics["entropy_loss"]

    start = make_learner().q_network
    start.fraction_layer.bias.data.copy_(torch.linspace(-2, 2, 8))
    initial = float(start.propose(torch.zeros(1, 16)).entropy.detach())
    assert entropy(10.0) > initial + 0.1
    assert entropy(10.0) > entropy(0.0)


def test_target_quantiles_stand_at_the_online_layers_fractions_and_follow_the_target_network():
    learner = make_learner(target_update_interval=2)
    rows = learner.rows(make_batch(), {})
    with torch.no_grad():
        before = learner.targets(rows)
        learner.target_network.fraction_layer.bias.normal_()  # the copy of the fraction layer is not read
        assert torch.equal(learner.targets(rows), before)
        learner.q_network.fraction_layer.bias.copy_(torch.linspace(-1, 1, 8))
        assert not torch.equal(learner.targets(rows), before)
    learner.update(make_batch())
    assert not torch.equal(learner.target_network.head.weight, learner.q_network.head.weight)
    learner.update(make_batch())
    assert torch.equal(learner.target_network.head.weight, learner.q_network.head.weight)


def test_action_values_weigh_the_quantiles_by_their_widths():
    learner = make_learner()
    learner.q_network.fraction_layer.bias.data.copy_(torch.linspace(-1, 1, 8))
    obs = torch.randn(4, 3)
    output = learner.q_network(obs)
    expected = (output.taus.diff(dim=-1).unsqueeze(1) * output.quantile_hats).sum(-1)
    torch.testing.assert_close(learner.action_values(obs, deterministic=True), expected)


def test_the_network_must_have_as_many_fractions_as_the_learner():
    network = MLPFQFNetwork(obs_dim=3, action_dim=2, hidden_sizes=(4,), num_quantiles=8)
    with pytest.raises(UserError, match="num_quantiles is 32"):
        FQF(q_network=network, num_quantiles=32)


def skewed(fractions):
    """The quantile function of a return that is mostly within [0, 1] and one time in five anywhere up to 21."""
    return np.where(fractions < 0.8, fractions / 0.8, 1.0 + 100.0 * (fractions - 0.8))


def fit_to_skewed_returns(fraction_learning_rate):
    """The 1-Wasserstein error of the learned distribution, and how far its fractions are from even ones."""
    torch.manual_seed(0)
    network = MLPFQFNetwork(obs_dim=1, action_dim=1, hidden_sizes=(16,), num_quantiles=4, embedding_dim=8)
    learner = FQF(
        q_network=network, num_quantiles=4, learning_rate=1e-2, fraction_learning_rate=fraction_learning_rate, kappa=0.0
    )
    rng, obs = np.random.default_rng(0), torch.ones(64, 1)
    batch = {"obs": obs, "next_obs": obs, "actions": torch.zeros(64).long(), "dones": torch.ones(64)}
    for update in range(800):
        learner.learning_rate = 1e-2 if update < 600 else 1e-3
        result = learner.update({**batch, "rewards": torch.from_numpy(skewed(rng.random(64))).float()}, sync=False)
    with torch.no_grad():
        output = network(obs[:1])
    grid = (np.arange(10_000) + 0.5) / 10_000
    interval = np.searchsorted(output.taus[0].numpy(), grid, side="right") - 1
    error = np.abs(skewed(grid) - output.quantile_hats[0, 0].numpy()[interval]).mean()
    return error, result.metrics["fraction_shift"].mean().item()


def test_fractions_that_learn_fit_a_skewed_return_better_and_the_metric_shows_that_they_moved():
    still, still_shift = fit_to_skewed_returns(2.5e-9)
    moved, moved_shift = fit_to_skewed_returns(1e-3)
    assert still_shift < 0.01
    assert moved_shift > 0.05
    assert moved < 0.8 * still


def test_fractions_learn_by_the_rmsprop_of_the_paper():
    """Decay 0.95 and epsilon 1e-5 outside the root, whatever the optimizer of the values is."""
    learner, generator = make_learner(fraction_learning_rate=1e-3), torch.Generator().manual_seed(0)
    bias = learner.q_network.fraction_layer.bias
    expected, square = bias.detach().clone(), torch.zeros(8)
    for _ in range(5):
        gradients = [torch.randn(p.shape, generator=generator) for p in learner.q_network.fraction_layer.parameters()]
        square = 0.95 * square + 0.05 * gradients[1] ** 2
        expected -= 1e-3 * gradients[1] / (square.sqrt() + 1e-5)
        learner.fraction_optimizer.apply_gradients(gradients)
    torch.testing.assert_close(bias.detach(), expected)
