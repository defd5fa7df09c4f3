"""Network of NAF: one torso with the outputs mu(s), V(s) and the factor L(s) of a quadratic advantage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.models.blocks import ObservationNetwork, mlp, noisy_policy
from rl_training.speed.passes import NumpyPolicy

LOG_DIAGONAL_RANGE = (-10.0, 5.0)


class MLPNAFModel(ObservationNetwork):
    """Q(s, a) = V(s) - (a - mu)' P (a - mu) / 2 with P = L L', L lower-triangular, exp on its diagonal (eq. 6 to 8)."""

    def __init__(
        self, *, action_dim: int, hidden_sizes: Sequence[int] = (256, 256), activation: str = "relu", **inputs: Any
    ) -> None:
        super().__init__(**inputs)
        self.action_dim = action_dim
        below = action_dim * (action_dim - 1) // 2
        self.network = mlp(self.input_dim, hidden_sizes, 2 * action_dim + 1 + below, activation, output_gain=0.01)
        self._sizes = [action_dim, 1, action_dim, below]  # mu, V, log of L's diagonal, L below the diagonal
        # Index of each entry of L in (diagonal, below, one zero), so that one gather builds L.
        place = torch.full((action_dim, action_dim), action_dim + below)
        place[range(action_dim), range(action_dim)] = torch.arange(action_dim)
        rows, columns = torch.tril_indices(action_dim, action_dim, -1)
        place[rows, columns] = action_dim + torch.arange(below)
        self.place = nn.Buffer(place.flatten(), persistent=False)

    def _outputs(self, obs: Tensor) -> Tensor:
        return self.network(self.features(obs))

    def heads(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """mu [B, A] in [-1, 1], V [B] and L [B, A, A]."""
        mu, value, log_diagonal, below = self._outputs(obs).split(self._sizes, -1)
        entries = torch.cat([log_diagonal.clamp(*LOG_DIAGONAL_RANGE).exp(), below, torch.zeros_like(value)], -1)
        factor = entries.index_select(-1, self.place).view(-1, self.action_dim, self.action_dim)
        return mu.tanh(), value.squeeze(-1), factor

    def actor(self, obs: Tensor) -> Tensor:
        """mu(s) [B, A], the action that maximizes Q."""
        return self._outputs(obs)[:, : self.action_dim].tanh()

    def forward(self, obs: Tensor) -> Tensor:
        """The same, so that the model can be called as a policy."""
        return self.actor(obs)

    def state_values(self, obs: Tensor) -> Tensor:
        """V(s) [B], the maximum of Q over actions."""
        return self._outputs(obs)[:, self.action_dim]

    def q_values(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Q(s, a) [B]."""
        mu, value, factor = self.heads(obs)
        # (a - mu)' L L' (a - mu) is the squared length of L'(a - mu)
        image = (factor * (actions - mu).unsqueeze(-1)).sum(-2)
        return value - 0.5 * image.square().sum(-1)

    def numpy_policy(self, deviation: Callable[[], float]) -> NumpyPolicy | None:
        """Acting in numpy, with noise of the current deviation; None where there is no numpy form."""
        forward, size = self.numpy_form(self.network), self.action_dim
        return noisy_policy(forward and (lambda obs, rng: np.tanh(forward(obs, rng)[:, :size])), deviation)
