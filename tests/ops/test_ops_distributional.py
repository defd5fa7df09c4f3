"""Projection, quantile regression, FQF's fraction gradient and two-hot codes: published numbers and properties."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rl_training.ops.distributional import (
    categorical_cross_entropy,
    fraction_gradient,
    project_by_ramps,
    project_categorical,
    quantile_huber_loss,
    symexp,
    symlog,
    two_hot,
)

UNEVEN = torch.tensor([-3.0, -1.0, -0.5, 0.5, 4.0], dtype=torch.float64)
EVEN = torch.linspace(-2, 2, 9, dtype=torch.float64)
Projection = Callable[[Tensor, Tensor, Tensor], Tensor]


def project_by_definition(atoms: Tensor, probs: Tensor, support: Tensor) -> Tensor:
    """Each atom's mass by a plain search for the pair of support points around it."""
    out = torch.zeros(len(atoms), len(support), dtype=probs.dtype)
    for b in range(atoms.shape[0]):
        for m in range(atoms.shape[1]):
            x = min(max(atoms[b, m], support[0]), support[-1])
            low = max(k for k in range(len(support) - 1) if support[k] <= x)
            share = (x - support[low]) / (support[low + 1] - support[low])
            out[b, low] += probs[b, m] * (1 - share)
            out[b, low + 1] += probs[b, m] * share
    return out


