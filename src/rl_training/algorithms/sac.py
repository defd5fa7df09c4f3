"""SAC: soft actor-critic with a tuned temperature (Haarnoja et al. 2018, arXiv:1812.05905).

The critics regress on y = r + g (min_i Q'_i(s', a') - alpha log pi(a'|s')), the actor minimizes
alpha log pi(a|s) - min_i Q_i(s, a) with a reparametrized, and alpha holds the policy's entropy at `target_entropy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import ActOutput, Algorithm, Batch, Carry, Number, Setting, UpdateResult, check_bound
from rl_training.ops.losses import bellman_target, critic_losses, transition_columns
from rl_training.speed.optimizer import TargetNetwork


def actor_loss(q_values: Tensor, logprobs: Tensor, alpha: Tensor | float) -> dict[str, Tensor]:
    """Eq. 9, from the values [B] that the actor maximizes and log-probabilities [B] of its actions."""
    entropy_term = (alpha * logprobs).mean()
    return {"actor_loss": entropy_term - q_values.mean(), "entropy_term": entropy_term}


def temperature_loss(log_alpha: Tensor, logprobs: Tensor, target_entropy: float | Tensor) -> Tensor:
    """Eq. 18, in log alpha."""
    return -log_alpha * (logprobs.detach().mean() + target_entropy)


def least(q_values: Tensor) -> Tensor:
    """min_i Q_i: [E, B] -> [B]."""
    return q_values.amin(0)


def sac_loss(batch: Batch, climbed: Callable[[Tensor], Tensor] = least) -> dict[str, Tensor]:
    """From q1_values, q2_values, target_q_values, sampled_logprobs, sampled_q1, sampled_q2, all [B], and alpha.

    For more critics: q_values and sampled_q_values [E, B]. `weights` [B] is optional.
    """
    losses = critic_losses(twins(batch, "q_values", "q{}_values"), batch["target_q_values"], batch.get("weights"))
    sampled = climbed(twins(batch, "sampled_q_values", "sampled_q{}"))
    return losses | actor_loss(sampled, batch["sampled_logprobs"], batch["alpha"])


def twins(batch: Batch, stacked: str, single: str) -> Tensor:
    """An ensemble's values [E, B] from one stacked entry, or from those of two critics."""
    return batch[stacked] if stacked in batch else torch.stack([batch[single.format(1)], batch[single.format(2)]])


