"""RLPD: reinforcement learning with prior data (Ball et al. 2023, arXiv:2302.02948).

SAC on batches of which a share is prior data, with a large ensemble of critics that have LayerNorm: the target is the
minimum over a random subset, newly drawn for each critic step; the actor maximizes the mean over all critics; and one
actor and temperature step follows several critic steps. The code that makes batches decides which data they hold.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rl_training.algorithms.base import Batch, Setting
from rl_training.algorithms.critic_heads import least
from rl_training.algorithms.sac import SAC, sac_loss


def rlpd_loss(batch: Batch, critic_subset_size: int = 2) -> dict[str, Tensor]:
    """Like `sac_loss`; the actor maximizes the mean over critics [E, B], or their minimum if the subset is all."""
    return sac_loss(batch, lambda sampled: least(sampled) if critic_subset_size >= len(sampled) else sampled.mean(0))


class RLPD(SAC):
    """The RLPD learner: SAC with a model of many critics.

    If `critic_subset_size` is the number of critics, no subset is drawn, and the actor maximizes the minimum:
    with two critics without LayerNorm and an interval of 1 this is SAC, bit for bit. `target_entropy` is -|A|/2 unless
    given (-|A| where this is SAC).
    """

    critic_subset_size = Setting(">= 1", 2)

    def __init__(self, *, model: Any, **settings: Any) -> None:
        size = settings.get("critic_subset_size", 2)
        is_subset = size is not None and size < model.critics.num_members
        if is_subset and settings.get("target_entropy_per_dimension") is None:
            settings["target_entropy_per_dimension"] = -0.5
        super().__init__(model=model, **settings)
