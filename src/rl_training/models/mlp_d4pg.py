"""Networks of D4PG: a deterministic actor and critics that give a categorical distribution of returns."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.models.blocks import ActorAndCritics
from rl_training.models.mlp_ddpg import FIRST, DeterministicActor
from rl_training.models.mlp_sac import SampledActions
from rl_training.ops.policy import gaussian_log_prob


class MLPD4PGModel(ActorAndCritics):
    """`actor(obs)`, `ensemble_values(obs, actions)` [E, B, num_atoms], logits on `support`, `expected_values` [E, B].

    `distribution_logits` [B, num_atoms] and `q_values` [B] are those of the first critic.
    """

    bounded_features = True

    def __init__(
        self, *, obs_dim: int, action_dim: int, v_min: float = -150.0, v_max: float = 150.0, num_atoms: int = 51,
        num_critics: int = 1, **options: Any,
    ) -> None:  # fmt: skip
        if not v_min < v_max or num_atoms < 2:
            raise UserError(f"a support of {num_atoms} atoms from {v_min} to {v_max} is not possible.")
        super().__init__(
            DeterministicActor, obs_dim=obs_dim, action_dim=action_dim, num_critics=num_critics, outputs=num_atoms,
            **options,
        )  # fmt: skip
        self.support = nn.Buffer(torch.linspace(v_min, v_max, num_atoms))

    def distribution_logits(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Logits of the return's distribution [B, num_atoms] of the first critic; the others are not computed."""
        logits: Tensor = self.critics(self.features(obs), actions, subset=FIRST)[0]
        return logits

    def q_values(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Expected returns [B]."""
        return self.distribution_logits(obs, actions).softmax(-1) @ self.support

    def expected_values(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Expected returns of every critic [E, B]."""
        return self.ensemble_values(obs, actions).softmax(-1) @ self.support

    def sample_actions(
        self, obs: Tensor, noise: float | Tensor, generator: torch.Generator | None = None
    ) -> SampledActions:
        """mu(s) plus Gaussian noise, clipped, and the density of what was drawn before clipping.

        `noise` is its deviation, or a tensor [B, A] that the caller drew from a standard normal distribution.
        """
        mean = self.actor(obs)
        if isinstance(noise, Tensor) and noise.dim() > 0:
            deviation, standard = 1.0, noise
        elif (deviation := float(noise)) == 0.0:
            return SampledActions(mean, torch.zeros_like(mean[:, 0]))
        else:
            standard = torch.randn(mean.shape, generator=generator, device=mean.device)
        drawn = mean + deviation * standard
        log_std = torch.full_like(mean[0], math.log(deviation))
        return SampledActions(drawn.clamp(-1.0, 1.0), gaussian_log_prob(drawn, mean, log_std))
