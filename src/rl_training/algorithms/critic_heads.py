"""Critic heads: what the critics of the SAC family predict, and how their targets and losses are made of it.

A head works on the outputs of an ensemble of critics. `SAC.critic_step` calls it and contains no choice of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rl_training.ops.distributional import categorical_cross_entropy, project_categorical, quantile_huber_loss
from rl_training.ops.losses import critic_losses, weighted_mean

Backup = Callable[[Tensor], Tensor]  # next values [B] or [B, K] -> r + g (values - alpha log pi(a'|s'))
Losses = tuple[dict[str, Tensor], Tensor]  # critic_loss and target_q_mean; priorities [B]


def least(q_values: Tensor) -> Tensor:
    """min_i Q_i: [E, B] -> [B]."""
    return q_values.amin(0)


class ValueHead:
    """Each critic predicts the expected return: outputs [E, B]. The target is the minimum over the target critics."""

    def values(self, outputs: Tensor) -> Tensor:
        """Expected returns [E, B]."""
        return outputs

    def targets(self, next_outputs: Tensor, backup: Backup) -> Tensor:
        """y = r + g (min_i Q'_i - alpha log pi): [B], from the outputs of all target critics, or of a subset."""
        return backup(least(next_outputs))

    def losses(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Losses:
        """The mean squared error of every critic to the same targets; priorities are mean absolute errors."""
        return critic_losses(outputs, targets, weights), (targets - outputs.detach()).abs_().mean(0)


def truncate(quantiles: Tensor, dropped: int) -> Tensor:
    """The smallest of the pooled quantiles [E, B, K] of all critics, without the largest E * `dropped`: [B, kept]."""
    members, _, count = quantiles.shape
    pooled = quantiles.transpose(0, 1).flatten(1).sort().values
    return pooled[:, : members * (count - dropped)]


def quantile_errors(quantiles: Tensor, targets: Tensor) -> Tensor:
    """Quantile Huber losses [E, B] of quantiles [E, B, K] to targets [B, M], each a mean over the K * M pairs."""
    members, _, count = quantiles.shape
    midpoints = (torch.arange(count, dtype=quantiles.dtype, device=quantiles.device) + 0.5) / count
    rows = quantiles.flatten(0, 1), targets.repeat(members, 1)
    return quantile_huber_loss(*rows, midpoints, kappa=1.0).view(members, -1) / count


class QuantileHead:
    """Each critic predicts K quantiles of the return: outputs [E, B, K] (Kuznetsov et al. 2020, arXiv:2005.04269).

    The targets are the quantiles of all target critics, without the largest `dropped` per critic of the pool, which
    overestimate most. Nothing is dropped in the values that the actor maximizes.
    """

    def __init__(self, dropped: int) -> None:
        self.dropped = dropped

    def values(self, outputs: Tensor) -> Tensor:
        """Expected returns [E, B]: the mean of each critic's quantiles."""
        return outputs.mean(-1)

    def targets(self, next_outputs: Tensor, backup: Backup) -> Tensor:
        """y_j = r + g (z_j - alpha log pi) of the kept quantiles: [B, M]."""
        return backup(truncate(next_outputs, self.dropped))

    def losses(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Losses:
        """The mean quantile Huber loss of every critic to the same targets; priorities are its mean over critics."""
        errors = quantile_errors(outputs, targets)
        losses = {"critic_loss": weighted_mean(errors, weights), "target_q_mean": targets.mean()}
        return losses, errors.detach().mean(0)


def with_least_mean(probs: Tensor, support: Tensor) -> Tensor:
    """For each row the distribution of the critic whose mean is smallest: [E, B, K], [K] -> [B, K]."""
    if len(probs) == 1:
        return probs[0]
    chosen = (probs @ support).argmin(0).view(1, -1, 1).expand(1, *probs.shape[1:])
    return probs.gather(0, chosen).squeeze(0)


class CategoricalHead(nn.Module):
    """Each critic predicts probabilities of returns on a `support` [K], as logits: outputs [E, B, K].

    For each row, the target is the whole distribution of the target critic with the smallest mean, moved by the soft
    Bellman backup and projected onto the support (Bellemare et al. 2017, arXiv:1707.06887, eq. 7). `edge_targets` is
    the share of the targets on the two atoms at the ends, where all returns beyond them are.
    """

    def __init__(self, support: Tensor) -> None:
        super().__init__()
        self.support = nn.Buffer(support, persistent=False)

    def values(self, outputs: Tensor) -> Tensor:
        """Expected returns [E, B]."""
        return outputs.softmax(-1) @ self.support

    def targets(self, next_outputs: Tensor, backup: Backup) -> Tensor:
        """The probabilities [B, K] of r + g (z_k - alpha log pi)."""
        probs = with_least_mean(next_outputs.softmax(-1), self.support)
        return project_categorical(backup(self.support.expand(probs.shape)), probs, self.support)

    def losses(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Losses:
        """The mean cross-entropy of every critic to the same targets; priorities are its mean over critics."""
        errors = categorical_cross_entropy(outputs, targets)
        metrics = {"target_q_mean": (targets @ self.support).mean()}
        metrics["edge_targets"] = (targets[..., 0] + targets[..., -1]).mean()
        return {"critic_loss": weighted_mean(errors, weights), **metrics}, errors.detach().mean(0)


Head = ValueHead | QuantileHead | CategoricalHead
