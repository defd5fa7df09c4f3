"""Quantile function of the return at any fraction (IQN), and with fractions that the network proposes (FQF)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.models.blocks import linear
from rl_training.models.mlp_q_network import NoisyNetwork, hidden_layers, value_layers
from rl_training.speed.passes import MOST_WEIGHTS, Array, numpy_chain, numpy_step, runs_written_out


class MLPIQNNetwork(NoisyNetwork):
    """Z_tau(s, a) = f(psi(s) * phi(tau))_a (Dabney et al. 2018, arXiv:1806.06923): fractions [B, N] -> [B, A, N].

    psi is the encoder, if there is one, and then layers of `hidden_sizes`; phi(tau) = ReLU(W cos(pi i tau) + b) with i
    from 0 to `embedding_dim` - 1; f has layers of `head_sizes` and an output layer, or with `dueling` two streams.
    The paper has images only: psi is the convolutions, and f has a layer of 512 units. For vectors, `head_sizes` is
    empty by default: a linear f needs psi(s) once for all fractions and no layer per fraction.
    """

    def __init__(
        self, *, action_dim: int, hidden_sizes: Sequence[int] = (256, 256), head_sizes: Sequence[int] = (),
        embedding_dim: int = 64, activation: str = "relu", dueling: bool = False, noisy: bool = False, **inputs: Any,
    ) -> None:  # fmt: skip
        super().__init__(**inputs)
        trunk_is_noisy = noisy and not head_sizes
        self.trunk, self.feature_dim = hidden_layers(self.input_dim, hidden_sizes, activation, noisy=trunk_is_noisy)
        self.embedding = linear(embedding_dim, self.feature_dim)
        self.action_dim, self.is_affine = action_dim, not (dueling or head_sizes)  # f, in psi * phi
        sizes = self.feature_dim, head_sizes, action_dim, 1
        self.middle, self.head = value_layers(*sizes, activation, dueling=dueling, noisy=noisy)
        self.frequencies = nn.Buffer(math.pi * torch.arange(embedding_dim).float())

    def features(self, obs: Tensor) -> Tensor:
        """psi(s): [B, ...] -> [B, D]."""
        features: Tensor = self.trunk(super().features(obs))
        return features

    def cosines(self, taus: Tensor) -> Tensor:
        """cos(pi i tau): [..., N] -> [..., N, K]."""
        angles = taus.unsqueeze(-1) * self.frequencies
        if angles.requires_grad or not runs_written_out(taus):
            return angles.cos_()
        np.cos(angles.numpy(), out=angles.numpy())  # in less than half of torch's time
        return angles

    def embed(self, taus: Tensor) -> Tensor:
        """phi(tau): [..., N] -> [..., N, D]."""
        return self.embedding(self.cosines(taus)).relu_()

    def quantiles(self, features: Tensor, taus: Tensor) -> Tensor:
        """Quantiles of every action at fractions [B, N] -> [B, A, N]."""
        if not (self.is_affine and isinstance(self.head, nn.Linear)):
            return self.head(self.middle(features.unsqueeze(-2) * self.embed(taus))).transpose(-1, -2)
        # f as one small product per state, W_a * psi [B, A, D] with phi [B, N, D]: a third of the time of a layer with
        # so few outputs, and psi * phi is never formed.
        factors = self.head.weight * features.unsqueeze(1)
        return torch.baddbmm(self.head.bias.unsqueeze(1), factors, self.embed(taus).mT)

    def expected_values(self, features: Tensor, taus: Tensor, widths: Tensor | None = None) -> Tensor:
        """Action values [B, A]: the mean of the quantiles at `taus` [B or 1, N], weighted by `widths` where given."""
        embedding = self.embed(taus)
        if self.is_affine:
            return self.head(features * average(embedding, widths))
        return average(self.head(self.middle(features.unsqueeze(-2) * embedding)), widths)

    def forward(self, obs: Tensor, taus: Tensor) -> Tensor:
        """[B, ...], [B, N] -> [B, A, N]."""
        return self.quantiles(self.features(obs), taus)

    def numpy_parts(self) -> tuple[Callable[..., Array], Callable[..., Array]] | None:
        """psi and the expected values in numpy on the same memory: (obs, rng) and (features, taus, widths, rng)."""
        features, embedding = self.numpy_form(self.trunk, most_weights=MOST_WEIGHTS), numpy_step(self.embedding)
        head = numpy_chain([numpy_step(self.middle), numpy_step(self.head)])
        if features is None or head is None or embedding is None:
            return None
        frequencies, is_affine = self.frequencies.numpy(), self.is_affine

        def expected(psi: Array, taus: Array, widths: Array, rng: np.random.Generator | None) -> Array:
            """taus and widths [N or 1, K]."""
            phi = embedding(np.cos(taus[..., None] * frequencies), None)
            np.maximum(phi, 0.0, out=phi)
            if is_affine:
                return head(psi * np.matmul(widths[:, None], phi)[:, 0], rng)
            return np.matmul(widths[:, None], head(psi[:, None] * phi, rng))[:, 0]

        return features, expected


def average(x: Tensor, widths: Tensor | None) -> Tensor:
    """Mean over the fractions: [..., N, D] -> [..., D], weighted by `widths` [..., N] that sum to 1."""
    return x.mean(-2) if widths is None else torch.matmul(widths.unsqueeze(-2), x).squeeze(-2)


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

    def __init__(self, *, num_quantiles: int = 32, **options: Any) -> None:
        super().__init__(**options)
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
