"""SAC: soft actor-critic with a tuned temperature (Haarnoja et al. 2018, arXiv:1812.05905).

The critics regress on y = r + g (min_i Q'_i(s', a') - alpha log pi(a'|s')), the actor minimises
alpha log pi(a|s) - min_i Q_i(s, a) with a reparametrised, and alpha holds the policy's entropy at `target_entropy`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import ActOutput, Algorithm, Batch, Carry, NumpyPolicy, UpdateResult
from rl_training.algorithms.ops.targets import bellman_target, fold_discounts
from rl_training.algorithms.optimization import Gradients, climb
from rl_training.algorithms.target import TargetNetwork


def regression_loss(td_errors: Tensor, weights: Tensor | None) -> Tensor:
    """Mean squared error over critics and batch, weighted by importance: [E, B], [B] -> []."""
    squares = td_errors.square()
    return (squares if weights is None else weights * squares).mean()


def sac_loss(batch: Batch) -> dict[str, Tensor]:
    """From q1_values, q2_values, target_q_values, sampled_logprobs, sampled_q1, sampled_q2, all [B], and alpha.

    Of more critics: q_values and sampled_q_values [E, B]. `weights` [B] is optional.
    """
    targets, entropy_term = batch["target_q_values"].detach(), (batch["alpha"] * batch["sampled_logprobs"]).mean()
    critic_loss = regression_loss(targets - twins(batch, "q_values", "q{}_values"), batch.get("weights"))
    actor_loss = entropy_term - twins(batch, "sampled_q_values", "sampled_q{}").amin(0).mean()
    return {
        "critic_loss": critic_loss, "actor_loss": actor_loss, "target_q_mean": targets.mean(),
        "entropy_term": entropy_term,
    }  # fmt: skip


def twins(batch: Batch, stacked: str, single: str) -> Tensor:
    """An ensemble's values [E, B] from their stacked name, or from the names of two."""
    return batch[stacked] if stacked in batch else torch.stack([batch[single.format(1)], batch[single.format(2)]])


