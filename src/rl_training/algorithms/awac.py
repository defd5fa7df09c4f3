"""AWAC: advantage-weighted actor-critic (Nair et al. 2020, arXiv:2006.09359), and the actor that IQL shares.

The critics regress on y = r + g min_i Q'_i(s', a'), a' ~ pi(.|s'). The actor imitates recorded actions, each with the
weight exp(A / lambda), at most 100: A = min_i Q_i(s, a) - min_i Q_i(s, a~), where a~ ~ pi(.|s) is one sample. Only
log pi(a|s) has a gradient. As in later implementations, weights are not divided by their sum over the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import ActOutput, Algorithm, Batch, Carry, Number, UpdateResult
from rl_training.algorithms.critic_heads import least
from rl_training.ops.losses import bellman_target, critic_losses, transition_columns
from rl_training.speed.optimizer import TargetNetwork


def advantage_weights(advantages: Tensor, sharpness: Any, most: Any = 100.0) -> Tensor:
    """min(exp(sharpness * A), most), without a gradient; the sharpness is beta of IQL and 1 / lambda of AWAC."""
    weights: Tensor = (sharpness * advantages.detach()).exp().clamp(max=most)
    return weights


class AdvantageWeighted(Algorithm):
    """A learner whose actor imitates recorded actions, weighted by their advantages: AWAC and IQL.

    `model` has `features(obs)`, `critics(features, actions)` [E, B], and an `actor` with `log_prob(obs, actions)` and
    `draw(obs, noise)`. A subclass writes `update_step`.
    """

    steps: tuple[str, ...] = ("update_step",)
    gamma = Number("in [0, 1]", 0.99)
    tau = Number("in (0, 1]", 0.005)
    learning_rate = Number(">= 0", 3e-4)
    critic_learning_rate = Number(">= 0", None)  # None: the learning rate
    actor_learning_rate = Number(">= 0", None)
    max_weight = Number("> 0", 100.0)

    def __init__(self, *, model: Any, **settings: Any) -> None:
        super().__init__(**settings)
        self.model: Any = model
        self.critic_optimizer = self.make_optimizer("critic_optimizer", model.critics.parameters())
        self.actor_optimizer = self.make_optimizer("actor_optimizer", model.actor.parameters())
        self._target = TargetNetwork(model.critics)
        self.target_critics = self._target.network

    def acting(self) -> nn.Module:
        """The actor."""
        actor: nn.Module = self.model.actor
        return actor

    @torch.no_grad()
    def act(self, obs: Tensor, carry: Carry = None, *, deterministic: bool = False, **_: Any) -> ActOutput:
        """A sample of the policy, or its mean."""
        return ActOutput(self.model.actor(obs) if deterministic else self.model.actor.draw(obs, self.draw_noise(obs)))

    def draw_noise(self, obs: Tensor) -> Tensor:
        """Standard normal noise [B, A] for actions at these observations."""
        return torch.randn(len(obs), self.model.action_dim, generator=self.generator, device=obs.device)

    def imitate(self, batch: Batch, weights: Tensor) -> dict[str, Tensor]:
        """Take one step of the actor on -weight log pi(a|s) of recorded actions."""
        loss = -(weights * self.model.actor.log_prob(batch["obs"], batch["actions"])).mean()
        self.actor_optimizer.step(loss)
        return {"actor_loss": loss, "weight_mean": weights.mean()}

    def fit_critics(self, batch: Batch, next_values: Tensor) -> dict[str, Tensor]:
        """Take one step of the critics toward r + g V(s'), from next values [B]."""
        targets = bellman_target(batch, self.gamma, next_values)
        losses = critic_losses(self.model.ensemble_values(batch["obs"], batch["actions"]), targets)
        self.critic_optimizer.step(losses["critic_loss"])
        return losses

    def update_step(self, batch: Batch, *noise: Tensor) -> dict[str, Tensor]:
        """One step of every network; return metrics."""
        raise NotImplementedError

    def draw_all(self, obs: Tensor) -> tuple[Tensor, ...]:
        """The noise that `update_step` takes."""
        return ()

    def learn(self, batch: Batch) -> UpdateResult:
        """Make one update."""
        metrics = self.update_step(transition_columns(batch), *self.draw_all(batch["obs"]))
        self.model.actor.observation_input.update(batch["obs"])
        return UpdateResult(metrics, watch="critic_loss")


class AWAC(AdvantageWeighted):
    """The AWAC learner. `temperature` is lambda."""

    temperature = Number("> 0", 0.3333)

    def draw_all(self, obs: Tensor) -> tuple[Tensor, ...]:
        """Noise of actions at s' and at s."""
        return self.draw_noise(obs), self.draw_noise(obs)

    def update_step(self, batch: Batch, *noise: Tensor) -> dict[str, Tensor]:
        """Critics, then the actor with the new critics, then targets."""
        model, obs, next_obs = self.model, batch["obs"], batch["next_obs"]
        at_next, here = noise
        with torch.no_grad():
            next_actions = model.actor.draw(next_obs, at_next)
            next_values = least(self.target_critics(model.features(next_obs), next_actions))
        metrics = self.fit_critics(batch, next_values)
        with torch.no_grad():
            values = least(model.ensemble_values(obs, model.actor.draw(obs, here)))
            advantages = least(model.ensemble_values(obs, batch["actions"])) - values
        metrics |= self.imitate(batch, advantage_weights(advantages, 1.0 / self.temperature, self.max_weight))
        self._target.polyak_(self.tau)
        return {**metrics, "advantage_mean": advantages.mean()}
