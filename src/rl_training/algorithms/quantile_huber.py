"""The quantile Huber loss and its slopes in one pass, for QR-DQN, IQN and FQF."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 2**18  # pairs at a time on a CPU: three arrays of them stay in its cache


@torch.no_grad()
def quantile_losses(quantiles: Tensor, targets: Tensor, taus: Tensor, kappa: float) -> tuple[Tensor, Tensor]:
    """[B, N], [B, M], [B, N] -> losses [B] as `ops.distributional.quantile_huber_loss`, and their slopes [B, N].

    In a third of the passes over the [B, N, M] pairs, and in bounded memory: with c+ = clip(u, 0, kappa) and
    c- = clip(u, -kappa, 0), Huber(u) = c (u - c / 2) on each side, and the slope towards a quantile is
    -mean_j (tau c+ + (1 - tau) c-) / kappa. Both need sums of c only.
    """
    batch, pairs = len(quantiles), (quantiles.shape[1], targets.shape[1])
    taus = taus.expand_as(quantiles)
    if kappa == 0.0:
        return _plain(quantiles, targets, taus)
    rows = batch if quantiles.is_cuda else min(batch, max(1, CHUNK // (pairs[0] * pairs[1])))
    scratch = quantiles.new_empty(3, rows, *pairs)
    if rows == batch:
        return _chunk(quantiles, targets, taus, kappa, scratch)
    pieces = zip(quantiles.split(rows), targets.split(rows), taus.split(rows), strict=True)
    chunks = [_chunk(q, y, tau, kappa, scratch[:, : len(q)]) for q, y, tau in pieces]
    losses, slopes = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return losses, slopes


def _chunk(q: Tensor, y: Tensor, taus: Tensor, kappa: float, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """Losses [b] and their derivatives by the quantiles [b, N]."""
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


def _plain(q: Tensor, y: Tensor, taus: Tensor) -> tuple[Tensor, Tensor]:
    """The same at kappa 0, where Huber(u) / kappa is |u|."""
    u = y.unsqueeze(1) - q.unsqueeze(2)
    signed = (taus.unsqueeze(2) - (u < 0).to(q.dtype)) * (u != 0)  # |tau - 1(u < 0)| sign(u)
    return (signed * u).sum((1, 2)) / y.shape[1], signed.sum(2) / -y.shape[1]
