"""CQL and Cal-QL: SAC on recorded data with critics that are low where there is no data.

CQL(H) (Kumar et al. 2020, arXiv:2006.04779) adds to every critic's loss w (mean log sum exp Q(s, .) - mean Q(s, a)).
The sum over actions is estimated by importance sampling from 3 n of them, each divided by its density: n uniform ones,
n of pi(.|s) and n of pi(.|s'), all valued at s. Actions and densities are constants. The targets leave the entropy out.
As in SAC, the actor learns from the critics as they are after their step.

With a target gap, w is multiplied by alpha' = exp(log alpha') in [0, 1e6], which ascends on w (difference - gap).

Cal-QL (Nakamoto et al. 2023, arXiv:2303.05479): the values of the policy's actions, not of the uniform ones, enter as
max(Q, R) with R the return that was recorded from there, so that they are not pushed below what the data achieved.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import Batch, Number, Setting
from rl_training.algorithms.critic_heads import least
from rl_training.algorithms.sac import SAC
from rl_training.errors import UserError

MOST_MULTIPLIER = 1e6


def soft_maximum(values: Tensor, log_densities: Tensor | None = None) -> Tensor:
    """log sum_k exp(Q_k) / p_k: [..., K, B] -> [..., B], from log densities that broadcast to the values."""
    return torch.logsumexp(values if log_densities is None else values - log_densities, -2)


class CQL(SAC):
    """The CQL learner: SAC with a penalty. With a penalty of 0 and the entropy in the backup, this is SAC.

    `penalty_coef` is w, `num_proposals` n. Without `importance_sampling`, the recorded action joins the others and no
    value is divided by a density. `best_proposal_backup` evaluates n actions at s' and takes the best one's value. A
    batch has `returns_to_go` [B] if `calibrated`.
    """

    backup_entropy = Setting(default=False)
    penalty_coef = Number(">= 0", 10.0)
    num_proposals = Setting(">= 1", 10)
    importance_sampling = Setting(default=True)
    calibrated = Setting(default=False)
    best_proposal_backup = Setting(default=False)
    target_gap = Number(">= 0", None)  # None: w as it is
    least_difference = Number("any", None)  # None: no bound

    def __init__(self, *, model: Any, **settings: Any) -> None:
        super().__init__(model=model, **settings)
        if model.critics.dropout:
            raise UserError(f"critic_dropout is {model.critics.dropout}; with the penalty of CQL it must be 0.")
        if self.learning:
            raise UserError("architecture normalizes by batches; with the penalty of CQL it must not.")
        self.log_multiplier = None if self.target_gap is None else nn.Parameter(torch.ones((), device=self.device))
        if self.log_multiplier is not None:
            rate = ("critic_learning_rate", "learning_rate")
            self.make_optimizer("multiplier_optimizer", [self.log_multiplier], learning_rate=rate)

    def draw_proposals(self, batch: Batch) -> dict[str, Tensor]:
        """What the penalty and the backup draw: uniform actions and noise, each [n * B, A]."""
        shape = (self.num_proposals * len(batch["obs"]), self.model.action_dim)
        options: dict[str, Any] = {"generator": self.generator, "device": batch["obs"].device}
        drawn = {name: torch.randn(shape, **options) for name in ("noise", "next_noise", "backup_noise")}
        return {**drawn, "uniform": torch.rand(shape, **options) * 2.0 - 1.0}

    def propose(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [n * B, A] of the policy and their log-probabilities [n, B], without a gradient."""
        with torch.no_grad():
            repeated = obs.repeat(self.num_proposals, *[1] * (obs.dim() - 1))
            actions, logprobs = self.model.actor.sample(repeated, noise)
        return actions, logprobs.view(self.num_proposals, -1)

    def values_at(self, critics: Any, obs: Tensor, actions: Tensor) -> Tensor:
        """Values [E, n, B] of n actions per observation [n * B, A]."""
        features = self.model.features(obs)
        repeated = features.repeat(len(actions) // len(obs), *[1] * (features.dim() - 1))
        values = self.head.values(critics(repeated, actions))
        return values.view(len(values), -1, len(obs))

    def next_actions(self, batch: Batch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """One sample, or the best of n by the smallest target critic."""
        if not self.best_proposal_backup:
            return super().next_actions(batch, noise)
        actions, logprobs = self.propose(batch["next_obs"], batch["backup_noise"])
        best = least(self.values_at(self.next_critics, batch["next_obs"], actions)).argmax(0, keepdim=True)
        chosen = actions.view(self.num_proposals, len(noise), -1)
        index = best.unsqueeze(-1).expand(1, *chosen.shape[1:])
        return chosen.gather(0, index).squeeze(0), logprobs.gather(0, best).squeeze(0)

    def differences(self, recorded: Tensor, batch: Batch) -> Tensor:
        """log sum exp Q(s, .) - Q(s, a) of every critic and row [E, B], from the values [E, B] of recorded actions."""
        obs, critics = batch["obs"], self.model.critics
        here, log_here = self.propose(obs, batch["noise"])
        there, log_there = self.propose(batch["next_obs"], batch["next_noise"])
        uniform = self.values_at(critics, obs, batch["uniform"])
        proposed = self.values_at(critics, obs, torch.cat([here, there]))
        if self.calibrated:
            proposed = torch.maximum(proposed, batch["returns_to_go"])
        if not self.importance_sampling:
            return soft_maximum(torch.cat([uniform, proposed, recorded.unsqueeze(1)], 1)) - recorded
        log_uniform = torch.full_like(log_here, -self.model.action_dim * math.log(2.0))
        densities = torch.cat([log_uniform, log_here, log_there])
        return soft_maximum(torch.cat([uniform, proposed], 1), densities) - recorded

    def add_penalty(self, losses: dict[str, Tensor], outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The losses of SAC, with the penalty in `critic_loss`."""
        differences = self.differences(self.head.values(outputs), batch)
        if self.least_difference is not None:
            differences = differences.clamp(min=self.least_difference)
        penalty = self.penalty_coef * differences.mean()
        metrics = {"bellman_loss": losses["critic_loss"], "q_gap": differences.mean()}
        if self.log_multiplier is not None:
            multiplier = self.log_multiplier.exp().clamp(0.0, MOST_MULTIPLIER)
            excess = self.penalty_coef * (differences.mean() - self.target_gap)
            self._optimizers["multiplier_optimizer"].step(-multiplier * excess.detach())
            penalty = multiplier.detach() * (penalty - self.penalty_coef * self.target_gap)
            metrics["multiplier"] = multiplier
        return {**losses, **metrics, "critic_loss": losses["critic_loss"] + penalty}

    def update_step(self, batch: Batch, with_actor: bool) -> tuple[dict[str, Any], Tensor]:
        """SAC's update with proposals."""
        return super().update_step({**batch, **self.draw_proposals(batch)}, with_actor)
