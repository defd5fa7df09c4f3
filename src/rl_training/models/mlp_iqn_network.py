"""Quantile function of the return at any fraction, for implicit quantile networks and their extensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rl_training.models.blocks import ObservationInput, encode, encoded_dim, linear, numpy_input
from rl_training.models.mlp_q_network import hidden_layers, value_layers
from rl_training.models.noisy import NoisyNetwork
from rl_training.speed.passes import numpy_chain, numpy_step, runs_written_out

Array = NDArray[Any]


class MLPIQNNetwork(NoisyNetwork):
    """Z_tau(s, a) = f(psi(s) * phi(tau))_a (Dabney et al. 2018, arXiv:1806.06923): fractions [B, N] -> [B, A, N].

    psi is the encoder, if there is one, and then layers of `hidden_sizes`; phi(tau) = ReLU(W cos(pi i tau) + b) with i
    from 0 to `embedding_dim` - 1; f has layers of `head_sizes` and an output layer, or with `dueling` two streams.
    The paper has images only: psi is the convolutions, and f has a layer of 512 units. For vectors, `head_sizes` is
    empty by default: a linear f needs psi(s) once for all fractions and no layer per fraction.
    """

    def __init__(
        self, *, obs_dim: int, action_dim: int, hidden_sizes: Sequence[int] = (256, 256),
        head_sizes: Sequence[int] = (), embedding_dim: int = 64, activation: str = "relu", dueling: bool = False,
        noisy: bool = False,
        encoder: nn.Module | None = None, observation_input: ObservationInput | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.observation_input = observation_input or ObservationInput()
        self.encoder = encoder
        features = encoded_dim(obs_dim, encoder)
        self.trunk, self.feature_dim = hidden_layers(features, hidden_sizes, activation, noisy=noisy and not head_sizes)
        self.embedding = linear(embedding_dim, self.feature_dim)
        self.action_dim, self.is_affine = action_dim, not (dueling or head_sizes)  # f, in psi * phi
        self.middle, self.head = value_layers(
            self.feature_dim, head_sizes, action_dim, 1, activation, dueling=dueling, noisy=noisy
        )
        self.frequencies: Tensor
        self.register_buffer("frequencies", math.pi * torch.arange(embedding_dim).float())

    def features(self, obs: Tensor) -> Tensor:
        """psi(s): [B, ...] -> [B, D]."""
        features: Tensor = self.trunk(encode(self.encoder, self.observation_input(obs)))
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
        prepare, trunk, embedding = numpy_input(self.observation_input), *map(numpy_step, (self.trunk, self.embedding))
        head = numpy_chain([numpy_step(self.middle), numpy_step(self.head)])
        if self.encoder is not None or prepare is None or trunk is None or head is None or embedding is None:
            return None
        frequencies, is_affine = self.frequencies.numpy(), self.is_affine

        def features(obs: Array, rng: np.random.Generator | None) -> Array:
            return trunk(prepare(obs), rng)

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
