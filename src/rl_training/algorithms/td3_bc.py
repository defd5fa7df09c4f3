"""TD3+BC and ReBRAC: TD3 on recorded data, with the distance to the recorded actions in its losses.

TD3+BC (Fujimoto and Gu 2021, arXiv:2106.06860): the actor minimizes -lambda Q_1(s, mu(s)) + (mu(s) - a)^2, a mean over
batch and dimensions, with lambda = alpha / mean |Q_1| as a constant.

ReBRAC (Tarasov et al. 2023, arXiv:2305.09836): b_1 |mu(s) - a|^2 - min_i Q_i(s, mu(s)) / mean |min_i Q_i|, with the
squares summed over dimensions, and the target y = r + g (min_i Q'_i(s', a~) - b_2 |a~ - a'|^2), where a~ is the target
actor's action with clipped noise and a' the action that was recorded next.

The two are settings of `q_weight` (alpha), `actor_bc_coef` (b_1), `critic_bc_coef` (b_2) and `actor_q`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rl_training.algorithms.base import Batch, Number
from rl_training.algorithms.td3 import TD3


def squared_distance(actions: Tensor, recorded: Tensor) -> Tensor:
    """|a - b|^2 summed over dimensions: [B, A], [B, A] -> [B]."""
    return (actions - recorded).square().sum(-1)


def bc_actor_loss(q_values: Tensor, distances: Tensor, size: Tensor, q_weight: Any, bc_coef: Any) -> dict[str, Tensor]:
    """From the values [B] of mu(s), its squared distances [B] to the recorded actions, and the values' mean size."""
    return {"actor_loss": bc_coef * distances.mean() - q_weight / size.detach() * q_values.mean()}


class TD3BC(TD3):
    """The learner of TD3+BC and ReBRAC: TD3 with a weight of imitation in the actor's loss and in the targets.

    A batch may have `next_actions`, which only the penalty of the targets needs: without them, as for new experience,
    there is none.
    """

    q_weight = Number(">= 0", 2.5)
    actor_bc_coef = Number(">= 0", None)  # None: 1 / |A|, so that the sum over dimensions becomes their mean
    critic_bc_coef = Number(">= 0", 0.0)

    def __init__(self, *, model: Any, **settings: Any) -> None:
        super().__init__(model=model, **settings)
        if self.actor_bc_coef is None:
            self.actor_bc_coef = 1.0 / model.action_dim

    def correct_values(self, values: Tensor, actions: Tensor, batch: Batch) -> Tensor:
        """min_i Q'_i - b_2 |a~ - a'|^2."""
        if "next_actions" not in batch:
            return values
        corrected: Tensor = values - self.critic_bc_coef * squared_distance(actions, batch["next_actions"])
        return corrected

    def actor_losses(self, obs: Tensor, actions: Tensor, stored: Tensor) -> dict[str, Tensor]:
        """From the value of mu(s) and its distance to the stored actions."""
        q_values = self.climbed(obs, actions)
        size = self.joint(q_values.abs().mean())
        return bc_actor_loss(q_values, squared_distance(actions, stored), size, self.q_weight, self.actor_bc_coef)
