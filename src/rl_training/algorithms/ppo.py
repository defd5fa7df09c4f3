"""PPO: proximal policy optimization with a clipped surrogate (Schulman et al. 2017, arXiv:1707.06347).

Several epochs of minibatches on min(r A, clip(r, 1-e, 1+e) A), r = pi(a|s) / pi_old(a|s); GAE once per rollout,
advantages normalized per minibatch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_training.algorithms.actor_critic import ActorCriticAlgorithm, select_rows
from rl_training.algorithms.base import Batch, Number, Setting, UpdateResult
from rl_training.ops.losses import Losses, actor_critic_losses, clipped_surrogate, ratio_statistics, value_error

MOST_STEPS = 32  # in one graph


def ppo_loss(batch: Batch, clip_coef: float, ent_coef: float, vf_coef: float) -> Losses:
    """From new_logprobs, logprobs (of the behavior policy), advantages, values, returns and entropy, all [B].

    With `old_values` of the behavior critic, the value loss is clipped too.
    """
    logratio = batch["new_logprobs"] - batch["logprobs"]
    gain = clipped_surrogate(logratio, batch["advantages"], clip_coef)
    error = value_error(batch["values"], batch["returns"], batch.get("old_values"), clip_coef)
    statistics = ratio_statistics(logratio, clip_coef)
    return actor_critic_losses(gain, error, batch["entropy"], ent_coef, vf_coef, statistics=statistics)


class PPO(ActorCriticAlgorithm):
    """The PPO learner. A batch is a rollout [T, N], or flat rows [B] with advantages, returns and logprobs."""

    steps = ("minibatch_step",)
    graphs = ("shuffled_steps",)
    learning_rate = Number(">= 0", 3e-4)
    clip_coef = Number("> 0", 0.2)
    target_kl = Number("> 0", None, read="never")
    ent_coef = Number(">= 0", 0.0)
    vf_coef = Number(">= 0", 0.5)
    max_grad_norm = Number("> 0", 0.5)
    update_epochs = Setting(">= 1", 1)
    minibatch_size = Setting(">= 1", None)  # None: the whole batch
    normalize_advantages = Setting(default=True)
    clip_value_loss = Setting(default=False)

    def __init__(self, *, policy: nn.Module, **settings: Any) -> None:
        super().__init__(policy=policy, **settings)
        self.optimizer = self.make_optimizer("optimizer", policy.parameters())

    def minibatch_step(self, rows: Batch) -> Tensor:
        """Take one gradient step on rows [B]; return metrics [7] in the order of `ppo_loss`, then the gradient norm."""
        policy, backward = self.trace(rows)
        advantages = self.scale_advantages(rows["advantages"])
        terms = {
            "new_logprobs": policy.logprobs, "logprobs": rows["logprobs"], "values": policy.values,
            "entropy": policy.entropy, "advantages": advantages, "returns": rows["returns"],
        }  # fmt: skip
        if self.clip_value_loss:
            terms["old_values"] = rows["values"]
        losses = ppo_loss(terms, self.clip_coef, self.ent_coef, self.vf_coef)
        grad_norm = self.optimizer.apply_gradients(backward(*losses.slopes))
        return torch.stack([*losses.values(), grad_norm])

    def shuffled_steps(self, rows: Batch, order: Tensor) -> Tensor:
        """Take a gradient step on every `minibatch_size` rows in the given order; return the steps' metrics [S, 7]."""
        chosen = select_rows(rows, order)
        pieces = zip(*(value.split(self.minibatch_size or len(order)) for value in chosen.values()), strict=True)
        return torch.stack([self.minibatch_step(dict(zip(chosen, piece, strict=True))) for piece in pieces])

    def learn(self, batch: Batch) -> UpdateResult:
        """Make `update_epochs` passes over the rollout; stop early if an epoch's mean KL exceeds 1.5 `target_kl`.

        A last minibatch of one row is dropped.
        """
        (rows, indices), epochs = self.rows_and_indices(batch), []
        count, device = len(rows["advantages"] if indices is None else indices), rows["advantages"].device
        size = self.minibatch_size or count
        kept = count - (count > 1 and (count - 1) % size == 0)
        whole = kept - kept % size  # the smaller last minibatch runs separately: without reset rows, its size varies
        for _ in range(self.update_epochs):
            order = torch.randperm(count, generator=self.generator, device=device)
            order = order if indices is None else indices[order]
            parts = [*order[:whole].split(size * MOST_STEPS), order[whole:kept]]
            epochs.append(torch.cat([self.shuffled_steps(rows, part) for part in parts if len(part)]))
            if self.target_kl is not None and self.joint(epochs[-1][:, 4].mean()) > 1.5 * self.target_kl:
                break
        self.move_normalizers(rows if indices is None else {"obs": rows["obs"][indices]})
        steps = torch.cat(epochs)
        names = ("loss", "policy_loss", "value_loss", "entropy_loss", "approx_kl", "clip_fraction", "grad_norm")
        metrics = dict(zip(names, steps.mean(0).unbind(), strict=True)) | {"approx_kl": epochs[-1][:, 4].mean()}
        return UpdateResult(metrics, num_gradient_steps=len(steps))
