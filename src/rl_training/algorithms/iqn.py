"""IQN: the quantile function at random fractions (Dabney et al. 2018, arXiv:1806.06923).

Fractions are drawn for every transition, independently for the online (N) and the target quantiles (N'); K more,
shared by the batch, choose the next action and act. Quantile Huber loss, summed over N and averaged over N'.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Array, Batch, Number, Setting
from rl_training.algorithms.q_learning import NumpyValues, QLearning, SampleTerms, choose
from rl_training.ops.distributional import quantile_huber
from rl_training.ops.losses import bellman_target
from rl_training.ops.policy import mask_actions
from rl_training.speed.optimizer import Backward


class IQN(QLearning):
    """The IQN learner. `q_network` has `features`, `quantiles` and `expected_values` (see `MLPIQNNetwork`)."""

    kappa = Number(">= 0", 1.0, read="by value")
    num_quantiles = Setting(">= 1", 8)
    num_target_quantiles = Setting(">= 1", None)  # None: as many
    num_acting_quantiles = Setting(">= 1", 32)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if self.num_target_quantiles is None:
            self.num_target_quantiles = self.num_quantiles
        self.make_target()

    def draws(self, count: int) -> dict[str, Tensor]:
        """Noise, and fractions in (0, 1): N and N' per transition, K for the batch."""
        online, target = count * self.num_quantiles, count * self.num_target_quantiles
        uniform = self.uniform(online + target + self.num_acting_quantiles)
        taus, target_taus, acting_taus = uniform.split([online, target, self.num_acting_quantiles])
        return super().draws(count) | {
            "taus": taus.view(count, -1), "target_taus": target_taus.view(count, -1), "acting_taus": acting_taus,
        }  # fmt: skip

    def uniform(self, count: int) -> Tensor:
        """Random fractions [count]."""
        return torch.empty(count, device=self.generator.device).uniform_(generator=self.generator)

    def targets(self, rows: Batch) -> Tensor:
        """Target quantiles [B, N']."""
        network, features = self.target_network, self.target_network.features(rows["next_obs"])
        quantiles = network.quantiles(features, rows["target_taus"])
        if self.double_q:
            network, features = self.q_network, self.q_network.features(rows["next_obs"])
        scores = network.expected_values(features, rows["acting_taus"])
        chosen = choose(quantiles, mask_actions(scores, rows.get("next_action_masks")).argmax(-1))
        return bellman_target(rows, self.gamma, chosen)

    def trace(self, rows: Batch) -> tuple[Tensor, Backward]:
        """Quantiles [B, A, N] at the drawn fractions."""
        return self.optimizer.trace(self.q_network, rows["obs"], rows["taus"])

    def terms(self, rows: Batch, outputs: Tensor, targets: Tensor) -> SampleTerms:
        """Quantile Huber losses."""
        quantiles = choose(outputs, rows["actions"])
        losses, slopes = quantile_huber(quantiles=quantiles, targets=targets, taus=rows["taus"], kappa=self.kappa)
        return SampleTerms(losses, slopes, losses, quantiles, targets)

    def action_values(self, obs: Tensor, deterministic: bool) -> Tensor:
        """Means [N, A] over K fractions: newly drawn, or midpoints when deterministic."""
        count = self.num_acting_quantiles
        even = (torch.arange(count, device=obs.device) + 0.5) / count
        taus = even if deterministic else self.uniform(count)
        values: Tensor = self.q_network.expected_values(self.q_network.features(obs), taus)
        return values

    def numpy_action_values(self) -> NumpyValues | None:
        """`action_values` in numpy."""
        parts = self.numpy_form("numpy_parts")
        if parts is None:
            return None
        features, expected = parts
        count = self.num_acting_quantiles
        even = (np.arange(count, dtype=np.float32)[None] + 0.5) / count
        widths = np.full((1, count), 1.0 / count, dtype=np.float32)

        def values(obs: Array, rng: np.random.Generator | None) -> Array:
            taus = even if rng is None else rng.random((1, count), dtype=np.float32)
            means: Array = expected(features(obs, rng), taus, widths, rng)
            return means

        return values
