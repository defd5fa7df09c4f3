"""A2C: synchronous advantage actor-critic (Mnih et al. 2016, arXiv:1602.01783, without the asynchrony).

One gradient step per rollout on -log pi(a|s) A + c_v (R - V)^2 / 2 - c_e H, with A by GAE (lambda 1: n-step returns).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rl_training.algorithms.actor_critic import ActorCriticAlgorithm
from rl_training.algorithms.base import Batch, Number, Setting, UpdateResult
from rl_training.ops.losses import Losses, actor_critic_losses, policy_gradient, value_error


def a2c_loss(batch: Batch, ent_coef: float, vf_coef: float) -> Losses:
    """From logprobs, advantages, values, returns and entropy, all [B]; `weights` optional."""
    gain = policy_gradient(batch["logprobs"], batch["advantages"])
    error = value_error(batch["values"], batch["returns"])
    return actor_critic_losses(gain, error, batch["entropy"], ent_coef, vf_coef, batch.get("weights"))


class A2C(ActorCriticAlgorithm):
    """The A2C learner. A batch is a rollout [T, N], or flat rows [B] with advantages and returns."""

    reads_logprobs = False
    steps = ("gradient_step",)
    learning_rate = Number(">= 0", 7e-4)
    ent_coef = Number(">= 0", 0.0)
    vf_coef = Number(">= 0", 0.5)
    gae_lambda = Number("in [0, 1]", 1.0)
    max_grad_norm = Number("> 0", 0.5)
    normalize_advantages = Setting(default=False)

    def __init__(self, *, policy: nn.Module, **settings: Any) -> None:
        super().__init__(policy=policy, **settings)
        self.optimizer = self.make_optimizer("optimizer", policy.parameters())

    def gradient_step(self, rows: Batch) -> dict[str, Tensor]:
        """Take one gradient step on rows [B] and return its metrics."""
        advantages = self.scale_advantages(rows["advantages"], rows.get("weights"))
        policy, backward = self.trace(rows)
        terms = {**rows, **policy._asdict(), "advantages": advantages}
        losses = a2c_loss(terms, self.ent_coef, self.vf_coef)
        return {**losses, "grad_norm": self.optimizer.apply_gradients(backward(*losses.slopes))}

    def learn(self, batch: Batch) -> UpdateResult:
        """Take one gradient step on the whole rollout."""
        rows = self.rows(batch)
        metrics = self.gradient_step(rows)
        self.move_normalizers(rows)
        return UpdateResult(metrics)
