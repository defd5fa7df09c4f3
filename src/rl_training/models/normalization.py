"""Normalization by batches, inside networks: statistics of the batch while learning, running ones otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

TINY = 1e-12  # below any variance that matters: the root of 0 has no slope


class BatchRenorm(nn.Module):
    """Batch renormalization (Ioffe 2017, arXiv:1702.03275) of E members' rows: [E, B, F] -> [E, B, F].

    With the batch's mean m and variance v (biased) and the running M and V, rows are normalized by the mean
    m - d sqrt(v) / r and the variance v / r^2, where r = sqrt(v / V) within [1/3, 3] and d = (m - M) / sqrt(V) within
    [-5, 5] have no gradient. That is by M and V, as when acting, as long as they are near the batch's. In the first
    `warm_up` batches, in which M and V are not yet known, r = 1 and d = 0: plain batch normalization.
    """

    ranks: Any = None  # the other learners of a distributed run, whose rows count too (run/ranks.py)
    momentum, eps, warm_up = 0.01, 1e-3, 100_000  # the momentum is the share of a new batch
    most_scale, most_shift = 3.0, 5.0

    def __init__(self, members: int, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(members, 1, features))
        self.shift = nn.Parameter(torch.zeros(members, 1, features))
        self.mean = nn.Buffer(torch.zeros(members, 1, features))
        self.var = nn.Buffer(torch.ones(members, 1, features))
        self.batches = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, by_batch: bool = False) -> Tensor:
        """Normalized rows: by the running statistics, or by those of the batch, which then move the running ones.

        A pass without gradients, such as a target's, moves nothing.
        """
        if not by_batch:
            return torch.addcmul(self.shift, x - self.mean, self.scale * (self.var + self.eps).rsqrt())
        var, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        r, d = self.corrections(mean.detach(), var.detach())
        mean_used, var_used = mean - d * (var.clamp(min=TINY)).sqrt() / r, var / r.square()
        if torch.is_grad_enabled():
            self.move(mean.detach(), var.detach())
        return torch.addcmul(self.shift, x - mean_used, self.scale * (var_used + self.eps).rsqrt())

    def corrections(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """r and d of a batch; 1 and 0 while warming up."""
        deviation, is_warm = (self.var + self.eps).sqrt(), self.batches >= self.warm_up
        r = ((var + self.eps).sqrt() / deviation).clamp(1.0 / self.most_scale, self.most_scale)
        d = ((mean - self.mean) / deviation).clamp(-self.most_shift, self.most_shift)
        return torch.where(is_warm, r, 1.0), torch.where(is_warm, d, 0.0)

    @torch.no_grad()
    def move(self, mean: Tensor, var: Tensor) -> None:
        """Move the running statistics towards those of a batch."""
        if self.ranks is not None:
            mean, var = self.ranks.moments(mean, var)
        self.mean.lerp_(mean, self.momentum)
        self.var.lerp_(var, self.momentum)
        self.batches.add_(1)
