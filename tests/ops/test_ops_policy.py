"""Policy mathematics: published numbers, torch.distributions, Fisher information and linear solves as references."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Independent, Normal, TransformedDistribution, kl_divergence
from torch.distributions.transforms import TanhTransform

from rl_training.ops.losses import approx_kl
from rl_training.ops.policy import (
    categorical_entropy,
    categorical_kl,
    categorical_log_prob,
    conjugate_gradient,
    gaussian_entropy,
    gaussian_kl,
    gaussian_log_prob,
    tanh_log_det,
)

LOGITS = torch.tensor([[1.0, 1, 1], [2, 0, 0], [-1, -2, -3]])
MASKED = torch.tensor([[0.3, -math.inf, 1.2], [-math.inf, 0.7, -math.inf]])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positive_definite(size: int, seed: int) -> Tensor:
    root = normal(size, size, seed=seed)
    return root @ root.T / size + 0.1 * torch.eye(size, dtype=torch.float64)


@pytest.mark.parametrize(("size", "seed"), [(1, 0), (5, 1), (30, 2)])
def test_conjugate_gradient_solves_a_positive_definite_system(size: int, seed: int) -> None:
    matrix, b = positive_definite(size, seed), normal(size, seed=seed + 10)
    solution = conjugate_gradient(lambda v: matrix @ v, b, iterations=3 * size, tolerance=1e-24)
    torch.testing.assert_close(solution, torch.linalg.solve(matrix, b), rtol=1e-8, atol=1e-8)


def test_conjugate_gradient_leaves_a_solved_system_alone() -> None:
    b = torch.tensor([1.0, -2.0])
    torch.testing.assert_close(conjugate_gradient(lambda v: 2 * v, b, iterations=50), b / 2)
    assert torch.equal(conjugate_gradient(lambda v: 2 * v, torch.zeros(2), iterations=5), torch.zeros(2))
    # A direction without curvature ends the search instead of dividing by zero.
    assert torch.equal(conjugate_gradient(lambda v: 0 * v, b, iterations=5), torch.zeros(2))


def test_conjugate_gradient_stops_at_the_iteration_limit_and_at_the_tolerance() -> None:
    matrix, b = positive_definite(20, 3), normal(20, seed=4)
    calls = 0

    def matvec(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return matrix @ v

    rough = conjugate_gradient(matvec, b, iterations=3)
    assert calls == 3
    assert (matrix @ rough - b).norm() > 1e-3
    loose = conjugate_gradient(matvec, b, iterations=60, tolerance=1e-2)
    residual = (matrix @ loose - b).square().sum()
    assert 1e-8 < residual <= 1e-2


def test_conjugate_gradient_accepts_products_that_need_autograd() -> None:
    matrix, b = positive_definite(6, 5), normal(6, seed=6)
    x = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    gradient = torch.autograd.grad(0.5 * x @ matrix @ x, x, create_graph=True)[0]
    solution = conjugate_gradient(lambda v: torch.autograd.grad(gradient @ v, x, retain_graph=True)[0], b, 20, 1e-24)
    torch.testing.assert_close(solution, torch.linalg.solve(matrix, b), rtol=1e-7, atol=1e-7)
    assert not solution.requires_grad


def test_gaussian_quantities_match_the_published_numbers() -> None:
    mean, log_std = torch.tensor([[1, -1], [0.1, -0.1]]), torch.tensor([[0.1, 0.1], [0.2, 0.3]]).log()
    x = torch.tensor([[1.2, -1.1], [-0.1, 0]])
    other_mean, other_log_std = torch.tensor([[1.0, -10], [0.3, -0.2]]), torch.tensor([[0.1, 0.1], [0.8, 0.3]]).log()
    torch.testing.assert_close(
        gaussian_log_prob(x, mean, log_std), torch.tensor([0.267292, 0.419978]), rtol=1e-3, atol=1e-5
    )
    torch.testing.assert_close(gaussian_entropy(log_std), torch.tensor([-1.767293, 0.024466]), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(
        gaussian_kl(mean, log_std, other_mean, other_log_std), torch.tensor([4050.00, 1.00435]), rtol=1e-3, atol=1e-5
    )


def test_gaussian_quantities_agree_with_torch_distributions() -> None:
    x, mean, other = normal(3, 4, 2), normal(3, 4, 2, seed=1), normal(3, 4, 2, seed=2)
    log_std, other_log_std = normal(2, seed=3), normal(3, 4, 2, seed=4)
    p = Independent(Normal(mean, log_std.exp().expand_as(mean)), 1)
    q = Independent(Normal(other, other_log_std.exp()), 1)
    torch.testing.assert_close(gaussian_log_prob(x, mean, log_std), p.log_prob(x))
    torch.testing.assert_close(gaussian_entropy(other_log_std), q.entropy())
    torch.testing.assert_close(gaussian_entropy(log_std).expand(3, 4), p.entropy())
    torch.testing.assert_close(gaussian_kl(mean, log_std, other, other_log_std), kl_divergence(p, q))
    torch.testing.assert_close(gaussian_kl(other, other_log_std, mean, log_std), kl_divergence(q, p))


def test_gaussian_kl_at_the_old_policy_has_zero_gradient_and_the_fisher_matrix_as_hessian() -> None:
    mean, log_std = normal(3, seed=5), 0.3 * normal(3, seed=6)

    def kl(parameters: Tensor) -> Tensor:
        return gaussian_kl(mean, log_std, parameters[:3], parameters[3:])

    old = torch.cat([mean, log_std])
    gradient = torch.autograd.functional.jacobian(kl, old)
    torch.testing.assert_close(gradient, torch.zeros_like(old))
    fisher = torch.diag(torch.cat([(-2 * log_std).exp(), torch.full((3,), 2.0, dtype=torch.float64)]))
    torch.testing.assert_close(torch.autograd.functional.hessian(kl, old), fisher)


def test_categorical_kl_at_the_old_policy_has_zero_gradient_and_the_fisher_matrix_as_hessian() -> None:
    old = normal(4, seed=7)

    def kl(logits: Tensor) -> Tensor:
        return categorical_kl(old.log_softmax(-1), logits.log_softmax(-1))

    gradient = torch.autograd.functional.jacobian(kl, old)
    torch.testing.assert_close(gradient, torch.zeros_like(old))
    # Fisher as its definition: the expected outer product of the score.
    scores = torch.autograd.functional.jacobian(lambda logits: logits.log_softmax(-1), old)
    fisher = torch.einsum("a,ai,aj->ij", old.softmax(-1), scores, scores)
    torch.testing.assert_close(torch.autograd.functional.hessian(kl, old), fisher)


def test_tanh_log_det_agrees_with_the_transformed_distribution() -> None:
    u, mean, log_std = normal(50, 3), normal(50, 3, seed=1), 0.5 * normal(50, 3, seed=2)
    transform = TanhTransform(cache_size=1)
    squashed = Independent(TransformedDistribution(Normal(mean, log_std.exp()), [transform]), 1)
    actions = transform(u)  # the cache keeps u, so that the reference does not lose it in atanh
    torch.testing.assert_close(gaussian_log_prob(u, mean, log_std) - tanh_log_det(u), squashed.log_prob(actions))


def test_tanh_log_det_is_finite_where_tanh_saturates() -> None:
    u = torch.tensor([[-60.0], [0.0], [60.0]], requires_grad=True)
    log_det = tanh_log_det(u)
    far = 2 * math.log(2) - 120
    torch.testing.assert_close(log_det, torch.tensor([far, 0.0, far]), rtol=1e-6, atol=1e-6)
    log_det.sum().backward()
    torch.testing.assert_close(u.grad, torch.tensor([[2.0], [0.0], [-2.0]]))


def test_categorical_quantities_agree_with_torch_distributions() -> None:
    logits, other = normal(3, 4, 5), normal(3, 4, 5, seed=1)
    actions = torch.randint(5, (3, 4), generator=torch.Generator().manual_seed(2))
    p, q = Categorical(logits=logits), Categorical(logits=other)
    log_p, log_q = logits.log_softmax(-1), other.log_softmax(-1)
    torch.testing.assert_close(categorical_log_prob(log_p, actions), p.log_prob(actions))
    torch.testing.assert_close(categorical_entropy(log_p), p.entropy())
    torch.testing.assert_close(categorical_kl(log_p, log_q), kl_divergence(p, q))


def test_masked_actions_add_nothing_to_entropy_and_divergence() -> None:
    logits = MASKED.clone().requires_grad_()
    log_probs = logits.log_softmax(-1)
    two = torch.tensor([0.3, 1.2], requires_grad=True)
    expected = categorical_entropy(two.log_softmax(-1))
    torch.testing.assert_close(categorical_entropy(log_probs), torch.stack([expected, torch.zeros(())]))
    old = torch.tensor([[1.0, -math.inf, 0.0], [-math.inf, 2.0, -math.inf]]).log_softmax(-1)
    divergence = categorical_kl(old, log_probs)
    kept = categorical_kl(torch.tensor([1.0, 0.0]).log_softmax(-1), two.log_softmax(-1))
    torch.testing.assert_close(divergence, torch.stack([kept, torch.zeros(())]))
    (categorical_entropy(log_probs).sum() + divergence.sum() + categorical_kl(log_probs, old).sum()).backward()
    (expected + kept + categorical_kl(two.log_softmax(-1), torch.tensor([1.0, 0.0]).log_softmax(-1))).backward()
    assert logits.grad is not None
    assert two.grad is not None
    torch.testing.assert_close(logits.grad[0], torch.stack([two.grad[0], torch.zeros(()), two.grad[1]]))
    torch.testing.assert_close(logits.grad[1], torch.zeros(3))


def test_a_mask_that_forbids_an_action_of_the_old_policy_is_infinitely_far() -> None:
    old, new = torch.zeros(2).log_softmax(-1), torch.tensor([0.0, -math.inf]).log_softmax(-1)
    assert categorical_kl(old, new) > 1e30


def test_weighted_policy_gradient_and_entropy_losses_match_the_published_numbers() -> None:
    log_probs = torch.stack([LOGITS, LOGITS + 1]).log_softmax(-1)
    actions = torch.tensor([[0, 1, 2], [0, 0, 0]])
    advantages = torch.tensor([[0.3, 0.2, 0.1], [-0.3, -0.2, -0.1]])
    weights = torch.tensor([[-2.0, 2, 0], [-3, 1, -1]])
    policy_loss = -(categorical_log_prob(log_probs, actions) * advantages * weights).mean(-1)
    torch.testing.assert_close(policy_loss, torch.tensor([0.0788835, 0.3272009]), rtol=0, atol=1e-4)
    entropy_loss = -(categorical_entropy(log_probs) * weights).mean(-1)
    torch.testing.assert_close(entropy_loss, torch.tensor([0.288693, 1.15422]), rtol=0, atol=1e-4)


def test_approximate_kl_is_non_negative_and_unbiased() -> None:
    old, new = normal(6, seed=8).log_softmax(-1), normal(6, seed=9).log_softmax(-1)
    samples = approx_kl(new - old)
    assert (samples >= 0).all()
    torch.testing.assert_close((old.exp() * samples).sum(), categorical_kl(old, new))
    assert float(approx_kl(torch.zeros(()))) == 0.0
