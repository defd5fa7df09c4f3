"""NAF's mathematics: a quadratic advantage whose maximum is V at mu, and a target from the target network's V."""

from functools import partial

import pytest
import torch
from torch import nn

from continuous_cases import (
    assert_numpy_acts_like_torch,
    assert_only_termination_stops_bootstrapping,
    assert_solves_bandit,
    make_batch,
    make_learner,
    tensors,
)
from rl_training.algorithms.naf import NAF, naf_loss
from rl_training.models.mlp_naf import MLPNAFModel


def make_model(action_dim: int = 2, seed: int = 0) -> MLPNAFModel:
    torch.manual_seed(seed)
    model = MLPNAFModel(obs_dim=3, action_dim=action_dim, hidden_sizes=(16, 16))
    nn.init.normal_(model.network[-1].weight, std=0.5)  # away from the flat start, so that L is not the identity
    nn.init.normal_(model.network[-1].bias, std=0.5)
    return model


make = partial(make_learner, NAF, MLPNAFModel)


@pytest.mark.parametrize("action_dim", [1, 2, 4])
def test_the_maximum_over_actions_is_v_at_mu(action_dim: int) -> None:
    model, obs = make_model(action_dim), torch.randn(6, 3)
    mu, values = model.actor(obs), model.state_values(obs)
    torch.testing.assert_close(model.q_values(obs, mu), values)
    for _ in range(50):
        others = torch.rand(6, action_dim) * 2 - 1
        assert (model.q_values(obs, others) <= values + 1e-6).all()
    climbing = torch.zeros(6, action_dim, requires_grad=True)
    (gradient,) = torch.autograd.grad(model.q_values(obs, climbing).sum(), climbing)
    assert (gradient.norm(dim=-1) > 0).all()
    at_mu = mu.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model.q_values(obs, at_mu).sum(), at_mu)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-5)


@pytest.mark.parametrize("action_dim", [1, 3])
def test_l_is_lower_triangular_and_p_positive_definite(action_dim: int) -> None:
    model, obs = make_model(action_dim), torch.randn(6, 3)
    mu, values, factor = model.heads(obs)
    assert torch.equal(factor, factor.tril())
    assert (factor.diagonal(dim1=-2, dim2=-1) > 0).all()
    if action_dim > 1:
        assert (factor.tril(-1) != 0).any()
    precision = factor @ factor.mT
    assert (torch.linalg.eigvalsh(precision) > 0).all()
    actions = torch.rand(6, action_dim) * 2 - 1
    away = (actions - mu).unsqueeze(-1)
    by_hand = values - 0.5 * (away.mT @ precision @ away).flatten()
    torch.testing.assert_close(model.q_values(obs, actions), by_hand)


def test_every_entry_of_l_has_its_own_output() -> None:
    model = make_model(3)
    (gradient,) = torch.autograd.grad(model.heads(torch.randn(1, 3))[2].sum(), [model.network[-1].bias])
    assert (gradient[4:] != 0).all()  # after mu (3) and V (1) come 3 on the diagonal and 3 below it
    assert len(gradient) == 10


def test_naf_loss_on_numbers_made_by_hand() -> None:
    losses = naf_loss({"q_values": torch.tensor([1.0, 2]), "target_q_values": torch.tensor([2.0, 4])})
    assert {name: float(value) for name, value in losses.items()} == {
        "loss": 2.5, "q_value_mean": 1.5, "q_mean": 1.5, "target_q_mean": 3.0,
    }  # fmt: skip


def test_only_termination_stops_bootstrapping_from_the_targets_v() -> None:
    assert_only_termination_stops_bootstrapping(make, lambda learner, obs: learner.target_network.state_values(obs))


def test_target_moves_by_tau_and_priorities_are_absolute_errors() -> None:
    learner, batch = make(), make_batch()
    before = tensors(learner.target_network)
    errors = (batch["rewards"] - learner.model.q_values(batch["obs"], batch["actions"])).abs().detach()
    result = learner.update({**batch, "dones": torch.ones(8)})
    torch.testing.assert_close(result.priorities, errors)
    assert {"loss", "q_value_mean", "q_mean", "target_q_mean"} <= set(result.metrics)
    for old, new, source in zip(before, learner.target_network.parameters(), learner.model.parameters(), strict=True):
        torch.testing.assert_close(new, old + 0.1 * (source - old), rtol=0, atol=1e-7)


def test_numpy_acts_like_torch() -> None:
    assert_numpy_acts_like_torch(make(exploration_noise=0.2))


def test_naf_solves_a_bandit() -> None:
    torch.manual_seed(0)
    model = MLPNAFModel(obs_dim=3, action_dim=1, hidden_sizes=(32, 32))
    assert_solves_bandit(NAF(model=model, learning_rate=3e-3), 300)
