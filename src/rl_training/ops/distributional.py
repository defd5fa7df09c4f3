"""Value distributions: categorical projection, quantile regression, FQF's fractions, two-hot codes."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.ops.losses import with_slope

UNLIKELY = 1e-4  # the weight of a new atom outside of the old support
CHUNK = 2**18  # pairs of quantiles at a time on a CPU: three arrays of them stay in its cache


def project_categorical(atoms: Tensor, probs: Tensor, support: Tensor) -> Tensor:
    """Project a distribution onto a fixed support (Bellemare et al. 2017, eq. 7): [B, M], [B, M], [K] -> [B, K].

    `atoms` may come in any order and are clipped to the support's ends. `support` is increasing and need not be
    equally spaced. Each atom's mass is split between its two neighbors by distance, so that none is lost, even when
    an atom falls exactly on a support point.
    """
    if atoms.is_cuda:  # there scatter_add_ sums in an arbitrary order, so two runs with one seed would differ
        return project_by_ramps(atoms, probs, support)
    upper, upper_weights = _bracket(atoms, support)
    upper_mass = probs * upper_weights
    projected = probs.new_zeros(*probs.shape[:-1], support.shape[0])
    return projected.scatter_add_(-1, upper, upper_mass).scatter_add_(-1, upper - 1, probs - upper_mass)


def project_by_ramps(atoms: Tensor, probs: Tensor, support: Tensor) -> Tensor:
    """`project_categorical` without a scatter: an atom's position in an interval (0 to 1) is its mass beyond it."""
    low = support[:-1]
    ramps = (atoms.unsqueeze(-1) - low).div_(support[1:] - low).clamp_(0.0, 1.0)  # [B, M, K - 1]
    beyond = (probs.unsqueeze(-2) @ ramps).squeeze(-2)
    projected = torch.cat([probs.sum(-1, keepdim=True), beyond], -1)
    projected[..., :-1] -= beyond
    return projected


def outside_mass(atoms: Tensor, probs: Tensor, support: Tensor) -> Tensor:
    """The share of a distribution that `project_categorical` clips, beyond rounding: [B, M], [B, M], [K] -> [B]."""
    slack = 1e-3 * (support[1] - support[0])
    outside = (atoms < support[0] - slack) | (atoms > support[-1] + slack)
    return (probs * outside).sum(-1)


