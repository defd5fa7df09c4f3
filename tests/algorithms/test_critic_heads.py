"""What critics predict, and its targets and losses: numbers computed by hand in float64, and properties."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_training.algorithms.critic_heads import QuantileHead, ValueHead, quantile_errors, truncate


def test_tqc_on_numbers_made_by_hand() -> None:
    next_outputs = torch.tensor([[[1.0, 2, 6]], [[0.0, 3, 4]]], dtype=torch.float64)
    targets = QuantileHead(1).targets(next_outputs, lambda z: 0.5 + 0.99 * (z - 0.2 * -1.5))
    torch.testing.assert_close(targets, torch.tensor([[0.797, 1.787, 2.777, 3.767]], dtype=torch.float64))
    outputs = torch.tensor([[[0.5, 1.5, 2.5]], [[0.0, 1, 2]]], dtype=torch.float64)
    losses, priorities = QuantileHead(1).losses(outputs, targets, None)
    assert float(losses["critic_loss"]) == pytest.approx(0.324288, abs=1e-6)
    assert priorities.tolist() == pytest.approx([0.324288], abs=1e-6)


def test_quantiles_of_all_critics_are_pooled_before_the_largest_are_dropped() -> None:
    quantiles = torch.tensor([[[5.0, 1, 6]], [[0.0, 3, 2]]])
    assert truncate(quantiles, 1).tolist() == [[0.0, 1, 2, 3]]  # each alone would keep 1, 5, 0, 2
    assert truncate(quantiles, 0).tolist() == [[0.0, 1, 2, 3, 5, 6]]
    assert truncate(quantiles[:1], 2).tolist() == [[1.0]]


def test_quantile_errors_are_those_of_every_pair_one_by_one() -> None:
    draws = torch.Generator().manual_seed(0)
    quantiles = torch.randn(3, 4, 5, generator=draws, dtype=torch.float64)
    targets = 2 * torch.randn(4, 7, generator=draws, dtype=torch.float64)
    expected = torch.zeros(3, 4, dtype=torch.float64)
    for e in range(3):
        for b in range(4):
            for i in range(5):
                for j in range(7):
                    u = float(targets[b, j] - quantiles[e, b, i])
                    huber = 0.5 * u * u if abs(u) <= 1 else abs(u) - 0.5
                    expected[e, b] += abs((i + 0.5) / 5 - (u < 0)) * huber / 35
    torch.testing.assert_close(quantile_errors(quantiles, targets), expected, rtol=1e-6, atol=1e-7)


def test_quantiles_settle_where_their_share_of_the_targets_is_below_them() -> None:
    """Minimizing the loss against 1,000 samples finds their quantiles, up to the smoothing by kappa 1."""
    samples = 100 * torch.linspace(0, 1, 1_000).unsqueeze(0)
    quantiles = torch.zeros(1, 1, 4, requires_grad=True)
    for _ in range(400):
        (gradient,) = torch.autograd.grad(quantile_errors(quantiles, samples).sum(), quantiles)
        with torch.no_grad():
            quantiles -= 60 * gradient
    torch.testing.assert_close(quantiles.detach().flatten(), torch.tensor([12.5, 37.5, 62.5, 87.5]), rtol=0, atol=0.5)


def test_weights_count_rows_and_priorities_leave_them_out() -> None:
    outputs, targets = torch.randn(2, 3, 4), torch.randn(3, 5)
    weights = torch.tensor([0.0, 1.0, 3.0])
    errors = quantile_errors(outputs, targets)
    losses, priorities = QuantileHead(0).losses(outputs, targets, weights)
    torch.testing.assert_close(losses["critic_loss"], (errors * weights).mean())
    torch.testing.assert_close(priorities, errors.mean(0))


def test_redq_takes_the_minimum_of_its_subset_for_every_critic() -> None:
    """On numbers made by hand, with the subset (1, 3); the published loss is a sum over critics, ours is a mean."""
    next_outputs = torch.tensor([3.0, 2, 5, 1.5, 4], dtype=torch.float64).view(5, 1)[[1, 3]]
    targets = ValueHead().targets(next_outputs, lambda q: 1.0 + 0.99 * (q - 0.1 * -2.0))
    assert targets.tolist() == pytest.approx([2.683])
    outputs: Tensor = torch.tensor([2.0, 3, 2.5, 2, 1], dtype=torch.float64).view(5, 1)
    losses, priorities = ValueHead().losses(outputs, targets, None)
    assert 5 * float(losses["critic_loss"]) == pytest.approx(3.899445)
    assert float(priorities) == pytest.approx(sum([0.683, 0.317, 0.183, 0.683, 1.683]) / 5)


def test_values_are_the_outputs_or_the_means_of_quantiles() -> None:
    outputs = torch.tensor([[[1.0, 2, 6]], [[0.0, 3, 4]]])
    assert QuantileHead(1).values(outputs).flatten().tolist() == pytest.approx([3.0, 7 / 3])
    assert ValueHead().values(outputs[..., 0]).flatten().tolist() == [1.0, 0.0]
