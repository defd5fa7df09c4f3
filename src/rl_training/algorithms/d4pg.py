"""D4PG: distributional deterministic policy gradient (Barth-Maron et al. 2018, arXiv:1804.08617).

DDPG with a critic that gives a categorical distribution of the return on fixed atoms: the n-step Bellman target of the
target distribution at mu'(s') is projected onto the atoms (Bellemare et al. 2017) and learned by cross-entropy, and the
actor maximizes the expectation. Here one process collects; the paper uses many. Target networks move by `tau` per
update, as in DDPG; the paper copies them periodically, which is `tau` 1 with a `target_update_interval`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.base import Batch, Number, Setting, move_support
from rl_training.algorithms.ddpg import DDPG, actor_loss
from rl_training.errors import UserError
from rl_training.ops.distributional import categorical_cross_entropy, outside_mass, project_categorical
from rl_training.ops.losses import bellman_target, weighted_mean


def critic_loss(logits: Tensor, target_distributions: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cross-entropies [B] to the projected targets [B, K] and their mean, weighted by importance."""
    errors = categorical_cross_entropy(logits, target_distributions.detach())
    return weighted_mean(errors, weights), errors


def d4pg_loss(batch: Batch) -> dict[str, Tensor]:
    """From logits and target_distributions [B, K], actor_q_values and target_q_values [B]; `weights` [B] optional."""
    return {
        "critic_loss": critic_loss(batch["logits"], batch["target_distributions"], batch.get("weights"))[0],
        **actor_loss(batch["actor_q_values"]), "target_q_mean": batch["target_q_values"].mean(),
        "q_value_mean": batch["actor_q_values"].mean(),
    }  # fmt: skip


class D4PG(DDPG):
    """The D4PG learner. `model` has `support` [K], `actor`, `distribution_logits(obs, actions)` [B, K] and `q_values`.

    Priorities are the cross-entropies. `v_min`, `v_max` and `num_atoms`, when given, must match the model.
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
            next_obs, target = batch["next_obs"], self.target_network
            next_probs = target.distribution_logits(next_obs, target.actor(next_obs)).softmax(-1)
            atoms = bellman_target(batch, self.gamma, support.unsqueeze(0))
            target_probs = project_categorical(atoms=atoms, probs=next_probs, support=support)
        logits = self.model.distribution_logits(batch["obs"], batch["actions"])
        loss, errors = critic_loss(logits, target_probs, batch.get("weights"))
        self.critic_optimizer.step(loss)
        q_values = logits.detach().softmax(-1) @ support
        target_q = target_probs @ support
        metrics = {
            "critic_loss": loss, "target_q_mean": target_q.mean(), "q_value_mean": q_values.mean(),
            "clipped_targets": outside_mass(atoms, next_probs, support).mean(),
        }  # fmt: skip
        return metrics, errors.detach()
