"""TD3: twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv:1802.09477).

DDPG with three changes: the target is the smaller of two critics, its action is smoothed by clipped noise, and the
actor and all targets move once per `policy_delay` critic steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.algorithms.base import Batch, Number, Setting
from rl_training.algorithms.ddpg import DDPG, ddpg_loss


def td3_loss(batch: Batch) -> dict[str, Tensor]:
    """From q1_values and q2_values (or q_values [E, B]), target_q_values and actor_q_values (of mu(s)), [B]."""
    q_values = batch["q_values"] if "q_values" in batch else torch.stack([batch["q1_values"], batch["q2_values"]])
    return ddpg_loss({**batch, "q_values": q_values})


class TD3(DDPG):
    """The TD3 learner: DDPG with other defaults (sections 4.2, 5.2, 5.3), and a model that has two `critics` [2, B]."""

    learning_rate = Number(">= 0", 3e-4)
    policy_noise = Number(">= 0", 0.2)
    policy_delay = Setting(">= 1", 2)
