"""Policies: log-probabilities, entropies, divergences, and TRPO's conjugate gradient.

Categorical functions take `log_probs`, that is `logits.log_softmax(-1)`, so that it is computed once and shared.
Gaussians are diagonal; `log_std` may be [D] (independent of the state) or [..., D].
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


def mask_actions(scores: Tensor, legal: Tensor | None, fill: float = -torch.inf) -> Tensor:
    """Set the scores [..., A] of illegal actions to `fill`; a row without legal actions (only at an end) is unchanged.

    The same in numpy is `speed.passes.mask_in_numpy`.
    """
    if legal is None:
        return scores
    legal = legal.bool()
    return scores.masked_fill(~legal & legal.any(-1, keepdim=True), fill)


def conjugate_gradient(
    matvec: Callable[[Tensor], Tensor], b: Tensor, iterations: int, tolerance: float = 1e-10
) -> Tensor:
    """Solve A x = b for a symmetric positive definite A given by `matvec`: [P] -> [P], stop-gradient.

    Once the squared norm of the residual is below `tolerance` (or the curvature is not positive), the remaining
    iterations do not change x: a mask does this, because a branch would make a GPU wait for the host. On a CPU a branch
    is free and a product is not, so there the loop ends early; the result is the same.
    """
    residual = b.detach().clone()
    direction = residual.clone()
    x = torch.zeros_like(residual)
    squared_norm = residual.dot(residual)
    running = torch.ones_like(squared_norm, dtype=torch.bool)
    zero = torch.zeros_like(squared_norm)
    for _ in range(iterations):
        image = matvec(direction).detach()
        curvature = direction.dot(image)
        running = running & (squared_norm > tolerance) & (curvature > 0.0)
        if b.device.type == "cpu" and not running:
            break
        step = torch.where(running, squared_norm / curvature, zero)
        x.addcmul_(step, direction)
        residual.addcmul_(step, image, value=-1.0)
        previous, squared_norm = squared_norm, residual.dot(residual)
        direction = torch.addcmul(residual, torch.where(running, squared_norm / previous, zero), direction)
    return x


def gaussian_log_prob(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """log N(x; mean, exp(log_std)^2) summed over the last dimension: [..., D] -> [...]."""
    z = (x - mean) * torch.exp(-log_std)
    return -(0.5 * z.square() + log_std).sum(-1) - x.shape[-1] * _HALF_LOG_2PI


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """Entropy of a diagonal Gaussian: [..., D] -> [...]."""
    return log_std.sum(-1) + log_std.shape[-1] * (0.5 + _HALF_LOG_2PI)


def gaussian_kl(mean_p: Tensor, log_std_p: Tensor, mean_q: Tensor, log_std_q: Tensor) -> Tensor:
    """KL(p || q) of diagonal Gaussians, summed over the last dimension: [..., D] -> [...]."""
    log_ratio = log_std_p - log_std_q
    squares = (2.0 * log_ratio).exp() + ((mean_p - mean_q) * torch.exp(-log_std_q)).square()
    return (0.5 * (squares - 1.0) - log_ratio).sum(-1)


def tanh_log_det(u: Tensor) -> Tensor:
    """log |d tanh(u) / du| summed over the last dimension: [..., D] -> [...].

    log pi(tanh(u)) = gaussian_log_prob(u, ...) - tanh_log_det(u). This form of log(1 - tanh(u)^2) is finite for any u.
    """
    return 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u)).sum(-1)


def categorical_log_prob(log_probs: Tensor, actions: Tensor) -> Tensor:
    """Log-probability of each action: [..., A], [...] -> [...]."""
    return log_probs.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)


def categorical_entropy(log_probs: Tensor) -> Tensor:
    """Entropy [..., A] -> [...]; a masked action (-inf) adds exactly 0 to the value and to the gradient."""
    return -(log_probs.exp() * _finite(log_probs)).sum(-1)


def categorical_kl(log_probs_p: Tensor, log_probs_q: Tensor) -> Tensor:
    """KL(p || q) [..., A] -> [...]; an action that p masks (-inf) adds exactly 0 to the value and to the gradient."""
    return (log_probs_p.exp() * (_finite(log_probs_p) - _finite(log_probs_q))).sum(-1)


def _finite(log_probs: Tensor) -> Tensor:
    """Replace -inf by the lowest number: 0 * -inf is NaN, and masking that NaN later would leave it in the gradient."""
    return log_probs.clamp(min=torch.finfo(log_probs.dtype).min)
