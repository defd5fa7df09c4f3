"""PPO: proximal policy optimization with a clipped surrogate (Schulman et al. 2017, arXiv:1707.06347).

Several epochs of minibatches on min(r A, clip(r, 1-e, 1+e) A), r = pi(a|s) / pi_old(a|s); GAE once per rollout,
advantages normalized per minibatch. With `desired_kl`, the learning rate adapts to the KL of each minibatch, by the
rule of rsl_rl (Schwarke et al. 2025, arXiv:2509.10771).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_training.algorithms.actor_critic import ActorCriticAlgorithm, ShuffledEpochs
from rl_training.algorithms.base import Batch, Number, Setting, UpdateResult
from rl_training.errors import UserError
from rl_training.ops.losses import Losses, actor_critic_losses, clipped_surrogate, ratio_statistics, value_error

LEAST_RATE, MOST_RATE = 1e-5, 1e-2  # between which `desired_kl` moves the learning rate


def ppo_loss(batch: Batch, clip_coef: float, ent_coef: float, vf_coef: float) -> Losses:
    """From new_logprobs, logprobs (of the behavior policy), advantages, values, returns and entropy, all [B].

    With `old_values` of the behavior critic, the value loss is clipped too; `weights` is optional.
    """
    logratio = batch["new_logprobs"] - batch["logprobs"]
    gain = clipped_surrogate(logratio, batch["advantages"], clip_coef)
    error = value_error(batch["values"], batch["returns"], batch.get("old_values"), clip_coef)
    statistics = ratio_statistics(logratio, clip_coef)
    return actor_critic_losses(gain, error, batch["entropy"], ent_coef, vf_coef, batch.get("weights"), statistics)


class PPO(ShuffledEpochs, ActorCriticAlgorithm):
    """The PPO learner. A batch is a rollout [T, N], or flat rows [B] with advantages, returns and logprobs."""

    learning_rate = Number(">= 0", 3e-4)
    clip_coef = Number("> 0", 0.2)
    target_kl = Number("> 0", None, read="never")
    ent_coef = Number(">= 0", 0.0)
    vf_coef = Number(">= 0", 0.5)
    max_grad_norm = Number("> 0", 0.5)
    normalize_advantages = Setting(default=True)
    clip_value_loss = Setting(default=False)
    desired_kl = Setting("> 0", None)  # None: the learning rate does not adapt
    rate: Tensor  # the learning rate, where `desired_kl` adapts it
    step_metrics = ("loss", "policy_loss", "value_loss", "entropy_loss", "approx_kl", "clip_fraction", "grad_norm")

    def __init__(self, *, policy: nn.Module, **settings: Any) -> None:
        super().__init__(policy=policy, **settings)
        if self.desired_kl is not None:
            self.register_buffer("rate", torch.tensor(float(self.learning_rate)))
            self.numbers.place("learning_rate", self.rate)
        self.optimizer = self.make_optimizer("optimizer", policy.parameters())

    def minibatch_step(self, rows: Batch) -> Tensor:
        """Take one gradient step on rows [B]; return the `step_metrics` [7]: those of `ppo_loss`, the gradient norm.

        With memory, rows are whole sequences [M, L].
        """
        policy, backward = self.trace(rows)
        advantages = self.scale_advantages(rows["advantages"], rows.get("weights"))
        terms = {
            "new_logprobs": policy.logprobs, "logprobs": rows["logprobs"], "values": policy.values,
            "entropy": policy.entropy, "advantages": advantages, "returns": rows["returns"],
        }  # fmt: skip
        if "weights" in rows:
            terms["weights"] = rows["weights"]
        if self.clip_value_loss:
            terms["old_values"] = rows["values"]
        losses = ppo_loss(terms, self.clip_coef, self.ent_coef, self.vf_coef)
        if self.desired_kl is not None:
            self.adapt_rate(losses["approx_kl"])
        grad_norm = self.optimizer.apply_gradients(backward(*losses.slopes))
        return torch.stack([*losses.values(), grad_norm])

    def adapt_rate(self, kl: Tensor) -> None:
        """Divide the learning rate by 1.5 if the KL is above twice `desired_kl`; below half of it, multiply it by 1.5.

        rsl_rl computes the KL of the Gaussians in closed form, from stored means and deviations. Here it is estimated
        from the log-probabilities of the taken actions, which a rollout stores anyway and which any policy has; its
        mean is the same, and its noise over a minibatch is small next to the factor of four between the two bounds.
        Both compare the policy before the gradient step, so the first minibatch of a rollout has a KL of 0. rsl_rl's
        formula adds 1e-5 per dimension and raises the rate there, and so does this one.
        """
        kl, rate = self.joint(kl), self.rate
        slower, faster = (rate / 1.5).clamp(min=LEAST_RATE), (rate * 1.5).clamp(max=MOST_RATE)
        chosen = torch.where(kl < 0.5 * self.desired_kl, faster, rate)
        rate.copy_(torch.where(kl > 2.0 * self.desired_kl, slower, chosen))

    def learn(self, batch: Batch) -> UpdateResult:
        """Make `update_epochs` passes over the rollout; stop early if an epoch's mean KL exceeds 1.5 `target_kl`."""
        (rows, indices), epochs = self.rows_and_indices(batch), []
        count = len(rows["returns"] if indices is None else indices)
        _, kept = self.whole_minibatches(rows, count)
        if self.desired_kl is not None and self.update_epochs == 1 and kept <= self.entries(rows, count):
            raise UserError("desired_kl compares minibatches, but a rollout has only one; raise update_epochs to 2.")
        for epoch in self.epochs(rows, indices, batch):
            epochs.append(epoch)
            if self.target_kl is not None and self.joint(epoch[:, 4].mean()) > 1.5 * self.target_kl:
                break
        self.move_normalizers(rows if indices is None else {"obs": rows["obs"][indices]})
        steps = torch.cat(epochs)
        metrics = dict(zip(self.step_metrics, steps.mean(0).unbind(), strict=True))
        metrics["approx_kl"] = epochs[-1][:, 4].mean()
        if self.desired_kl is not None:
            metrics["learning_rate"] = self.rate.clone()
        return UpdateResult(metrics, num_gradient_steps=len(steps))
