"""Discrete SAC: SAC with exact expectations over discrete actions (Christodoulou 2019, arXiv:1910.07207).

V(s) = sum_a pi(a|s) (min_i Q_i(s, a) - alpha log pi(a|s)) needs no sample. The critics regress on
y = r + g V'(s') with target critics, the actor maximizes V with the critics held fixed, and alpha holds the entropy at
`target_entropy_ratio` times the largest possible one, log |A|. Sums are over actions and means over the batch; CleanRL
takes means over both for actor and temperature, which divides these losses by |A|.

Several choices (MultiDiscrete) are independent given s, and the value of an action is the sum of one value per choice,
so expectations stay exact; what two choices are worth together beyond that sum is not represented.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import ActOutput, Algorithm, Batch, Carry, Number, Setting, UpdateResult, check_bound
from rl_training.algorithms.sac import actor_loss, temperature_loss
from rl_training.ops.losses import bellman_target, critic_losses, transition_columns
from rl_training.ops.policy import categorical_entropy
from rl_training.speed.optimizer import TargetNetwork


def least_expected(q_values: Tensor, probs: Tensor, choices: Tensor) -> Tensor:
    """sum_a pi(a) min_i Q_i(a): values [E, B, S] and probabilities [B, S] of S options -> [B].

    `choices` [S, K] is 1 where an option belongs to a choice. Critics may divide a state's value differently among
    the choices, so before the minimum each critic's share of every choice is made equal. One choice stays as it is.
    """
    expected = (probs * q_values) @ choices  # [E, B, K]
    even = q_values + (expected.mean(-1, keepdim=True) - expected) @ choices.T
    return (probs * even.amin(0)).sum(-1)


class DiscreteSAC(Algorithm):
    """The discrete SAC learner. `model` has `action_sizes`, `actor.distribution(obs, masks)`, `critics`, and
    `values(critics, obs)` [E, B, S].

    `alpha` is a number, or "auto": tuned from `initial_alpha`. With masks the target entropy counts only the legal
    actions of each state: no policy can reach log |A| where few are legal, and alpha would grow without bound.
    Every `target_update_interval` updates the target moves by `tau`; 1 copies the critics.
    """

    steps = ("critic_step", "actor_step")
    graphs = ("update_step",)
    gamma = Number("in [0, 1]", 0.99)
    tau = Number("in (0, 1]", 0.005)
    target_entropy_ratio = Number("in [0, 1]", 0.5)
    learning_rate = Number(">= 0", 3e-4)
    critic_learning_rate = Number(">= 0", None)  # None: the learning rate
    actor_learning_rate = Number(">= 0", None)
    target_update_interval = Setting(">= 1", 1)
    initial_alpha = Setting("> 0", 1.0)

    def __init__(self, *, model: Any, alpha: float | str = "auto", **settings: Any) -> None:
        super().__init__(**settings)
        self.model: Any = model
        self.critic_optimizer = self.make_optimizer("critic_optimizer", model.critics.parameters())
        self.actor_optimizer = self.make_optimizer("actor_optimizer", model.actor.parameters())
        sizes = torch.tensor(model.action_sizes, device=self.device)
        self.offsets = nn.Buffer(sizes.cumsum(0) - sizes, persistent=False)
        ones = [torch.ones(size, 1, device=self.device) for size in model.action_sizes]
        self.choices = nn.Buffer(torch.block_diag(*ones), persistent=False)
        start = torch.tensor(math.log(self.initial_alpha), device=self.device)
        self.log_alpha = nn.Parameter(start) if alpha == "auto" else None
        if self.log_alpha is not None:
            self.alpha_optimizer = self.make_optimizer("alpha_optimizer", [self.log_alpha])
        else:
            check_bound("alpha", ">= 0", alpha)
            self.numbers["alpha"] = float(alpha)
        self._target = TargetNetwork(model.critics)
        self.target_critics = self._target.network

    @property
    def alpha(self) -> Tensor | float:
        """The temperature, fixed or tuned."""
        return self.numbers["alpha"] if self.log_alpha is None else self.log_alpha.detach().exp()

    def acting(self) -> nn.Module:
        """The actor."""
        actor: nn.Module = self.model.actor
        return actor

    @torch.no_grad()
    def act(
        self, obs: Tensor, carry: Carry = None, *, deterministic: bool = False, action_masks: Tensor | None = None,
        **_: Any,
    ) -> ActOutput:  # fmt: skip
        """A sample of the policy, or its most likely action."""
        policy = self.model.actor.distribution(obs, action_masks)
        return ActOutput(policy.mode() if deterministic else policy.sample(self.generator))

    def target_entropy(self, masks: Tensor | None) -> Tensor:
        """The entropy that alpha aims at, a mean over the batch: ratio times the log of the number of legal actions."""
        legal = self.choices.sum(0) if masks is None else masks.to(self.choices.dtype) @ self.choices
        target: Tensor = self.target_entropy_ratio * legal.clamp(min=1.0).log().sum(-1).mean()
        return target

    def critic_step(self, batch: Batch) -> tuple[dict[str, Any], Tensor]:
        """Take one gradient step on the soft Bellman error; return metrics and priorities [B]."""
        model, alpha = self.model, self.alpha
        with torch.no_grad():
            log_probs = model.actor.distribution(batch["next_obs"], batch.get("next_action_masks")).log_probs
            next_q = model.values(self.target_critics, batch["next_obs"])
            next_values = least_expected(next_q, log_probs.exp(), self.choices) + alpha * categorical_entropy(log_probs)
            targets = bellman_target(batch, self.gamma, next_values)
        taken = batch["actions"].view(len(targets), -1).long() + self.offsets
        values = model.values(model.critics, batch["obs"])
        q_values = values.gather(-1, taken.expand(len(values), *taken.shape)).sum(-1)
        losses = critic_losses(q_values, targets, batch.get("weights"))
        self.critic_optimizer.step(losses["critic_loss"])
        return {**losses, "alpha": alpha}, (targets - q_values.detach()).abs_().mean(0)

    def actor_step(self, obs: Tensor, masks: Tensor | None) -> dict[str, Tensor]:
        """Take one gradient step of the actor along the exact gradient of -V, then one of the temperature."""
        with torch.no_grad():
            q_values = self.model.values(self.model.critics, obs)
        log_probs = self.model.actor.distribution(obs, masks).log_probs
        entropy = categorical_entropy(log_probs)
        expected = least_expected(q_values, log_probs.exp(), self.choices)
        losses = actor_loss(expected, -entropy, self.alpha)
        self.actor_optimizer.step(losses["actor_loss"])
        if self.log_alpha is not None:
            self.alpha_optimizer.step(temperature_loss(self.log_alpha, -entropy, self.target_entropy(masks)))
        return {**losses, "entropy": entropy.detach().mean()}

    def update_step(self, batch: Batch, with_target: bool) -> tuple[dict[str, Any], Tensor]:
        """Critic step, actor and temperature steps, target update on request; return metrics and priorities [B]."""
        metrics, priorities = self.critic_step(batch)
        metrics |= self.actor_step(batch["obs"], batch.get("action_masks"))
        if with_target:
            self._target.polyak_(self.tau)
        return metrics, priorities

    def learn(self, batch: Batch) -> UpdateResult:
        """Make one update of critics, actor, temperature and, if that is due, the target."""
        with_target = (self.num_updates + 1) % self.target_update_interval == 0
        metrics, priorities = self.update_step(transition_columns(batch), with_target)
        self.model.actor.observation_input.update(batch["obs"])
        return UpdateResult(metrics, priorities=priorities, watch="critic_loss")