class SAC(Algorithm):
    """The learner; `model` has `actor` (`sample(obs, noise)`), `critics(features, actions)` [E, B] and `features(obs)`.

    `alpha` is a number, or "auto": tuned from 1 so that the entropy stays at `target_entropy` (-|A| unless given).
    """

    actor_update_interval = 1

    def __init__(
        self, *, model: Any, learning_rate: float = 3e-4, gamma: float = 0.99, alpha: float | str = "auto",
        tau: float = 0.005, target_entropy: float | None = None, max_grad_norm: float | None = None,
        optimizer: str = "adam", optimizer_eps: float = 1e-8,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model: Any = model
        self.gamma, self.tau = gamma, tau
        self.target_entropy = -float(model.action_dim) if target_entropy is None else target_entropy
        options: dict[str, Any] = {"kind": optimizer, "eps": optimizer_eps, "max_grad_norm": max_grad_norm}
        critics, actor = model.critics.parameters(), model.actor.parameters()
        self.critic_optimizer = self.make_optimizer("critic_optimizer", critics, learning_rate, **options)
        self.actor_optimizer = self.make_optimizer("actor_optimizer", actor, learning_rate, **options)
        self.log_alpha = nn.Parameter(torch.zeros((), device=self.device)) if alpha == "auto" else None
        if self.log_alpha is not None:
            self.alpha_optimizer = self.make_optimizer("alpha_optimizer", [self.log_alpha], learning_rate, **options)
        self.fixed_alpha = 1.0 if alpha == "auto" else float(alpha)
        self._target = TargetNetwork(model.critics)
        self.target_critics = self._target.network
        self.last_actor: Tensor  # actor_loss and entropy_term of the last actor step
        self.register_buffer("last_actor", torch.zeros(2, device=self.device))

    @property
    def alpha(self) -> Tensor | float:
        """The temperature, fixed or tuned."""
        return self.fixed_alpha if self.log_alpha is None else self.log_alpha.detach().exp()

    @alpha.setter
    def alpha(self, value: float) -> None:
        self.fixed_alpha = value

    def acting(self) -> nn.Module:
        """The actor."""
        return self.model.actor

    @torch.no_grad()
    def act(self, obs: Tensor, carry: Carry = None, *, deterministic: bool = False, **_: Any) -> ActOutput:
        """A sample of the policy, or tanh(mean)."""
        if deterministic:
            return ActOutput(self.model.actor(obs))
        sampled = self.model.actor.sample(obs, self.draw_noise(obs))
        return ActOutput(sampled.actions, {"logprobs": sampled.logprobs})

    def numpy_policy(self) -> NumpyPolicy | None:
        """The same in numpy."""
        make = getattr(self.model.actor, "numpy_policy", None)
        return None if make is None else make()

    def draw_noise(self, obs: Tensor) -> Tensor:
        """Standard normal noise [B, A] for actions at these observations."""
        return torch.randn(len(obs), self.model.action_dim, generator=self.generator, device=obs.device)

    def draw_subset(self) -> Tensor | None:
        """Indices of the critics whose minimum is the target; None for all."""
        return None

    def actor_weights(self, q_values: Tensor) -> Tensor:
        """Weights [E, B] of the critics in what the actor climbs: here all on the smallest of each column."""
        return torch.zeros_like(q_values).scatter_(0, q_values.argmin(0, keepdim=True), 1.0)

    @torch.no_grad()
    def critic_step(
        self, batch: Batch, discounts: Tensor, noise: Tensor, alpha: Tensor | float, subset: Tensor | None
    ) -> tuple[dict[str, Any], Tensor]:
        """One gradient step on the soft Bellman error (eq. 5 and 6); its metrics, and priorities [B]."""
        critics, weights = self.model.critics, batch.get("weights")
        next_actions, next_logprobs = self.model.actor.sample(batch["next_obs"], noise)
        next_q = self.target_critics(self.model.features(batch["next_obs"]), next_actions, subset).amin(0)
        targets = bellman_target(batch["rewards"], discounts, next_q - alpha * next_logprobs)
        q_values, gradients = self.critic_optimizer.evaluate(
            critics, getattr(critics, "with_gradients", None), self.model.features(batch["obs"]), batch["actions"]
        )
        td_errors = targets - q_values
        loss = regression_loss(td_errors, weights)
        on_q_values = td_errors * (-2.0 / td_errors.numel() * (1.0 if weights is None else weights))
        self.critic_optimizer.apply_gradients(gradients(on_q_values))
        return {"critic_loss": loss, "target_q_mean": targets.mean()}, td_errors.abs_().mean(0)

    @torch.no_grad()
    def actor_step(self, obs: Tensor, noise: Tensor, alpha: Tensor | float) -> None:
        """One gradient step of the actor (eq. 9), then one of log alpha (eq. 18) with its gradient written out."""
        critics, count = self.model.critics, len(obs)
        (actions, logprobs), gradients = self.sample_with_gradients(obs, noise)
        quick = getattr(critics, "with_action_gradients", None)
        q_values, into_actions = climb(critics, quick, self.model.features(obs), actions)
        weights = self.actor_weights(q_values)
        mean_logprob = logprobs.mean()
        entropy_term = alpha * mean_logprob
        loss = entropy_term - (weights * q_values).sum() / count
        on_logprobs = torch.full_like(logprobs, 1.0 / count) * alpha
        self.actor_optimizer.apply_gradients(gradients(into_actions(weights / -count), on_logprobs))
        torch.stack([loss, entropy_term], out=self.last_actor)
        if self.log_alpha is not None:
            self.alpha_optimizer.apply_gradients([-(mean_logprob + self.target_entropy)])

    def sample_with_gradients(self, obs: Tensor, noise: Tensor) -> tuple[Any, Callable[[Tensor, Tensor], Gradients]]:
        """Actions and log-probabilities without a graph, and a function from gradients there to those of the actor."""
        quick = getattr(self.model.actor, "sample_with_gradients", None)
        found = None if quick is None else quick(obs, noise)
        if found is not None:
            return found
        with torch.enable_grad():
            sampled = self.model.actor.sample(obs, noise)
        return [part.detach() for part in sampled], lambda *on: self.actor_optimizer.differentiate(sampled, on)

    def learn(self, batch: Batch, *, step: int) -> UpdateResult:
        """A critic step; every `actor_update_interval` of them an actor and temperature step; the targets' move."""
        obs, discounts, alpha = batch["obs"], fold_discounts(batch, self.gamma), self.alpha
        metrics, priorities = self.critic_step(batch, discounts, self.draw_noise(obs), alpha, self.draw_subset())
        if (self.num_updates + 1) % self.actor_update_interval == 0:
            self.actor_step(obs, self.draw_noise(obs), alpha)
        self._target.polyak_(self.tau)
        self.model.actor.observation_input.update(obs)
        actor_loss, entropy_term = self.last_actor.clone().unbind()
        metrics |= {"actor_loss": actor_loss, "entropy_term": entropy_term, "alpha": alpha}
        return UpdateResult(metrics, priorities=priorities)
