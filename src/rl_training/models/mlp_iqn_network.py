"""Quantile function of the return at any fraction, for implicit quantile networks and what extends them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rl_training.models.blocks import ObservationInput, encoded_dim, linear, numpy_input
from rl_training.models.mlp_q_network import DuelingHead, hidden_layers
from rl_training.models.noisy import NoisyNetwork, make_layer, numpy_step
from rl_training.models.passes import Backward, LinearPass, WrittenOut, relu_backward, runs_written_out

Array = NDArray[Any]


class MLPIQNNetwork(NoisyNetwork):
    """Z_tau(s, a) = f(psi(s) * phi(tau))_a (Dabney et al. 2018, arXiv:1806.06923): fractions [B, N] -> [B, A, N].

    psi is an encoder or the hidden layers, phi(tau) = ReLU(W cos(pi i tau) + b) with i from 0 to `embedding_dim` - 1,
    f one linear layer, or with `dueling` two streams of one hidden layer each.
    """

    def __init__(
        self, *, obs_dim: int, action_dim: int, hidden_sizes: Sequence[int] = (256, 256), embedding_dim: int = 64,
        activation: str = "relu", dueling: bool = False, noisy: bool = False,
        encoder: nn.Module | None = None, observation_input: ObservationInput | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.observation_input = observation_input or ObservationInput()
        self.encoder = encoder
        features = encoded_dim(obs_dim, encoder)
        self.trunk, self.feature_dim = hidden_layers(features, hidden_sizes, activation, noisy=noisy)
        self.embedding = linear(embedding_dim, self.feature_dim)
        self.action_dim, self.dueling = action_dim, dueling
        self.head: nn.Module
        if dueling:
            self.head = DuelingHead(self.feature_dim, self.feature_dim, action_dim, 1, activation, noisy=noisy)
        else:
            self.head = make_layer(self.feature_dim, action_dim, noisy=noisy, gain=1.0)
        self.frequencies: Tensor
        self.register_buffer("frequencies", math.pi * torch.arange(embedding_dim).float())
        self._features = WrittenOut(self.trunk)
        self._embedding = LinearPass(self.embedding.weight, self.embedding.bias)
        self._head = LinearPass(self.head.weight, self.head.bias) if type(self.head) is nn.Linear else None

    def features(self, obs: Tensor) -> Tensor:
        """psi(s): [B, ...] -> [B, D]."""
        x = self.observation_input(obs)
        return self._features(x if self.encoder is None else self.encoder(x))

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
        if self._head is None:
            return self.head(features.unsqueeze(-2) * self.embed(taus)).transpose(-1, -2)
        return self._join(self._head.weight * features.unsqueeze(1), self.embed(taus))

    def _join(self, factors: Tensor, phi: Tensor) -> Tensor:
        """f as one small product per state, W_a * psi [B, A, D] with phi [B, N, D]: a third of the time of a layer with
        so few outputs, and psi * phi is never formed."""
        assert self._head is not None
        return torch.baddbmm(self._head.bias.unsqueeze(1), factors, phi.mT)

    def quantiles_with_gradients(self, features: Tensor, taus: Tensor) -> tuple[Tensor, Callable[..., Any]]:
        """`quantiles` without a graph, and their backward pass: gradient -> those of psi, embedding and head."""
        assert self._head is not None
        embedding, weight = self._embedding, self._head.weight
        cosines = self.cosines(taus).flatten(0, 1)  # [B * N, K]
        rows = embedding.forward(cosines).relu_()
        phi, factors = rows.view(*taus.shape, -1), weight * features.unsqueeze(1)

        def backward(grad: Tensor) -> tuple[Tensor, list[Tensor]]:
            on_factors = torch.bmm(grad, phi)
            on_rows = relu_backward(torch.bmm(grad.mT, factors).flatten(0, 1), rows)
            on_embedding = [torch.empty_like(p) for p in (embedding.weight, embedding.bias)]
            embedding.into_parameters(on_rows, cosines, *on_embedding)
            on_head = [(on_factors * features.unsqueeze(1)).sum(0), grad.sum((0, 2))]
            return (on_factors * weight).sum(1), [*on_embedding, *on_head]

        return self._join(factors, phi), backward

    def with_gradients(self, obs: Tensor, taus: Tensor) -> tuple[Tensor, Backward] | None:
        """`forward` without a graph, and its backward pass written out; None where there is no such form."""
        found = self.features_with_gradients(obs)
        if found is None:
            return None
        outputs, backward = self.quantiles_with_gradients(found[0], taus)
        return outputs, lambda grad: self.join_gradients(found[1], backward(grad))

    def features_with_gradients(self, obs: Tensor) -> tuple[Tensor, Backward] | None:
        """`features` without a graph, and their backward pass; None where the network has no written-out form."""
        if self.encoder is not None or self._head is None or type(self).quantiles is not MLPIQNNetwork.quantiles:
            return None
        return self._features.with_gradients(self.observation_input(obs))

    @staticmethod
    def join_gradients(trunk: Backward, found: tuple[Tensor, list[Tensor]]) -> list[Tensor]:
        """All gradients in the parameters' order: the trunk's, then those of embedding and head."""
        return [*trunk(found[0]), *found[1]]

    def expected_values(self, features: Tensor, taus: Tensor, widths: Tensor | None = None) -> Tensor:
        """Action values [B, A]: the mean of the quantiles at `taus` [B or 1, N], weighted by `widths` where given."""
        embedding = self.embed(taus)
        if self.dueling:  # not linear in the embedding
            quantiles = self.head(features.unsqueeze(-2) * embedding)
            return average(quantiles, widths)
        return self.head(features * average(embedding, widths))

    def forward(self, obs: Tensor, taus: Tensor) -> Tensor:
        """[B, ...], [B, N] -> [B, A, N]."""
        return self.quantiles(self.features(obs), taus)

    def numpy_parts(self) -> tuple[Callable[..., Array], Callable[..., Array]] | None:
        """psi and the expected values in numpy on the same memory: (obs, rng) and (features, taus, widths, rng)."""
        prepare, trunk, head = numpy_input(self.observation_input), numpy_step(self.trunk), numpy_step(self.head)
        embedding = numpy_step(self.embedding)
        if self.encoder is not None or prepare is None or trunk is None or head is None or embedding is None:
            return None
        frequencies, dueling = self.frequencies.numpy(), self.dueling

        def features(obs: Array, rng: np.random.Generator | None) -> Array:
            return trunk(prepare(obs), rng)

        def expected(psi: Array, taus: Array, widths: Array, rng: np.random.Generator | None) -> Array:
            """taus and widths [N or 1, K]."""
            phi = embedding(np.cos(taus[..., None] * frequencies), None)
            np.maximum(phi, 0.0, out=phi)
            if dueling:
                return np.matmul(widths[:, None], head(psi[:, None] * phi, rng))[:, 0]
            return head(psi * np.matmul(widths[:, None], phi)[:, 0], rng)

        return features, expected


def average(x: Tensor, widths: Tensor | None) -> Tensor:
    """Mean over the fractions: [..., N, D] -> [..., D], weighted by `widths` [..., N] that sum to 1."""
    return x.mean(-2) if widths is None else torch.matmul(widths.unsqueeze(-2), x).squeeze(-2)
