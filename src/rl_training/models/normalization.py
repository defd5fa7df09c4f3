"""Normalization by batches, inside networks: statistics of the batch while learning, running ones otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

TINY = 1e-12  # below any variance that matters: the root of 0 has no slope


class BatchNorm(nn.Module):
    """Batch normalization of E members' rows, each by its own statistics: [E, B, F] -> [E, B, F]."""

    ranks: Any = None  # the other learners of a distributed run, whose rows count too (run/ranks.py)
    momentum, eps = 0.01, 1e-5  # the momentum is the share of a new batch
    unbiased = True  # whether the running variance is divided by the rows minus one, as torch's is

    def __init__(self, members: int, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(members, 1, features))
        self.shift = nn.Parameter(torch.zeros(members, 1, features))
        self.mean = nn.Buffer(torch.zeros(members, 1, features))
        self.var = nn.Buffer(torch.ones(members, 1, features))

    def forward(self, x: Tensor, by_batch: bool = False) -> Tensor:
        """Normalized rows: by the running statistics, or by those of the batch, which then move the running ones.

        A pass without gradients, such as a target's, moves nothing.
        """
        if not by_batch:
            return torch.addcmul(self.shift, x - self.mean, self.scale * (self.var + self.eps).rsqrt())
        var, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        mean_used, var_used = self.corrected(mean, var)
        if torch.is_grad_enabled():
            self.move(mean.detach(), var.detach(), x.shape[1])
        return torch.addcmul(self.shift, x - mean_used, self.scale * (var_used + self.eps).rsqrt())

    def corrected(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and variance that rows are normalized by, from those of the batch."""
        return mean, var

    @torch.no_grad()
    def move(self, mean: Tensor, var: Tensor, rows: int) -> None:
        """Move the running statistics towards those of a batch."""
        if self.ranks is not None:
            mean, var = self.ranks.moments(mean, var)
        if self.unbiased and rows > 1:
            var = var * (rows / (rows - 1))
        self.mean.lerp_(mean, self.momentum)
        self.var.lerp_(var, self.momentum)


class BatchRenorm(BatchNorm):
    """Batch renormalization (Ioffe 2017, arXiv:1702.03275).

    With the batch's mean m and variance v (biased) and the running M and V, rows are normalized by the mean
    m - d sqrt(v) / r and the variance v / r^2, where r = sqrt(v / V) within [1/3, 3] and d = (m - M) / sqrt(V) within
    [-5, 5] have no gradient. That is by M and V, as when acting, as long as they are near the batch's. In the first
    `warm_up` batches, in which M and V are not yet known, r = 1 and d = 0: plain batch normalization.
    """

    eps, unbiased = 1e-3, False
    warm_up, most_scale, most_shift = 100_000, 3.0, 5.0

    def __init__(self, members: int, features: int) -> None:
        super().__init__(members, features)
        self.batches = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def corrected(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """m - d sqrt(v) / r and v / r^2."""
        r, d = self.corrections(mean.detach(), var.detach())
        return mean - d * var.clamp(min=TINY).sqrt() / r, var / r.square()

    def corrections(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """r and d of a batch; 1 and 0 while warming up."""
        deviation, is_warm = (self.var + self.eps).sqrt(), self.batches >= self.warm_up
        r = ((var + self.eps).sqrt() / deviation).clamp(1.0 / self.most_scale, self.most_scale)
        d = ((mean - self.mean) / deviation).clamp(-self.most_shift, self.most_shift)
        return torch.where(is_warm, r, 1.0), torch.where(is_warm, d, 0.0)

    def move(self, mean: Tensor, var: Tensor, rows: int) -> None:
        """As the base class, and count the batch."""
        super().move(mean, var, rows)
        self.batches.add_(1)


class UnitBatchNorm(BatchNorm):
    """Batch normalization whose scales and shifts together have the squared sum F, as FlashSAC has it."""

    @torch.no_grad()
    def project_(self) -> None:
        """Back to this sum; the optimizer calls it after every step."""
        squares = self.scale.square().sum(-1, keepdim=True) + self.shift.square().sum(-1, keepdim=True)
        factor = (self.scale.shape[-1] / squares.clamp(min=TINY)).sqrt()
        self.scale.mul_(factor)
        self.shift.mul_(factor)
