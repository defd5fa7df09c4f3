"""IQL: implicit Q-learning (Kostrikov et al. 2021, arXiv:2110.06169), which never evaluates an action that is not data.

V regresses on min_i Q'_i(s, a) of the target critics by the expectile loss |tau - 1(u < 0)| u^2, u = min_i Q'_i - V, so
that it approaches the value of the best recorded actions as tau approaches 1. Then, with the new V, the actor imitates
recorded actions with the weights min(exp(beta (min_i Q'_i - V)), 100), and the critics regress on r + g V(s').
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.awac import AdvantageWeighted, advantage_weights
from rl_training.algorithms.base import Batch, Number
from rl_training.algorithms.critic_heads import least


def expectile_loss(errors: Tensor, expectile: Any) -> Tensor:
    """The mean of |tau - 1(u < 0)| u^2 over errors u [B] of values that should be higher where u > 0."""
    return (torch.where(errors < 0.0, 1.0 - expectile, expectile) * errors.square()).mean()


class IQL(AdvantageWeighted):
    """The IQL learner; `model` has a third network, `state_values(obs)` [B], whose parameters are in `values`."""

    expectile = Number("in (0, 1)", 0.7)
    beta = Number(">= 0", 3.0)

    def __init__(self, *, model: Any, **settings: Any) -> None:
        super().__init__(model=model, **settings)
        self.value_optimizer = self.make_optimizer("value_optimizer", model.values.parameters())

    def update_step(self, batch: Batch, *noise: Tensor) -> dict[str, Tensor]:
        """V, then actor and critics with the new V, then targets."""
        model, obs = self.model, batch["obs"]
        with torch.no_grad():
            targets = least(self.target_critics(model.features(obs), batch["actions"]))
        value_loss = expectile_loss(targets - model.state_values(obs), self.expectile)
        self.value_optimizer.step(value_loss)
        with torch.no_grad():
            advantages = targets - model.state_values(obs)
            next_values = model.state_values(batch["next_obs"])
        metrics = self.imitate(batch, advantage_weights(advantages, self.beta, self.max_weight))
        metrics |= self.fit_critics(batch, next_values)
        self._target.polyak_(self.tau)
        return {**metrics, "value_loss": value_loss, "advantage_mean": advantages.mean()}