def carry_over(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [K, M] and offsets [K] that turn logits on `old` [M] into logits on the wider support `new` [K].

    The projection of a distribution is log sum_m w_km exp(logit_m). A linear layer cannot compute that, but it can
    compute the mean of the logits in its place: sum_m w_km logit_m / w_k + log w_k with w_k = sum_m w_km, which is the
    same where neighboring logits are equal. A new atom with no old one near it gets the logit of the nearest end,
    less a large constant.
    """
    mass = two_hot(old, new).T
    total = mass.sum(-1, keepdim=True)
    weights = torch.where(total > 0.0, mass / total.clamp(min=UNLIKELY), two_hot(new, old))
    return weights, total.squeeze(-1).clamp(min=UNLIKELY).log()


def categorical_cross_entropy(logits: Tensor, target_probs: Tensor) -> Tensor:
    """-sum_k target_k log softmax(logits)_k over the last dimension: [..., K], [..., K] -> [...]."""
    return -(target_probs * logits.log_softmax(-1)).sum(-1)


def cross_entropy(logits: Tensor, target_probs: Tensor) -> tuple[Tensor, Tensor]:
    """`categorical_cross_entropy` [...] with its slopes with respect to the logits [..., K]."""
    losses = categorical_cross_entropy(logits=logits, target_probs=target_probs)
    return losses, logits.detach().softmax(-1) - target_probs


def quantile_huber_loss(quantiles: Tensor, targets: Tensor, taus: Tensor, kappa: float) -> Tensor:
    """Quantile regression loss per sample: [B, N], [B, M], [B, N] -> [B] (Dabney et al. 2018, eq. 9 and 10).

    sum_i mean_j |tau_i - 1(u_ij < 0)| Huber_kappa(u_ij) / kappa with u_ij = targets_j - quantiles_i; kappa = 0 gives
    the plain quantile loss. The gradient reaches `quantiles` only.
    """
    return with_slope(quantile_huber, quantiles, targets, taus, kappa)


@torch.no_grad()
def quantile_huber(quantiles: Tensor, targets: Tensor, taus: Tensor, kappa: float) -> tuple[Tensor, Tensor]:
    """`quantile_huber_loss` [B] with its slopes [B, N], in a third of autograd's passes over the [B, N, M] pairs.

    Memory is bounded: with c+ = clip(u, 0, kappa) and c- = clip(u, -kappa, 0), Huber(u) = c (u - c / 2) on each side,
    and the slope in a quantile is -mean_j (tau c+ + (1 - tau) c-) / kappa. Both need only sums of c.
    """
    batch, pairs = len(quantiles), (quantiles.shape[1], targets.shape[1])
    taus = taus.expand_as(quantiles)
    if kappa == 0.0:  # Huber(u) / kappa is |u|, and |tau - 1(u < 0)| sign(u) its slope
        u = targets.unsqueeze(1) - quantiles.unsqueeze(2)
        signed = (taus.unsqueeze(2) - (u < 0).to(u.dtype)) * (u != 0)
        return (signed * u).sum((1, 2)) / pairs[1], signed.sum(2) / -pairs[1]
    rows = batch if quantiles.is_cuda else min(batch, max(1, CHUNK // (pairs[0] * pairs[1])))
    scratch = quantiles.new_empty(3, rows, *pairs)
    pieces = zip(quantiles.split(rows), targets.split(rows), taus.split(rows), strict=True)
    chunks = [_quantile_huber_chunk(q, y, tau, kappa, scratch[:, : len(q)]) for q, y, tau in pieces]
    if len(chunks) == 1:
        return chunks[0]
    losses, slopes = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return losses, slopes


def _quantile_huber_chunk(q: Tensor, y: Tensor, taus: Tensor, kappa: float, scratch: Tensor) -> tuple[Tensor, Tensor]:
    u, clipped, huber = scratch.unbind()
    torch.sub(y.unsqueeze(1), q.unsqueeze(2), out=u)
    torch.clamp(u, 0.0, kappa, out=clipped)
    above = clipped.sum(-1)
    loss_above = torch.add(u, clipped, alpha=-0.5, out=huber).mul_(clipped).sum(-1)
    torch.clamp(u, -kappa, 0.0, out=clipped)
    below = clipped.sum(-1)
    loss_below = u.sub_(clipped, alpha=0.5).mul_(clipped).sum(-1)
    scale = 1.0 / (y.shape[1] * kappa)
    losses = torch.lerp(loss_below, loss_above, taus).sum(-1)
    return losses.mul_(scale), torch.lerp(below, above, taus).mul_(-scale)


@torch.no_grad()
def fraction_gradient(quantiles_tau: Tensor, quantile_hats: Tensor) -> Tensor:
    """dW1/dtau_i of FQF's inner fractions: [B, N-1], [B, N] -> [B, N-1] (Yang et al. 2019, proposition 1).

    `quantiles_tau` is F^-1 at tau_1..tau_{N-1} and `quantile_hats` is F^-1 at the N midpoints. Stop-gradient: the
    fraction loss is `(fraction_gradient(...) * taus[:, 1:-1]).sum(-1)`.
    """
    return 2.0 * quantiles_tau - quantile_hats[..., 1:] - quantile_hats[..., :-1]


def two_hot(x: Tensor, bins: Tensor) -> Tensor:
    """Weights on the two neighboring bins whose mean is x: [...], increasing bins [K] -> [..., K].

    x is clipped to the range of the bins, and must be on their scale (symlog(x) for bins that are linear in symlog).
    """
    upper, upper_weights = _bracket(x, bins)
    codes = x.new_zeros(*x.shape, bins.shape[0])
    codes.scatter_(-1, upper.unsqueeze(-1), upper_weights.unsqueeze(-1))
    return codes.scatter_(-1, (upper - 1).unsqueeze(-1), (1.0 - upper_weights).unsqueeze(-1))


def symlog(x: Tensor) -> Tensor:
    """sign(x) log(1 + |x|), elementwise."""
    # clamp passes the gradient at 0 and relu does not, so that the slope there is 1; sign(x) * log1p(|x|) has slope 0.
    return x.clamp(min=0.0).log1p() - (-x).relu().log1p()


def symexp(x: Tensor) -> Tensor:
    """sign(x) (exp|x| - 1), the inverse of symlog, elementwise."""
    return x.clamp(min=0.0).expm1() - (-x).relu().expm1()


def _bracket(x: Tensor, support: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the support point above x, in 1..K-1, and the weight of that point against the one below it."""
    upper = torch.searchsorted(support, x.detach().contiguous()).clamp_(1, support.shape[0] - 1)
    low = support[upper - 1]
    return upper, ((x - low) / (support[upper] - low)).clamp(0.0, 1.0)
