"""MOPO: model-based offline policy optimization (Yu et al. 2020, arXiv:2005.13239).

MBPO on recorded data alone. The model is fitted once, and imagined rewards are lowered where it is uncertain:
r~ = r - lambda max_i |sigma_i(s, a)|. The norm is over the deviations of reward and change of observation, in the
environment's own units; the maximum is over all members. With lambda 0 this is MBPO on the same data, bit for bit.
"""

from __future__ import annotations

from torch import Tensor

from rl_training.algorithms.base import Batch, Number
from rl_training.algorithms.mbpo import MBPO, mbpo_model_loss


def mopo_model_loss(batch: Batch) -> dict[str, Tensor]:
    """Like `mbpo_model_loss`, under MOPO's name."""
    return mbpo_model_loss(batch, "mopo_model_loss")


class MOPO(MBPO):
    """The MOPO learner: MBPO with `penalty_coef` (lambda)."""

    model_loss_name = "mopo_model_loss"
    penalty_coef = Number(">= 0", 1.0, read="never")

    def imagined_rewards(self, rewards: Tensor, obs: Tensor, actions: Tensor) -> Tensor:
        """Predicted rewards [B] minus the penalty."""
        return rewards - self.penalty_coef * self.uncertainty(obs, actions) if self.penalty_coef else rewards

    def uncertainty(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Largest norm of the predicted deviations over all members, elites or not: [B]."""
        deviations: Tensor = (0.5 * self.dynamics_model(obs, actions).logvars).exp()
        largest: Tensor = deviations.norm(dim=-1).amax(0)
        return largest
