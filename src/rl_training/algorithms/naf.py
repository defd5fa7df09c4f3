"""NAF: continuous Q-learning with normalized advantage functions (Gu et al. 2016, arXiv:1603.00748).

Q(s, a) = V(s) - (a - mu(s))' P(s) (a - mu(s)) / 2 with P positive definite, so that V(s) is the maximum and mu(s) the
action that attains it: Q-learning on y = r + g V'(s') without an actor and without a search.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import Batch, Number, TargetNetwork, UpdateResult
from rl_training.algorithms.ddpg import GaussianExploration
from rl_training.ops.losses import bellman_target, critic_losses, transition_columns


def naf_loss(batch: Batch) -> dict[str, Tensor]:
    """From q_values and target_q_values, both [B]; `weights` [B] optional."""
    losses = critic_losses(batch["q_values"], batch["target_q_values"], batch.get("weights"))
    q_mean = batch["q_values"].detach().mean()
    return {
        "loss": losses["critic_loss"], "q_value_mean": q_mean, "q_mean": q_mean,
        "target_q_mean": losses["target_q_mean"],
    }  # fmt: skip


class NAF(GaussianExploration):
    """The NAF learner. `model` has `actor(obs)` [B, A], `q_values(obs, actions)` [B] and `state_values(obs)` [B]."""

    steps = ("critic_step",)
    learning_rate = Number(">= 0", 1e-3)
    gamma = Number("in [0, 1]", 0.99)
    tau = Number("in (0, 1]", 0.005)
    exploration_noise = Number(">= 0", 0.1, read="to act")

    def __init__(self, *, model: Any, **settings: Any) -> None:
        super().__init__(**settings)
        self.model = model
        self.optimizer = self.make_optimizer("optimizer", model.parameters())
        self._target = TargetNetwork(model)
        self.target_network: Any = self._target.network

    def acting(self) -> nn.Module:
        """The whole network, because mu shares its torso with V and L."""
        model: nn.Module = self.model
        return model

    def critic_step(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Take one gradient step on the Bellman error; return metrics and priorities [B]."""
        with torch.no_grad():
            next_values = self.target_network.state_values(batch["next_obs"])
            targets = bellman_target(batch, self.gamma, next_values)
        q_values = self.model.q_values(batch["obs"], batch["actions"])
        losses = naf_loss({**batch, "q_values": q_values, "target_q_values": targets})
        self.optimizer.step(losses["loss"])
        return losses, (targets - q_values.detach()).abs_()

    def learn(self, batch: Batch) -> UpdateResult:
        """Take a gradient step and update the target."""
        metrics, priorities = self.critic_step(transition_columns(batch))
        self._target.polyak_(self.tau)
        self.model.observation_input.update(batch["obs"])
        return UpdateResult(metrics, priorities=priorities)
