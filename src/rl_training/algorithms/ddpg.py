"""DDPG: deep deterministic policy gradient (Lillicrap et al. 2016, arXiv:1509.02971).

The critic regresses on y = r + g Q'(s', mu'(s')); the actor follows the deterministic policy gradient
grad_a Q(s, a) grad_theta mu(s) at a = mu(s) (Silver et al. 2014); both targets trail by `tau` per update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import ActOutput, Algorithm, Batch, Carry, NumpyPolicy, UpdateResult
from rl_training.algorithms.ops.targets import bellman_target, fold_discounts
from rl_training.algorithms.target import TargetNetwork


def dpg_loss(actions: Tensor, action_gradients: Tensor, clip: float | None = None) -> Tensor:
    """Per sample [B]: half the squared way from mu(s) [B, A] along dQ/da, whose gradient is minus dQ/da.

    `clip` bounds the norm of each sample's dQ/da, as in D4PG's public code.
    """
    if clip is not None:
        norms = torch.linalg.vector_norm(action_gradients, dim=-1, keepdim=True)
        action_gradients = action_gradients * (clip / norms).clamp(max=1.0)
    return 0.5 * ((actions + action_gradients).detach() - actions).square().sum(-1)


def regression_loss(td_errors: Tensor, weights: Tensor | None) -> Tensor:
    """Mean squared error per critic, weighted by importance, summed over critics: [E, B], [B] -> []."""
    squares = td_errors.square()
    return (squares if weights is None else weights * squares).mean(-1).sum()


def ddpg_loss(batch: Batch) -> dict[str, Tensor]:
    """From q_values ([B] or [E, B]), target_q_values [B] and actor_q_values [B], those of mu(s); `weights` optional."""
    targets = batch["target_q_values"].detach()
    loss = regression_loss(torch.atleast_2d(targets - batch["q_values"]), batch.get("weights"))
    return {"critic_loss": loss, "actor_loss": -batch["actor_q_values"].mean(), "target_q_mean": targets.mean()}


class DDPG(Algorithm):
    """The learner; `model` has `actor(obs)`, `critics`, `ensemble_values(obs, actions)` [E, B] and `q_values` [B]."""

    policy_delay = 1

    def __init__(
        self, *, model: Any, learning_rate: float = 1e-3, gamma: float = 0.99, tau: float = 0.005,
        exploration_noise: float = 0.1, action_gradient_clip: float | None = None, max_grad_norm: float | None = None,
        optimizer: str = "adam", optimizer_eps: float = 1e-8,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model: Any = model
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

    @torch.no_grad()
    def act(self, obs: Tensor, carry: Carry = None, *, deterministic: bool = False, **_: Any) -> ActOutput:
        """mu(s), with Gaussian noise unless deterministic."""
        actions = self.model.actor(obs)
        if not deterministic:
            noise = torch.randn(actions.shape, generator=self.generator, device=actions.device)
            actions = (actions + self.exploration_noise * noise).clamp_(-1.0, 1.0)
        return ActOutput(actions)

    def numpy_policy(self) -> NumpyPolicy | None:
        """The same in numpy."""
        make = getattr(self.model.actor, "numpy_policy", None)
        return None if make is None else make(lambda: self.exploration_noise)

    def draw_noise(self, actions: Tensor) -> Tensor | None:
        """What `target_values` needs drawn; DDPG nothing."""
        return None

    def target_values(self, next_obs: Tensor, noise: Tensor | None) -> Tensor:
        """Q'(s', mu'(s')) [B]."""
        return self.target_network.q_values(next_obs, self.target_network.actor(next_obs))

    def critic_step(self, batch: Batch, discounts: Tensor, noise: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
        """One gradient step on the Bellman error; its metrics, and priorities [B]."""
        with torch.no_grad():
            targets = bellman_target(batch["rewards"], discounts, self.target_values(batch["next_obs"], noise))
        td_errors = targets - self.model.ensemble_values(batch["obs"], batch["actions"])
        loss = regression_loss(td_errors, batch.get("weights"))
        self.critic_optimizer.step(loss)
        return {"critic_loss": loss.detach(), "target_q_mean": targets.mean()}, td_errors.detach().abs().mean(0)

    def actor_step(self, obs: Tensor) -> Tensor:
        """One step along the deterministic policy gradient; returns -mean Q(s, mu(s))."""
        actions = self.model.actor(obs)
        values = self.model.q_values(obs, actions)
        loss = objective = -values.mean()
        if self.action_gradient_clip is not None:
            (action_gradients,) = torch.autograd.grad(values.sum(), actions)
            objective = dpg_loss(actions, action_gradients, self.action_gradient_clip).mean()
        self.actor_optimizer.step(objective)  # differentiates by the actor's parameters alone
        return loss.detach()

    def learn(self, batch: Batch, *, step: int) -> UpdateResult:
        """A critic step; every `policy_delay` of them an actor step and the targets' move."""
        discounts = fold_discounts(batch, self.gamma)
        metrics, priorities = self.critic_step(batch, discounts, self.draw_noise(batch["actions"]))
        if (self.num_updates + 1) % self.policy_delay == 0:
            self.last_actor_loss.copy_(self.actor_step(batch["obs"]))
            self._target.polyak_(self.tau)
        self.model.actor.observation_input.update(batch["obs"])
        return UpdateResult({**metrics, "actor_loss": self.last_actor_loss.clone()}, priorities=priorities)