def random_distributions(seed: int, batch: int = 6, num_atoms: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    atoms = 2.5 * torch.randn(batch, num_atoms, generator=generator, dtype=torch.float64)
    return atoms, torch.rand(batch, num_atoms, generator=generator, dtype=torch.float64).softmax(-1)


@pytest.fixture(params=[project_categorical, project_by_ramps], ids=["CPU", "GPU"])
def project(request: pytest.FixtureRequest) -> Projection:
    """Both forms: a GPU's does without scatter_add_, which is not deterministic there."""
    return request.param


def test_projection_matches_the_published_numbers(project: Projection) -> None:
    atoms = torch.arange(-1, 1, 0.25).repeat(2, 1)
    atoms[1] += 1
    weights = atoms.clone()
    weights[0, ::2] = 0
    weights[1, 1::2] = 0
    support = torch.tensor([-1, -0.5, 0, 0.5])
    first = project(atoms[:1], weights[:1], support)
    second = project(atoms[1:], weights[1:], support + 1)
    torch.testing.assert_close(torch.cat([first, second]), torch.tensor([[-0.375, -0.5, 0, 0.875], [0, 0.5, 1, 1.5]]))


@pytest.mark.parametrize("support", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("seed", range(3))
def test_projection_splits_each_atoms_mass_between_neighbours(project: Projection, support: Tensor, seed: int) -> None:
    atoms, probs = random_distributions(seed)
    projected = project(atoms, probs, support)
    torch.testing.assert_close(projected, project_by_definition(atoms, probs, support))
    torch.testing.assert_close(projected.sum(-1), torch.ones(6, dtype=torch.float64))


def test_projection_keeps_the_mean_of_atoms_inside_the_support(project: Projection) -> None:
    atoms, probs = random_distributions(7)
    atoms = atoms.clamp(-2, 2)
    projected = project(atoms, probs, EVEN)
    torch.testing.assert_close(projected @ EVEN, (atoms * probs).sum(-1))


def test_projection_does_not_depend_on_the_order_of_the_atoms(project: Projection) -> None:
    atoms, probs = random_distributions(8)
    order = torch.randperm(atoms.shape[1], generator=torch.Generator().manual_seed(0))
    shuffled = project(atoms[:, order], probs[:, order], EVEN)
    torch.testing.assert_close(shuffled, project(atoms, probs, EVEN))


@pytest.mark.parametrize("support", [torch.linspace(-10, 10, 51), torch.linspace(-100, 100, 101), UNEVEN.float()])
def test_projection_of_atoms_on_the_support_changes_nothing(project: Projection, support: Tensor) -> None:
    probs = torch.rand(4, len(support), generator=torch.Generator().manual_seed(1)).softmax(-1)
    rounding = 0.0 if project is project_categorical else 5e-7
    torch.testing.assert_close(project(support.expand(4, -1), probs, support), probs, rtol=0, atol=rounding)


def test_projection_puts_everything_at_the_clipped_reward_of_a_terminal_row(project: Projection) -> None:
    atoms = torch.tensor([[100.0] * 3, [-100.0] * 3, [float("inf")] * 3])
    probs = torch.full((3, 3), 1 / 3)
    expected = torch.tensor([[0.0, 0, 1], [1, 0, 0], [0, 0, 1]])
    torch.testing.assert_close(project(atoms, probs, torch.tensor([-1.0, 0, 1])), expected)


def test_categorical_td_loss_matches_the_published_numbers(project: Projection) -> None:
    support = torch.tensor([0.5, 1.0, 1.5])
    rewards, discounts = torch.tensor([0.5, 0, 0.5, 0.8, -0.1]), torch.tensor([0.8, 1, 0.8, 0, 1])
    logits = torch.tensor([[0.0, 9, 0], [9, 0, 9], [0, 9, 0], [9, 9, 0], [9, 0, 9]])
    next_logits = torch.tensor([[0.0, 0, 9], [1, 1, 1], [0, 0, 9], [1, 1, 1], [0, 9, 9]])
    atoms = rewards[:, None] + discounts[:, None] * support
    loss = categorical_cross_entropy(logits, project(atoms, next_logits.softmax(-1), support))
    expected = torch.tensor([8.998915, 3.6932087, 8.998915, 0.69320893, 5.1929307])
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)


def random_quantiles(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    quantiles, targets = torch.randn(4, 5, generator=generator), 2 * torch.randn(4, 7, generator=generator)
    return quantiles, targets, torch.rand(4, 5, generator=generator)


@pytest.mark.parametrize("kappa", [0.0, 0.5, 1.0, 2.0])
def test_quantile_loss_is_the_sum_over_predictions_of_the_mean_over_targets(kappa: float) -> None:
    quantiles, targets, taus = random_quantiles(0)
    expected = torch.zeros(4)
    for b in range(4):
        for i in range(5):
            for j in range(7):
                u = float(targets[b, j] - quantiles[b, i])
                huber = abs(u) if kappa == 0 else (0.5 * u * u if abs(u) <= kappa else kappa * (abs(u) - 0.5 * kappa))
                expected[b] += abs(float(taus[b, i]) - (u < 0)) * huber / (kappa or 1.0) / 7
    torch.testing.assert_close(quantile_huber_loss(quantiles, targets, taus, kappa), expected)


def test_quantile_loss_agrees_with_sb3_contrib() -> None:
    """Theirs is for kappa = 1 and also averages over the batch; without `sum_over_quantiles` it averages over N too."""
    reference = pytest.importorskip("sb3_contrib.common.utils").quantile_huber_loss
    quantiles, targets, taus = random_quantiles(1)
    ours = quantile_huber_loss(quantiles, targets, taus, 1.0).mean()
    torch.testing.assert_close(ours, reference(quantiles, targets, taus.unsqueeze(-1), sum_over_quantiles=True))
    torch.testing.assert_close(ours / 5, reference(quantiles, targets, taus.unsqueeze(-1), sum_over_quantiles=False))
    midpoints = ((torch.arange(5) + 0.5) / 5).expand(4, -1)
    torch.testing.assert_close(
        quantile_huber_loss(quantiles, targets, midpoints, 1.0).mean(), reference(quantiles, targets)
    )


def test_quantile_loss_pulls_a_high_quantile_up_harder_than_down() -> None:
    taus = torch.tensor([[0.9]])
    below = quantile_huber_loss(torch.tensor([[0.0]]), torch.tensor([[3.0]]), taus, 1.0)
    above = quantile_huber_loss(torch.tensor([[3.0]]), torch.tensor([[0.0]]), taus, 1.0)
    torch.testing.assert_close(below / above, torch.tensor([9.0]), rtol=1e-5, atol=0)


def test_quantile_loss_sends_no_gradient_to_the_fractions() -> None:
    quantiles, targets, taus = random_quantiles(2)
    quantiles.requires_grad_()
    taus.requires_grad_()
    quantile_huber_loss(quantiles, targets, taus, 1.0).sum().backward()
    assert taus.grad is None
    assert quantiles.grad is not None
    assert torch.isfinite(quantiles.grad).all()


def wasserstein(taus: Tensor, inverse_cdf: Callable[[Tensor], Tensor]) -> Tensor:
    """W1 between the distribution and its staircase at the fractions' midpoints, by a fine midpoint rule."""
    cells = 20_000
    total = torch.zeros((), dtype=torch.float64)
    for low, high in pairwise(taus):
        w = low + (high - low) * (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
        total = total + (inverse_cdf(w) - inverse_cdf((low + high) / 2)).abs().mean() * (high - low)
    return total


@pytest.mark.parametrize("inverse_cdf", [torch.square, torch.exp, torch.logit], ids=["square", "exp", "logit"])
def test_fraction_gradient_is_the_derivative_of_the_wasserstein_distance(
    inverse_cdf: Callable[[Tensor], Tensor],
) -> None:
    taus = torch.tensor([0.05, 0.2, 0.5, 0.7, 0.95], dtype=torch.float64)
    actual = fraction_gradient(inverse_cdf(taus[None, 1:-1]), inverse_cdf((taus[None, 1:] + taus[None, :-1]) / 2))
    step = 1e-4
    for i in range(1, 4):
        shift = torch.zeros_like(taus)
        shift[i] = step
        slope = (wasserstein(taus + shift, inverse_cdf) - wasserstein(taus - shift, inverse_cdf)) / (2 * step)
        torch.testing.assert_close(actual[0, i - 1], slope, rtol=1e-3, atol=1e-5)


def test_fraction_gradient_of_the_square_distribution() -> None:
    taus = torch.tensor([[0.0, 0.2, 0.5, 0.7, 1.0]])
    hats = (taus[:, 1:] + taus[:, :-1]) / 2
    gradient = fraction_gradient(quantiles_tau=taus[:, 1:-1].square(), quantile_hats=hats.square())
    torch.testing.assert_close(gradient, torch.tensor([[-0.0525, 0.0175, -0.1025]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4)])
def test_two_hot_has_unit_mass_on_two_neighbours_and_the_value_as_its_mean(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, dtype=torch.float64).uniform_(-3, 4, generator=torch.Generator().manual_seed(0))
    codes = two_hot(x, UNEVEN)
    assert codes.shape == (*shape, len(UNEVEN))
    assert (codes >= 0).all()
    assert ((codes > 0).sum(-1) <= 2).all()
    torch.testing.assert_close(codes.sum(-1), torch.ones(shape, dtype=torch.float64))
    torch.testing.assert_close(codes @ UNEVEN, x)


def test_two_hot_is_one_hot_on_a_bin_and_clips_outside_the_bins() -> None:
    bins = torch.tensor([-1.0, 0.0, 2.0])
    expected = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 0, 1]])
    torch.testing.assert_close(two_hot(torch.tensor([-1.0, 0.0, 2.0, -9.0, 9.0]), bins), expected, rtol=0, atol=0)