class SAC(Algorithm):
    """The SAC learner. `model` has `critics(features, actions)` [E, B], `features(obs)`, and an `actor` with
    `sample(obs, noise)` and `draw(obs, noise)`, which returns only actions.

    `alpha` is a number, or "auto": tuned from `initial_alpha` so that the entropy stays at `target_entropy` (-|A|
    unless given). Without `backup_entropy` the critics' targets leave the entropy out.
    """

    actor_update_interval: Any = 1
    steps: tuple[str, ...] = ("critic_step", "actor_step")
    graphs: tuple[str, ...] = ("update_step",)
    gamma = Number("in [0, 1]", 0.99)
    tau = Number("in (0, 1]", 0.005)
    target_entropy = Number("any", None)
    learning_rate = Number(">= 0", 3e-4)
    critic_learning_rate = Number(">= 0", None)  # None: the learning rate
    actor_learning_rate = Number(">= 0", None)
    initial_alpha = Setting("> 0", 1.0)
    backup_entropy = Setting(default=True)

    def __init__(self, *, model: Any, alpha: float | str = "auto", **settings: Any) -> None:
        super().__init__(**settings)
        self.model: Any = model
        if self.target_entropy is None:
            self.target_entropy = -float(model.action_dim)
        self.critic_optimizer = self.make_optimizer("critic_optimizer", model.critics.parameters())
        self.actor_optimizer = self.make_optimizer("actor_optimizer", model.actor.parameters())
        start = torch.tensor(math.log(self.initial_alpha), device=self.device)
        self.log_alpha = nn.Parameter(start) if alpha == "auto" else None
        if self.log_alpha is not None:
            self.alpha_optimizer = self.make_optimizer("alpha_optimizer", [self.log_alpha])
        else:
            check_bound("alpha", ">= 0", alpha)
            self.numbers["alpha"] = float(alpha)
        self._target = TargetNetwork(model.critics)
        self.target_critics = self._target.network
        self.last_actor: Tensor  # actor_loss and entropy_term of the last actor step
        self.register_buffer("last_actor", torch.zeros(2, device=self.device))

    @property
    def alpha(self) -> Tensor | float:
        """The temperature, fixed or tuned."""
        return self.numbers["alpha"] if self.log_alpha is None else self.log_alpha.detach().exp()

    def acting(self) -> nn.Module:
        """The actor."""
        actor: nn.Module = self.model.actor
        return actor

    @torch.no_grad()
    def act(self, obs: Tensor, carry: Carry = None, *, deterministic: bool = False, **_: Any) -> ActOutput:
        """A sample of the policy, or tanh(mean)."""
        if deterministic:
            return ActOutput(self.model.actor(obs))
        return ActOutput(self.model.actor.draw(obs, self.draw_noise(obs)))

    def draw_noise(self, obs: Tensor) -> Tensor:
        """Standard normal noise [B, A] for actions at these observations."""
        return torch.randn(len(obs), self.model.action_dim, generator=self.generator, device=obs.device)

    def draw_subset(self) -> Tensor | None:
        """Indices of the critics whose minimum is the target; None for all."""
        return None

    def climbed(self, q_values: Tensor) -> Tensor:
        """The values [B] that the actor maximizes, from critics [E, B]: here their minimum."""
        return least(q_values)

    def critic_step(self, batch: Batch, noise: Tensor, subset: Tensor | None) -> tuple[dict[str, Any], Tensor]:
        """Take one gradient step on the soft Bellman error (eq. 5 and 6); return metrics and priorities [B]."""
        model, alpha = self.model, self.alpha
        with torch.no_grad():
            next_actions, next_logprobs = model.actor.sample(batch["next_obs"], noise)
            next_q = self.target_critics(model.features(batch["next_obs"]), next_actions, subset).amin(0)
            if self.backup_entropy:
                next_q = next_q - alpha * next_logprobs
            targets = bellman_target(batch, self.gamma, next_q)
        q_values = model.critics(model.features(batch["obs"]), batch["actions"])
        losses = critic_losses(q_values, targets, batch.get("weights"))
        self.critic_optimizer.step(losses["critic_loss"])
        return {**losses, "alpha": alpha}, (targets - q_values.detach()).abs_().mean(0)

    def actor_step(self, obs: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """Take one gradient step of the actor (eq. 9), then one of the temperature (eq. 18)."""
        actions, logprobs = self.model.actor.sample(obs, noise)
        q_values = self.model.critics(self.model.features(obs), actions)
        losses = actor_loss(self.climbed(q_values), logprobs, self.alpha)
        self.actor_optimizer.step(losses["actor_loss"])
        if self.log_alpha is not None:
            self.alpha_optimizer.step(temperature_loss(self.log_alpha, logprobs, self.target_entropy))
        return losses

    def update_step(self, batch: Batch, with_actor: bool) -> tuple[dict[str, Any], Tensor]:
        """Critic step, actor and temperature steps on request, target update; return metrics and priorities [B]."""
        obs = batch["obs"]
        metrics, priorities = self.critic_step(batch, self.draw_noise(obs), self.draw_subset())
        if with_actor:
            losses = self.actor_step(obs, self.draw_noise(obs))
            torch.stack([losses["actor_loss"].detach(), losses["entropy_term"].detach()], out=self.last_actor)
        self._target.polyak_(self.tau)
        last = dict(zip(("actor_loss", "entropy_term"), self.last_actor.clone().unbind(), strict=True))
        return {**metrics, **last}, priorities

    def learn(self, batch: Batch) -> UpdateResult:
        """Make one update; every `actor_update_interval` updates it includes the actor."""
        with_actor = (self.num_updates + 1) % self.actor_update_interval == 0
        metrics, priorities = self.update_step(transition_columns(batch), with_actor)
        self.model.actor.observation_input.update(batch["obs"])
        return UpdateResult(metrics, priorities=priorities, watch="critic_loss")
