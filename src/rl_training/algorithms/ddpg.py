"""DDPG: deep deterministic policy gradient (Lillicrap et al. 2016, arXiv:1509.02971).

The critic regresses on y = r + g Q'(s', mu'(s')); the actor follows the deterministic policy gradient
grad_a Q(s, a) grad_theta mu(s) at a = mu(s) (Silver et al. 2014); both targets trail by `tau` per update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import Batch, UpdateResult
from rl_training.algorithms.exploration import GaussianExploration
from rl_training.algorithms.ops.targets import bellman_target, fold_discounts
from rl_training.algorithms.optimization import climb
from rl_training.algorithms.target import TargetNetwork


def dpg_loss(actions: Tensor, action_gradients: Tensor, clip: float | None = None) -> Tensor:
    """Per sample [B]: half the squared way from mu(s) [B, A] along dQ/da, whose gradient is minus dQ/da.

    `clip` bounds the norm of each sample's dQ/da, as in D4PG's public code.
    """
    if clip is not None:
        action_gradients = clip_rows(action_gradients, clip)
    return 0.5 * ((actions + action_gradients).detach() - actions).square().sum(-1)


def clip_rows(gradients: Tensor, clip: float) -> Tensor:
    """Rows [B, A] shortened to the length `clip` where they are longer."""
    return gradients * (clip / torch.linalg.vector_norm(gradients, dim=-1, keepdim=True)).clamp(max=1.0)


def regression_loss(td_errors: Tensor, weights: Tensor | None) -> Tensor:
    """Mean squared error per critic, weighted by importance, summed over critics: [E, B], [B] -> []."""
    squares = td_errors.square()
    return (squares if weights is None else weights * squares).mean(-1).sum()


def ddpg_loss(batch: Batch) -> dict[str, Tensor]:
    """From q_values ([B] or [E, B]), target_q_values [B] and actor_q_values [B], those of mu(s); `weights` optional."""
    targets = batch["target_q_values"].detach()
    loss = regression_loss(torch.atleast_2d(targets - batch["q_values"]), batch.get("weights"))
    return {"critic_loss": loss, "actor_loss": -batch["actor_q_values"].mean(), "target_q_mean": targets.mean()}


class DDPG(GaussianExploration):
    """The learner; `model` has `actor(obs)`, `critics`, `ensemble_values(obs, actions)` [E, B] and `q_values` [B]."""

    policy_delay = 1

    def __init__(
        self, *, model: Any, learning_rate: float = 1e-3, gamma: float = 0.99, tau: float = 0.005,
        exploration_noise: float = 0.1, action_gradient_clip: float | None = None, max_grad_norm: float | None = None,
        optimizer: str = "adam", optimizer_eps: float = 1e-8,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model = model
        self.gamma, self.tau = gamma, tau
        self.exploration_noise, self.action_gradient_clip = exploration_noise, action_gradient_clip
        options: dict[str, Any] = {"kind": optimizer, "eps": optimizer_eps, "max_grad_norm": max_grad_norm}
        critics, actor = model.critics.parameters(), model.actor.parameters()
        self.critic_optimizer = self.make_optimizer("critic_optimizer", critics, learning_rate, **options)
        self.actor_optimizer = self.make_optimizer("actor_optimizer", actor, learning_rate, **options)
        self._target = TargetNetwork(model)
        self.target_network: Any = self._target.network
        self.last_actor_loss: Tensor
        self.register_buffer("last_actor_loss", torch.zeros((), device=self.device))

    def acting(self) -> nn.Module:
        """The actor without noise."""
        return self.model.actor

    def draw_noise(self, actions: Tensor) -> Tensor | None:
        """What `target_values` needs drawn; DDPG nothing."""
        return None

    def target_values(self, next_obs: Tensor, noise: Tensor | None) -> Tensor:
        """Q'(s', mu'(s')) [B]."""
        return self.target_network.q_values(next_obs, self.target_network.actor(next_obs))

    @torch.no_grad()
    def critic_step(self, batch: Batch, discounts: Tensor, noise: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
        """One gradient step on the Bellman error; its metrics, and priorities [B]."""
        model, weights = self.model, batch.get("weights")
        targets = bellman_target(batch["rewards"], discounts, self.target_values(batch["next_obs"], noise))
        q_values, gradients = self.critic_optimizer.evaluate(
            model.ensemble_values, getattr(model, "ensemble_with_gradients", None), batch["obs"], batch["actions"]
        )
        td_errors = targets - q_values
        loss = regression_loss(td_errors, weights)
        on_q_values = td_errors * (-2.0 / len(targets) * (1.0 if weights is None else weights))
        self.critic_optimizer.apply_gradients(gradients(on_q_values))
        return {"critic_loss": loss, "target_q_mean": targets.mean()}, td_errors.abs_().mean(0)

    @torch.no_grad()
    def actor_step(self, obs: Tensor) -> Tensor:
        """One step along the deterministic policy gradient; returns -mean Q(s, mu(s))."""
        model = self.model
        actions, gradients = self.actor_optimizer.evaluate(
            model.actor, getattr(model.actor, "with_gradients", None), obs
        )
        values, into_actions = climb(model.q_values, getattr(model, "q_with_action_gradients", None), obs, actions)
        action_gradients = into_actions(torch.ones_like(values))  # each row's own dQ/da
        if self.action_gradient_clip is not None:
            action_gradients = clip_rows(action_gradients, self.action_gradient_clip)
        self.actor_optimizer.apply_gradients(gradients(action_gradients / -len(obs)))
        return -values.mean()

    def learn(self, batch: Batch, *, step: int) -> UpdateResult:
        """A critic step; every `policy_delay` of them an actor step and the targets' move."""
        discounts = fold_discounts(batch, self.gamma)
        metrics, priorities = self.critic_step(batch, discounts, self.draw_noise(batch["actions"]))
        if (self.num_updates + 1) % self.policy_delay == 0:
            self.last_actor_loss.copy_(self.actor_step(batch["obs"]))
            self._target.polyak_(self.tau)
        self.model.actor.observation_input.update(batch["obs"])
        return UpdateResult({**metrics, "actor_loss": self.last_actor_loss.clone()}, priorities=priorities)
