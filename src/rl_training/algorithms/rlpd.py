"""RLPD: reinforcement learning with prior data (Ball et al. 2023, arXiv:2302.02948).

SAC on batches of which a share is prior data, with a large ensemble of critics that have LayerNorm: the target is the
minimum over a random subset, newly drawn for each critic step; the actor maximizes the mean over all critics; and one
actor and temperature step follows several critic steps. The code that makes batches decides which data they hold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.base import Batch, Setting
from rl_training.algorithms.sac import SAC, least, sac_loss
from rl_training.errors import UserError


def climbed_values(q_values: Tensor, critic_subset_size: int) -> Tensor:
    """What the actor maximizes: the mean over critics [E, B], or their minimum if the subset is all of them."""
    return least(q_values) if critic_subset_size >= len(q_values) else q_values.mean(0)


def rlpd_loss(batch: Batch, critic_subset_size: int = 2) -> dict[str, Tensor]:
    """Like `sac_loss`, with `climbed_values`."""
    return sac_loss(batch, lambda sampled: climbed_values(sampled, critic_subset_size))


class RLPD(SAC):
    """The RLPD learner: SAC with a model of many critics.

    If `critic_subset_size` is the number of critics, no subset is drawn, and the actor maximizes the minimum:
    with two critics without LayerNorm and an interval of 1 this is SAC, bit for bit. `target_entropy` is -|A|/2 unless
    given (-|A| where this is SAC).
    """

    graphs = ()  # a permutation is drawn between the steps
    actor_update_interval = Setting(">= 1", 1)

    def __init__(self, *, model: Any, critic_subset_size: int = 2, **settings: Any) -> None:
        num_critics = model.num_critics
        if not 1 <= critic_subset_size <= num_critics:
            raise UserError(f"critic_subset_size is {critic_subset_size}; from 1 to {num_critics} are possible.")
        if critic_subset_size < num_critics and settings.get("target_entropy") is None:
            settings["target_entropy"] = -model.action_dim / 2
        super().__init__(model=model, **settings)
        self.num_critics, self.critic_subset_size = num_critics, critic_subset_size

    def draw_subset(self) -> Tensor | None:
        """Distinct indices [M], newly drawn for every critic step."""
        if self.critic_subset_size == self.num_critics:
            return None
        order = torch.randperm(self.num_critics, generator=self.generator, device=self.last_actor.device)
        return order[: self.critic_subset_size]

    def climbed(self, q_values: Tensor) -> Tensor:
        """The mean over all critics, or their minimum where this is SAC."""
        return climbed_values(q_values, self.critic_subset_size)
