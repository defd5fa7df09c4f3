"""BC: behavioral cloning, the policy as a supervised learner of recorded actions (Pomerleau 1988, ALVINN).

Every kind of action uses the same loss, the negative log-likelihood -log pi(a|s): the cross-entropy for discrete
actions, and a Gaussian's for continuous ones, whose deviation learns what its mean cannot explain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_training.algorithms.actor_critic import ActorCriticAlgorithm
from rl_training.algorithms.base import Batch, Number, UpdateResult


def bc_loss(batch: Batch, ent_coef: float = 0.0) -> dict[str, Tensor]:
    """From logprobs of the recorded actions and the policy's entropy, both [B]."""
    entropy_loss = -batch["entropy"].mean()
    return {"loss": -batch["logprobs"].mean() + ent_coef * entropy_loss, "entropy_loss": entropy_loss}


class BC(ActorCriticAlgorithm):
    """The BC learner. A batch has obs and actions [B], and sometimes `heldout_obs` and `heldout_actions` to evaluate.

    `heldout_loss` is the most recent one; before the first held-out rows, it is the loss of the first batch.
    """

    steps = ("gradient_step",)
    learning_rate = Number(">= 0", 1e-3)
    ent_coef = Number(">= 0", 0.0)
    max_grad_norm = Number("> 0", 0.5)

    def __init__(self, *, policy: nn.Module, **settings: Any) -> None:
        super().__init__(policy=policy, **settings)
        self.heldout_loss: Tensor
        self.register_buffer("heldout_loss", torch.zeros(()))
        self.optimizer = self.make_optimizer("optimizer", self.policy.actor_parameters())

    def losses(self, obs: Tensor, actions: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """`bc_loss` of recorded rows [B], and the policy's mode there."""
        policy = self.policy.distribution(obs)
        losses = bc_loss({"logprobs": policy.log_prob(actions), "entropy": policy.entropy()}, self.ent_coef)
        return losses, policy.mode().detach()

    def gradient_step(self, obs: Tensor, actions: Tensor) -> dict[str, Tensor]:
        """Take one gradient step on recorded rows [B] and return its metrics."""
        losses, modes = self.losses(obs, actions)
        if actions.is_floating_point():
            fit = {"mse": (modes - actions).square().mean()}
        else:
            fit = {"accuracy": (modes == actions).view(len(actions), -1).all(1).float().mean()}
        metrics = {name: loss.detach() for name, loss in losses.items()} | fit
        return {**metrics, "grad_norm": self.optimizer.step(losses["loss"])}

    def learn(self, batch: Batch) -> UpdateResult:
        """Take one gradient step on the batch, after evaluating the held-out rows."""
        if "heldout_obs" in batch:
            with torch.no_grad():
                self.heldout_loss.copy_(self.losses(batch["heldout_obs"], batch["heldout_actions"])[0]["loss"])
        metrics = self.gradient_step(batch["obs"], batch["actions"])
        if not self.num_updates and "heldout_obs" not in batch:
            self.heldout_loss.copy_(metrics["loss"])
        self.move_normalizers(batch)
        return UpdateResult({**metrics, "heldout_loss": self.heldout_loss.clone()})
