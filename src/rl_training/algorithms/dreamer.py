"""Dreamer: behavior learned in the imagination of a world model (Hafner et al. 2023, arXiv:2301.04104, DreamerV3).

The world model learns from replayed windows: reconstruction + reward + continue + KL between posterior and prior. From
every posterior state the actor then dreams `imagination_horizon` steps with the prior; the critic regresses on the
lambda-returns of those dreams and the actor follows their advantages (REINFORCE, for both kinds of action).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import ActOutput, Algorithm, Batch, Carry, Number, Setting, TargetNetwork, UpdateResult
from rl_training.ops.distributional import categorical_cross_entropy
from rl_training.ops.policy import categorical_kl
from rl_training.ops.returns import lambda_returns

METRICS = (
    "world_model_loss", "reconstruction_loss", "reward_loss", "continue_loss", "kl_loss", "actor_loss", "critic_loss",
    "entropy", "kl", "imagined_return_mean", "return_scale", "world_model_grad_norm",
)  # fmt: skip
DYNAMICS_WEIGHT, REPRESENTATION_WEIGHT = 1.0, 0.1  # of the two halves of the KL (eq. 5)
RETURN_QUANTILES = (0.05, 0.95)


def balanced_kl(posterior: Tensor, prior: Tensor, free_nats: float | Tensor) -> tuple[Tensor, Tensor]:
    """The KL loss and the KL itself, each [...], of log-probabilities [..., S, C] (eq. 5).

    The prior is pulled to the posterior with weight 1 and the posterior to the prior with 0.1; each half is free below
    `free_nats`, counted per state, on the sum over the S variables.
    """
    dynamics = categorical_kl(posterior.detach(), prior).sum(-1)
    representation = categorical_kl(posterior, prior.detach()).sum(-1)
    loss = DYNAMICS_WEIGHT * dynamics.clamp(min=free_nats) + REPRESENTATION_WEIGHT * representation.clamp(min=free_nats)
    return loss, dynamics.detach()


class ReturnScale(nn.Module):
    """The range from the 5th to the 95th percentile of returns, as a moving average; never below 1 (eq. 11)."""

    def __init__(self, decay: float = 0.99) -> None:
        super().__init__()
        self.decay = decay
        self.ends: Tensor
        self.register_buffer("ends", torch.zeros(2))

    @torch.no_grad()
    def update(self, returns: Tensor) -> Tensor:
        """Update the average with these returns; return the divisor of advantages, []."""
        ordered = returns.flatten().sort().values
        low, high = (ordered[round(share * (len(ordered) - 1))] for share in RETURN_QUANTILES)
        self.ends.lerp_(torch.stack([low, high]), 1.0 - self.decay)
        return (self.ends[1] - self.ends[0]).clamp(min=1.0)


class Dream(NamedTuple):
    """Imagined trajectories from N states over H steps: features [H + 1, N, F], raw actions [H, N, A]."""

    features: Tensor
    actions: Tensor


class Dreamer(Algorithm):
    """The Dreamer learner. `world_model`, `actor` and `critic` are in `models.dreamer`.

    The recurrent state for acting is [N, F + A]: h and z of the last state, and the action taken there. Without
    `capture`, no part of an update is captured or compiled.
    """

    steps: tuple[str, ...] = ("train_step",)
    gamma = Number("in [0, 1]", 0.997)
    gae_lambda = Number("in [0, 1]", 0.95)
    tau = Number("in (0, 1]", 0.02)
    entropy_coef = Number(">= 0", 3e-4)
    free_nats = Number(">= 0", 1.0)
    learning_rate = Number(">= 0", 3e-4)
    world_model_learning_rate = Number(">= 0", None)  # None: the learning rate
    actor_learning_rate = Number(">= 0", None)
    critic_learning_rate = Number(">= 0", None)
    max_grad_norm = Number("> 0", 100.0)
    imagination_horizon = Setting(">= 1", 15)

    def __init__(self, *, world_model: Any, actor: Any, critic: Any, capture: bool = True, **settings: Any) -> None:
        super().__init__(**settings)
        self.world_model, self.actor, self.critic = world_model, actor, critic
        if not capture:
            self.steps = ()
        self.optimizers = {
            name: self.make_optimizer(f"{name}_optimizer", part.parameters())
            for name, part in (("world_model", world_model), ("actor", actor), ("critic", critic))
        }
        self._target = TargetNetwork(critic)
        self.slow_critic: Any = self._target.network
        self.return_scale = ReturnScale()
        self.carry_dim = world_model.rssm.feature_dim + actor.action_dim

    def acting(self) -> nn.Module:
        """The parts that acting needs: encoder (with its input), RSSM, actor."""
        model = self.world_model
        return nn.ModuleList([model.observation_input, model.encoder, model.rssm, self.actor])

    def initial_carry(self, n: int) -> Carry:
        """Zeros [n, F + A]."""
        return torch.zeros(n, self.carry_dim, device=self.device)

    @torch.no_grad()
    def act(
        self, obs: Tensor, carry: Carry = None, *, is_first: Tensor | None = None, deterministic: bool = False, **_: Any
    ) -> ActOutput:
        """Update the state with the observation and act on it; deterministic uses the modes of state and action."""
        model, rows = self.world_model, obs.shape[0]
        carry = self.initial_carry(rows) if carry is None else carry
        is_first = torch.zeros(rows, dtype=torch.bool, device=obs.device) if is_first is None else is_first
        features, last_actions = carry.split([model.rssm.feature_dim, self.actor.action_dim], -1)
        state_noise, action_noise = (None, None) if deterministic else self.draw_noise(1, rows)
        embeds = model.encoder(model.prepare(obs).unsqueeze(0))
        states = model.rssm.observe(embeds, last_actions.unsqueeze(0), is_first.unsqueeze(0), state_noise, features)
        features = states.features[0]
        raw = self.actor.sample(features, None if action_noise is None else action_noise[0])
        return ActOutput(self.actor.as_action(raw), carry=torch.cat([features, self.actor.as_input(raw)], -1))

    def draw_noise(self, steps: int, rows: int) -> tuple[Tensor, Tensor]:
        """Noise for latents [steps, rows, S, 1] and for actions [steps, rows, ...]."""
        shape = (steps, rows, self.world_model.rssm.size.latents, 1)
        states = torch.rand(shape, generator=self.generator, device=self.generator.device)
        return states, self.actor.draw_noise(steps, rows, generator=self.generator)

    # learning --------------------------------------------------------------------------------------------------

    def learn(self, batch: Batch) -> UpdateResult:
        """Update world model, actor and critic from windows [B, L]: obs, actions, rewards, terminated, is_first.

        A row is an arrival: `actions[t]` led to `obs[t]`. Noise is drawn here; the rest is straight-line tensor code.
        """
        values = self.train_step(self.prepare(batch))
        self.world_model.observation_input.update(batch["obs"].flatten(0, 1))
        return UpdateResult(dict(zip(METRICS, values.unbind(), strict=True)), watch="world_model_loss")

    def prepare(self, batch: Batch) -> dict[str, Tensor]:
        """The batch with time first, [L, B, ...], actions in the world model's form, and all noise of the update."""
        length, rows = batch["rewards"].shape[1], batch["rewards"].shape[0]
        inputs = {name: batch[name].transpose(0, 1).contiguous() for name in ("obs", "rewards", "is_first")}
        inputs["terminated"] = batch["terminated"].transpose(0, 1).float()
        inputs["actions"] = self.actor.input_of(batch["actions"].transpose(0, 1))
        inputs["noise"], _ = self.draw_noise(length, rows)
        inputs["dream_noise"], inputs["action_noise"] = self.draw_noise(self.imagination_horizon, length * rows)
        return inputs

    def train_step(self, inputs: Batch) -> Tensor:
        """Make the whole update and return its metrics [len(METRICS)]."""
        model_metrics, starts = self.world_model_step(inputs)
        with torch.no_grad(), self._autocast():
            dream = self.imagine(starts, inputs["dream_noise"], inputs["action_noise"])
        behaviour_metrics = self.behavior_step(dream, 1.0 - inputs["terminated"].flatten())
        metrics = {**model_metrics, **behaviour_metrics}
        return torch.stack([metrics[name].detach().float() for name in METRICS])

    def world_model_step(self, inputs: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Take one gradient step on eq. 4; return metrics and the posterior features [L * B, F] without a gradient."""
        model = self.world_model
        obs = model.prepare(inputs["obs"])
        with self._autocast():
            states = model.rssm.observe(model.encoder(obs), inputs["actions"], inputs["is_first"], inputs["noise"])
            features = states.features
            decoded, rewards = model.decoder(features), model.reward_head(features)
            continues, prior = model.continue_head(features), model.rssm.prior(states.deter)
        kl_loss, kl = balanced_kl(states.probs.log(), prior.log(), self.free_nats)
        losses = {
            "reconstruction_loss": model.decoder.loss(decoded.float(), obs).mean(),
            "reward_loss": model.reward_head.loss(rewards, inputs["rewards"]).mean(),
            "continue_loss": model.continue_head.loss(continues, inputs["terminated"]).mean(),
            "kl_loss": kl_loss.mean(),
        }
        loss = torch.stack(list(losses.values())).sum()
        norm = self.optimizers["world_model"].step(loss)
        metrics = {"world_model_loss": loss, **losses, "kl": kl.mean(), "world_model_grad_norm": norm}
        return metrics, features.detach().flatten(0, 1)

    def imagine(self, features: Tensor, noise: Tensor, action_noise: Tensor) -> Dream:
        """Follow the actor with the prior from features [N, F]; noise [H, N, S, 1] and [H, N, ...]."""
        visited, taken = [features], []
        for t in range(len(noise)):
            taken.append(self.actor.sample(visited[t], action_noise[t]))
            visited.append(self.world_model.rssm.imagine(visited[t], self.actor.as_input(taken[t]), noise[t]))
        return Dream(torch.stack(visited), torch.stack(taken))

    def behavior_step(self, dream: Dream, alive: Tensor) -> dict[str, Tensor]:
        """Take one critic step and one actor step on a dream; `alive` [N] is 0 where it starts at a termination.

        R_t = r_{t+1} + g c_{t+1} ((1 - l) v_{t+1} + l R_{t+1}); a step's weight is the chance of reaching its state.
        """
        model, before = self.world_model, dream.features[:-1]
        with torch.no_grad(), self._autocast():
            arrivals = dream.features[1:]
            rewards = model.reward_head.mean(model.reward_head(arrivals))
            discounts = self.gamma * model.continue_head(arrivals).float().sigmoid()
            slow_values = self.slow_critic.mean(self.slow_critic(before))
        with self._autocast():
            logits = self.critic(dream.features)
            logprobs, entropy = self.actor.evaluate(before, dream.actions)
        values = self.critic.mean(logits.detach())
        returns = lambda_returns(rewards=rewards, discounts=discounts, next_values=values[1:], lambda_=self.gae_lambda)
        weights = torch.cat([alive.unsqueeze(0), discounts[:-1]]).cumprod(0)
        scale = self.return_scale.update(returns)
        # Cross-entropy is linear in its target, so one covers the returns and the slow critic's values (a regularizer).
        codes = self.critic.codes(returns) + self.critic.codes(slow_values)
        critic_loss = (weights * categorical_cross_entropy(logits[:-1].float(), codes)).mean()
        advantages = (returns - values[:-1]) / scale
        actor_loss = -(weights * (advantages * logprobs + self.entropy_coef * entropy)).mean()
        self.optimizers["critic"].step(critic_loss)
        self.optimizers["actor"].step(actor_loss)
        self._target.polyak_(self.tau)
        return {
            "actor_loss": actor_loss, "critic_loss": critic_loss, "entropy": entropy.mean(),
            "imagined_return_mean": returns.mean(), "return_scale": scale,
        }  # fmt: skip

    def _autocast(self) -> torch.autocast:
        """bfloat16 for the products on a GPU. One context per phase: its cached casts do not outlive grad mode."""
        kind = self.device.type
        return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")
