"""QR-DQN: quantiles of the return at fixed fractions (Dabney et al. 2018, arXiv:1710.10044).

theta_i estimates the quantile at (i + 1/2) / N; each is pulled to the target quantiles r + gamma theta'_j of the best
next action by the quantile Huber loss, summed over i and averaged over j.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.base import Array, Batch, Number, Setting
from rl_training.algorithms.q_learning import QLearning, SampleTerms, choose
from rl_training.ops.distributional import quantile_huber
from rl_training.ops.losses import bellman_target


class QRDQN(QLearning):
    """The QR-DQN learner. `q_network` maps [B, ...] to quantiles [B, A, num_quantiles]."""

    kappa = Number(">= 0", 1.0, read="by value")
    num_quantiles = Setting(">= 1", 50)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.taus: Tensor
        self.register_buffer("taus", (torch.arange(self.num_quantiles).float() + 0.5) / self.num_quantiles)
        self.make_target()

    def values(self, outputs: Tensor) -> Tensor:
        """Means of the quantiles [B, A]."""
        return outputs.mean(-1)

    def numpy_values(self, outputs: Array) -> Array:
        """`values` in numpy."""
        means: Array = outputs.mean(-1)
        return means

    def targets(self, rows: Batch) -> Tensor:
        """Target quantiles [B, N]."""
        quantiles = self.next_outputs(rows)
        chosen = choose(quantiles, self.next_scores(rows, quantiles).argmax(-1))
        return bellman_target(rows, self.gamma, chosen)

    def terms(self, rows: Batch, outputs: Tensor, targets: Tensor) -> SampleTerms:
        """Quantile Huber losses."""
        quantiles = choose(outputs, rows["actions"])
        losses, slopes = quantile_huber(quantiles, targets, taus=self.taus.unsqueeze(0), kappa=self.kappa)
        return SampleTerms(losses, slopes, losses, quantiles, targets)