def test_two_hot_recovers_values_from_exponentially_spaced_bins() -> None:
    bins = symexp(torch.linspace(-20, 20, 255, dtype=torch.float64))
    x = torch.tensor([-1e6, -3.0, -0.01, 0.0, 0.5, 1234.5, 4e8], dtype=torch.float64)
    torch.testing.assert_close((two_hot(x, bins) * bins).sum(-1), x)


def test_symlog_and_symexp_are_inverse_and_odd() -> None:
    x = torch.tensor([-1e5, -2.0, -1e-4, 0.0, 1e-4, 2.0, 1e5], dtype=torch.float64)
    torch.testing.assert_close(symlog(x), torch.sign(x) * torch.log(1 + x.abs()))
    torch.testing.assert_close(symexp(symlog(x)), x)
    torch.testing.assert_close(symlog(symexp(symlog(x))), symlog(x))
    torch.testing.assert_close(symlog(-x), -symlog(x))


@pytest.mark.parametrize("function", [symlog, symexp])
def test_symlog_and_symexp_have_slope_one_at_zero(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([-1.0, -0.0, 0.0, 1.0], requires_grad=True)
    function(x).sum().backward()
    slope = 0.5 if function is symlog else torch.e
    torch.testing.assert_close(x.grad, torch.tensor([slope, 1.0, 1.0, slope]))
