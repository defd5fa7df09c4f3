"""D4PG: distributional deterministic policy gradient (Barth-Maron et al. 2018, arXiv:1804.08617).

DDPG with a critic that gives a categorical distribution of the return on fixed atoms: the n-step Bellman target of the
target distribution at mu'(s') is projected onto the atoms (Bellemare et al. 2017) and learned by cross-entropy, and the
actor maximizes the expectation. Here one process collects; the paper uses many. Target networks move by `tau` per
update, as in DDPG; the paper copies them periodically, which is `tau` 1 with a `target_update_interval`.

With TD3's axes it is FastTD3 (Seo et al. 2025, arXiv:2505.22642): of two critics, the target of every row is the whole
distribution of the one with the smaller mean, each critic learns it, and the actor maximizes the smaller mean.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.base import Batch, Number, Setting
from rl_training.algorithms.critic_heads import with_least_mean
from rl_training.algorithms.ddpg import DDPG, actor_loss
from rl_training.errors import UserError
from rl_training.ops.distributional import categorical_cross_entropy, outside_mass, project_categorical
from rl_training.ops.losses import bellman_target, weighted_mean
from rl_training.speed.optimizer import move_support


def critic_loss(logits: Tensor, target_distributions: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """From logits [B, K] or [E, B, K] and targets [B, K]: the loss, and cross-entropies [B] or [E, B].

    The loss is their mean over rows, weighted by importance, summed over critics.
    """
    errors = categorical_cross_entropy(logits, target_distributions.detach())
    return weighted_mean(errors, weights) * (errors.numel() // len(target_distributions)), errors


def d4pg_loss(batch: Batch) -> dict[str, Tensor]:
    """From logits and target_distributions [B, K], actor_q_values and target_q_values [B]; `weights` [B] optional."""
    return {
        "critic_loss": critic_loss(batch["logits"], batch["target_distributions"], batch.get("weights"))[0],
        **actor_loss(batch["actor_q_values"]), "target_q_mean": batch["target_q_values"].mean(),
        "q_value_mean": batch["actor_q_values"].mean(),
    }  # fmt: skip


class D4PG(DDPG):
    """The D4PG learner. `model` is DDPG's, with a `support` [K]: its `ensemble_values` [E, B, K] are logits.

    Priorities are the cross-entropies, their mean over critics. `v_min`, `v_max` and `num_atoms`, when given, must
    match the model.
    """

    learning_rate = Number(">= 0", 3e-4)
    exploration_noise = Number(">= 0", 0.3, read="to act")
    target_update_interval = Setting(">= 1", 1)

    def __init__(
        self, *, v_min: float | None = None, v_max: float | None = None, num_atoms: int | None = None, **settings: Any
    ) -> None:
        super().__init__(**settings)
        support = self.model.support
        found = {"v_min": float(support[0]), "v_max": float(support[-1]), "num_atoms": len(support)}
        for name, value in {"v_min": v_min, "v_max": v_max, "num_atoms": num_atoms}.items():
            if value is not None and abs(value - found[name]) > 1e-4 * (1.0 + abs(value)):
                raise UserError(f"{name} is {value}; the model was made with {found[name]}.")

    def widen_support(self, v_min: float, v_max: float) -> None:
        """Place the atoms from `v_min` to `v_max` and carry over what was learned (see `move_support`)."""
        move_support(self.model.support, v_min, v_max, self.model.critics, self.target_network.critics)

    def critic_step(self, batch: Batch, noise: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
        """Take one gradient step on the cross-entropy to the projected target; return metrics and priorities [B]."""
        support = self.model.support
        with torch.no_grad():
            next_obs = batch["next_obs"]
            next_logits = self.target_network.ensemble_values(next_obs, self.next_actions(next_obs, noise))
            next_probs = with_least_mean(next_logits.softmax(-1), support)
            atoms = bellman_target(batch, self.gamma, support.unsqueeze(0))
            target_probs = project_categorical(atoms=atoms, probs=next_probs, support=support)
        logits = self.model.ensemble_values(batch["obs"], batch["actions"])
        loss, errors = critic_loss(logits, target_probs, batch.get("weights"))
        self.critic_optimizer.step(loss)
        q_values = logits.detach().softmax(-1) @ support
        target_q = target_probs @ support
        metrics = {
            "critic_loss": loss, "target_q_mean": target_q.mean(), "q_value_mean": q_values.mean(),
            "clipped_targets": outside_mass(atoms, next_probs, support).mean(),
        }  # fmt: skip
        return metrics, errors.detach().mean(0)
