"""DQN: Q-learning with a replay buffer and a target network (Mnih et al. 2015, Nature 518; arXiv:1312.5602).

y = r + gamma (1 - terminated) max_a Q_target(s', a), Huber loss. Also the scalar variants: double Q-learning
(van Hasselt et al. 2016, arXiv:1509.06461) by `double_q`; dueling, noisy, prioritized and n-step by network and batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.algorithms.base import Batch
from rl_training.algorithms.ops.targets import bellman_target, double_q_values
from rl_training.algorithms.q_learning import QLearning, SampleTerms, choose, weighted_mean


def dqn_loss(batch: Batch) -> dict[str, Tensor]:
    """From q_values [B, A], actions [B] and target_q_values [B]; `weights` [B] optional."""
    chosen, targets = choose(batch["q_values"], batch["actions"].long()), batch["target_q_values"].detach()
    losses = F.smooth_l1_loss(chosen, targets, reduction="none")
    return {
        "loss": weighted_mean(losses, batch.get("weights")), "q_value_mean": chosen.detach().mean(),
        "target_mean": targets.mean(), "td_error_mean": (targets - chosen.detach()).abs().mean(),
    }  # fmt: skip


class DQN(QLearning):
    """The learner; `q_network` is any module [B, ...] -> [B, A]."""

    def __init__(self, *, q_network: nn.Module, **options: Any) -> None:
        super().__init__(q_network=q_network, **options)
        self.make_target()

    def targets(self, rows: Batch) -> Tensor:
        """[B]."""
        next_q = self.target_network(rows["next_obs"])
        scores = self.next_scores(rows, next_q)
        next_values = double_q_values(q_selector=scores, q_value=next_q) if self.double_q else scores.amax(-1)
        return bellman_target(rewards=rows["rewards"], discounts=rows["discounts"], next_values=next_values)

    def terms(self, rows: Batch, targets: Tensor) -> SampleTerms:
        """Huber losses with delta 1 of the taken actions' values; priorities |target - Q|."""
        outputs, gradients = self.evaluate(rows["obs"])
        chosen = choose(outputs, rows["actions"])
        errors = chosen - targets
        slopes = errors.clamp(-1.0, 1.0)
        losses = slopes * torch.sub(errors, slopes, alpha=0.5)
        return SampleTerms(outputs, gradients, losses, slopes, errors.abs_(), chosen, targets)
