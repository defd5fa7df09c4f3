"""Losses that come with their slopes: published numbers, and slopes that are autograd's of the same values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_training.algorithms.a2c import a2c_loss
from rl_training.algorithms.appo import appo_loss
from rl_training.algorithms.impala import impala_loss
from rl_training.algorithms.ppo import ppo_loss
from rl_training.algorithms.q_learning import choose
from rl_training.ops.distributional import CHUNK, cross_entropy, quantile_huber, quantile_huber_loss
from rl_training.ops.losses import (
    chosen_slopes,
    clipped_surrogate,
    huber,
    policy_gradient,
    squared_error,
    value_error,
    weighted_mean,
)
from rl_training.ops.policy import categorical_log_prob

ROWS = 11


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("sign", "expected"), [(1.0, -0.17117467), (-1.0, 0.19333333)])
@pytest.mark.parametrize("clip_coef", [0.2, torch.tensor(0.2)], ids=["float", "tensor"])
def test_clipped_surrogate_matches_the_published_numbers(sign: float, expected: float, clip_coef: Any) -> None:
    actions = torch.tensor([0, 1, 2])
    old = categorical_log_prob(torch.tensor([[1.0, 1, 1], [2, 0, 0], [-3, -2, -1]]).log_softmax(-1), actions)
    new = categorical_log_prob(torch.tensor([[1.0, 1, 1], [2, 0, 0], [-1, -2, -3]]).log_softmax(-1), actions)
    objective, _ = clipped_surrogate(new - old, sign * torch.tensor([0.3, 0.2, 0.1]), clip_coef)
    assert objective.shape == (3,)
    assert float(-objective.mean()) == pytest.approx(expected, abs=1e-4)


def test_clipped_surrogate_stops_the_gradient_only_beyond_the_clip_in_the_improving_direction() -> None:
    logratio, advantages = torch.tensor([0.0, 1.0, -1.0, 1.0, -1.0]), torch.tensor([2.0, 1.0, -1.0, -1.0, 1.0])
    _, slopes = clipped_surrogate(logratio, advantages, 0.2)
    torch.testing.assert_close(slopes, torch.tensor([2.0, 0.0, 0.0, -math.e, math.exp(-1)]))


ELEMENTARY: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], Tensor, tuple[Any, ...]]] = {
    "clipped_surrogate": (clipped_surrogate, normal(ROWS), (normal(ROWS, seed=1), 0.2)),
    "policy_gradient": (policy_gradient, normal(ROWS), (normal(ROWS, seed=1),)),
    "squared_error": (squared_error, normal(ROWS), (normal(ROWS, seed=1),)),
    "huber": (huber, 2 * normal(ROWS), (2 * normal(ROWS, seed=1),)),
    "cross_entropy": (cross_entropy, normal(ROWS, 5), (normal(ROWS, 5, seed=1).softmax(-1),)),
}


@pytest.mark.parametrize("name", ELEMENTARY)
def test_slopes_are_those_of_autograd(name: str) -> None:
    function, x, others = ELEMENTARY[name]
    x = x.clone().requires_grad_()
    values, slopes = function(x, *others)
    assert not slopes.requires_grad
    torch.testing.assert_close(slopes, torch.autograd.grad(values.sum(), x)[0], rtol=1e-5, atol=1e-6)


def test_the_clipped_value_error_and_its_slope_in_numbers() -> None:
    """Old value 1 and clip 0.5: inside the clip, beyond it on the side of the return, and beyond it on the other."""
    values, returns = torch.tensor([1.25, 2.0, 2.0, 0.0]), torch.tensor([3.0, 3.0, 1.0, -1.0])
    errors, slopes = value_error(values, returns, torch.ones(4), 0.5)
    assert errors.tolist() == [0.5 * 1.75**2, 0.5 * 1.5**2, 0.5, 0.5 * 1.5**2]
    assert slopes.tolist() == [-1.75, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("clip", [0.1, 1.0, torch.tensor(0.3)], ids=["narrow", "wide", "tensor"])
def test_the_slope_of_the_clipped_value_error_survives_rounding(clip: Any) -> None:
    """Inside the clip old + (v - old) often rounds to another number than v; loss and slope must not depend on it."""
    old, returns = 0.3 * normal(5000), normal(5000, seed=1)
    values = (0.3 * normal(5000, seed=2)).requires_grad_()
    inside = (values - old).abs() <= clip
    assert (old + (values - old) != values)[inside].float().mean() > 0.02
    errors, slopes = value_error(values, returns, old, clip)
    torch.testing.assert_close(slopes, torch.autograd.grad(errors.sum(), values)[0])
    assert torch.equal(slopes[inside], (values - returns)[inside])
    exact, start, end = values.detach().double().requires_grad_(), old.double(), returns.double()
    held = (start + (exact - start).clamp(-float(clip), float(clip)) - end).square()
    wanted = 0.5 * torch.maximum((exact - end).square(), held)
    torch.testing.assert_close(errors.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slopes.double(), torch.autograd.grad(wanted.sum(), exact)[0], rtol=1e-5, atol=1e-6)


OUTPUTS = {"a2c": "logprobs", "ppo": "new_logprobs", "impala": "target_logprobs", "appo": "target_logprobs"}
LOSSES: dict[str, Callable[[Any, float], Any]] = {
    "a2c": lambda batch, ent_coef: a2c_loss(batch, ent_coef, 0.7),
    "ppo": lambda batch, ent_coef: ppo_loss(batch, 0.2, ent_coef, 0.7),
    "impala": lambda batch, ent_coef: impala_loss(batch, ent_coef, 0.7),
    "appo": lambda batch, ent_coef: appo_loss(batch, 0.2, ent_coef, 0.7),
}


@pytest.mark.parametrize("ent_coef", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_slopes_of_the_rollout_losses_are_those_of_autograd(name: str, weighted: bool, ent_coef: float) -> None:
    if weighted and name in ("a2c", "ppo"):
        pytest.skip("flat rows have no reset rows")
    names = ("logprobs", "behavior_logprobs", "advantages", "pg_advantages", "returns", "vtrace_targets")
    batch = {key: normal(ROWS, seed=i) for i, key in enumerate(names)}
    if weighted:
        batch["weights"] = (normal(ROWS, seed=7) > 0).float()
    leaves = [0.3 * normal(ROWS, seed=20 + i) for i in range(3)]
    for leaf, key in zip(leaves, (OUTPUTS[name], "values", "entropy"), strict=True):
        batch[key] = leaf.requires_grad_()
    losses = LOSSES[name](batch, ent_coef)
    wanted = torch.autograd.grad(losses["loss"], leaves)
    for mine, theirs in zip(losses.slopes, wanted, strict=True):
        torch.testing.assert_close(torch.zeros(ROWS) if mine is None else mine, theirs, rtol=1e-5, atol=1e-6)
    assert (losses.slopes[2] is None) == (ent_coef == 0.0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(ROWS, 3), (ROWS, 3, 4)])
def test_slopes_of_a_weighted_mean_reach_the_taken_actions_only(shape: tuple[int, ...], weighted: bool) -> None:
    outputs, actions = normal(*shape).requires_grad_(), torch.arange(ROWS) % 3
    weights = normal(ROWS, seed=3).abs() if weighted else None
    losses = choose(outputs, actions).square()
    per_row = losses if losses.dim() == 1 else losses.sum(-1)
    wanted = torch.autograd.grad(weighted_mean(per_row, weights), outputs)[0]
    slopes = chosen_slopes(2 * choose(outputs.detach(), actions), actions, outputs.detach(), weights)
    torch.testing.assert_close(slopes, wanted)


def plain_quantile_huber(quantiles: Tensor, targets: Tensor, taus: Tensor, kappa: float) -> Tensor:
    """The formula of the paper, pair by pair."""
    u = targets.unsqueeze(-2) - quantiles.unsqueeze(-1)
    size = u.abs()
    huber = size if kappa == 0 else torch.where(size <= kappa, 0.5 * u.square(), kappa * (size - 0.5 * kappa)) / kappa
    return ((taus.unsqueeze(-1) - (u.detach() < 0).float()).abs() * huber).sum(-2).mean(-1)


@pytest.mark.parametrize("kappa", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("n", "m"), [(3, 5), (200, 100)])
def test_the_quantile_loss_and_its_slopes_are_those_of_the_formula(n: int, m: int, kappa: float) -> None:
    batch = 40
    assert (batch * n * m > CHUNK) == (n == 200)  # the large one is done in pieces
    quantiles, targets = (2 * normal(batch, n)).requires_grad_(), 2 * normal(batch, m, seed=1)
    taus, weights = normal(batch, n, seed=2).sigmoid(), normal(batch, seed=3).abs()
    expected = plain_quantile_huber(quantiles, targets, taus, kappa)
    wanted = torch.autograd.grad((expected * weights).sum(), quantiles)[0]
    losses, slopes = quantile_huber(quantiles, targets, taus, kappa)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(slopes * weights.unsqueeze(1), wanted, rtol=1e-4, atol=1e-5)
    found = quantile_huber_loss(quantiles, targets, taus, kappa)
    torch.testing.assert_close(torch.autograd.grad((found * weights).sum(), quantiles)[0], wanted, rtol=1e-4, atol=1e-5)
    shared, _ = quantile_huber(quantiles, targets, taus[:1], kappa)
    torch.testing.assert_close(shared, quantile_huber(quantiles, targets, taus[:1].expand(batch, n), kappa)[0])
