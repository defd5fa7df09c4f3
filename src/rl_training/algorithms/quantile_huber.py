"""The quantile Huber loss with its gradient in one pass, for QR-DQN, IQN and FQF."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.ops.distributional import quantile_huber_loss

CHUNK = 2**18  # pairs at a time on a CPU: three arrays of them stay in its cache


class _FusedLoss(torch.autograd.Function):
    """`ops.distributional.quantile_huber_loss` in a third of the passes over the [B, N, M] pairs, in bounded memory.

    With c+ = clip(u, 0, kappa) and c- = clip(u, -kappa, 0), Huber(u) = c (u - c / 2) on each side, and the gradient
    towards a quantile is -mean_j (tau c+ + (1 - tau) c-) / kappa: both need sums of c only.
    """

    @staticmethod
    def forward(ctx: Any, quantiles: Tensor, targets: Tensor, taus: Tensor, kappa: float) -> Tensor:
        """[B, N], [B, M], [B, N] -> [B]."""
        batch, pairs = len(quantiles), (quantiles.shape[1], targets.shape[1])
        rows = batch if quantiles.is_cuda else min(batch, max(1, CHUNK // (pairs[0] * pairs[1])))
        scratch = quantiles.new_empty(3, rows, *pairs)
        if rows == batch:
            losses, slopes = _chunk(quantiles, targets, taus, kappa, scratch)
        else:
            pieces = zip(quantiles.split(rows), targets.split(rows), taus.split(rows), strict=True)
            chunks = [_chunk(q, y, tau, kappa, scratch[:, : len(q)]) for q, y, tau in pieces]
            losses, slopes = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        ctx.save_for_backward(slopes)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Towards the quantiles only."""
        (slopes,) = ctx.saved_tensors
        return slopes * gradient.unsqueeze(1), None, None, None


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


def quantile_losses(quantiles: Tensor, targets: Tensor, taus: Tensor, kappa: float) -> Tensor:
    """[B, N], [B, M], [B, N] -> [B]; the gradient reaches `quantiles` alone."""
    if kappa == 0.0:
        return quantile_huber_loss(quantiles=quantiles, targets=targets, taus=taus, kappa=kappa)
    loss: Tensor = _FusedLoss.apply(quantiles, targets, taus.expand_as(quantiles), kappa)
    return loss
