"""Implicit quantile network that proposes its own fractions, for FQF."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rl_training.models.mlp_iqn_network import MLPIQNNetwork


class Fractions(NamedTuple):
    """Fractions of a state: edges [B, N+1] from 0 to 1, midpoints and widths [B, N], entropy of the widths [B]."""

    taus: Tensor
    tau_hats: Tensor
    widths: Tensor
    entropy: Tensor


class FQFOutput(NamedTuple):
    """Quantiles at the midpoints [B, A, N] and at the inner edges [B, A, N-1], and the fractions."""

    quantile_hats: Tensor
    taus: Tensor
    tau_hats: Tensor
    quantiles_tau: Tensor


class MLPFQFNetwork(MLPIQNNetwork):
    """`MLPIQNNetwork` with a fraction proposal (Yang et al. 2019, arXiv:1911.02140): one linear layer on psi(s).

    The proposal never sends a gradient into psi.
    """

    def __init__(self, *, obs_dim: int, action_dim: int, num_quantiles: int = 32, **options: Any) -> None:
        super().__init__(obs_dim=obs_dim, action_dim=action_dim, **options)
        self.num_quantiles = num_quantiles
        self.fraction_layer = nn.Linear(self.feature_dim, num_quantiles)
        nn.init.xavier_uniform_(self.fraction_layer.weight, gain=0.01)  # so that the first fractions are about even
        nn.init.zeros_(self.fraction_layer.bias)

    def propose(self, features: Tensor) -> Fractions:
        """Fractions for states [B, D]; only `taus`, `widths` and `entropy` carry a gradient."""
        log_widths = self.fraction_layer(features.detach()).log_softmax(-1)
        widths = log_widths.exp()
        ends = widths.new_zeros(2, widths.shape[0], 1)
        ends[1] = 1.0  # exactly, since the sum is 1 only up to rounding
        taus = torch.cat([ends[0], widths.cumsum(-1)[:, :-1].clamp(max=1.0), ends[1]], -1)
        edges = taus.detach()
        return Fractions(taus, (edges[:, 1:] + edges[:, :-1]) * 0.5, widths, -(widths * log_widths).sum(-1))

    def forward(self, obs: Tensor, taus: Tensor | None = None) -> Any:
        """[B, ...] -> `FQFOutput` at the proposed fractions, or quantiles [B, A, N] at given ones."""
        features = self.features(obs)
        if taus is not None:
            return self.quantiles(features, taus)
        fractions = self.propose(features)
        return FQFOutput(
            self.quantiles(features, fractions.tau_hats), fractions.taus, fractions.tau_hats,
            self.quantiles(features, fractions.taus[:, 1:-1].detach()),
        )  # fmt: skip
