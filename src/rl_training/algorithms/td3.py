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
    """The TD3 learner: DDPG with a model that has two `critics` [2, B]."""

    learning_rate = Number(">= 0", 3e-4)
    policy_noise = Number(">= 0", 0.2)
    noise_clip = Number(">= 0", 0.5)
    policy_delay = Setting(">= 1", 2)

    def draw_noise(self, actions: Tensor) -> Tensor:
        """Clipped target noise [B, A]; actions are in [-1, 1], so it needs no scaling."""
        noise = torch.randn(actions.shape, generator=self.generator, device=actions.device)
        return noise.mul_(self.policy_noise).clamp_(-self.noise_clip, self.noise_clip)

    def target_values(self, next_obs: Tensor, noise: Tensor | None) -> Tensor:
        """min_i Q'_i(s', clip(mu'(s') + noise)) [B] (section 4.2 and 5.3)."""
        actions = (self.target_network.actor(next_obs) + noise).clamp_(-1.0, 1.0)
        values: Tensor = self.target_network.ensemble_values(next_obs, actions).amin(0)
        return values
