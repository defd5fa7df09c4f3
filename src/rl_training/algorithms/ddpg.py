"""DDPG: deep deterministic policy gradient (Lillicrap et al. 2016, arXiv:1509.02971).

The critic regresses on y = r + g Q'(s', mu'(s')); the actor follows the deterministic policy gradient
grad_a Q(s, a) grad_theta mu(s) at a = mu(s) (Silver et al. 2014); both target networks move by `tau` per update.

The axes of TD3, DrQ-v2 and FastTD3 are options: with several critics the target is the smallest of them,
y = r + g min_i Q'_i; `policy_noise` smooths its action by clipped noise; `policy_delay` delays the actor; and
`augmentation` moves the images of s and s' by a few pixels, each by its own draw (DrQ-v2, Yarats et al. 2021,
arXiv:2107.09645). `exploration_noise_min`, `target_actor` and `actor_q` are FastTD3's (Seo et al. 2025,
arXiv:2505.22642).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import ActOutput, Algorithm, Batch, Carry, Number, Setting, UpdateResult
from rl_training.errors import UserError
from rl_training.ops.images import draw_shifts, shift_images
from rl_training.ops.losses import bellman_target, critic_losses, transition_columns
from rl_training.speed.optimizer import TargetNetwork
from rl_training.speed.passes import NumpyPolicy


def regression_losses(q_values: Tensor, targets: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
    """Mean squared error per critic, weighted by importance, summed over critics: [B] or [E, B], [B], [B] -> []."""
    losses = critic_losses(q_values, targets, weights)
    return losses | {"critic_loss": losses["critic_loss"] * (q_values.numel() // len(targets))}


def actor_loss(q_values: Tensor) -> dict[str, Tensor]:
    """From the values [B] of mu(s)."""
    return {"actor_loss": -q_values.mean()}


def ddpg_loss(batch: Batch) -> dict[str, Tensor]:
    """From q_values ([B] or [E, B]), target_q_values [B] and actor_q_values [B], those of mu(s); `weights` optional."""
    losses = regression_losses(batch["q_values"], batch["target_q_values"], batch.get("weights"))
    return losses | actor_loss(batch["actor_q_values"])


def clip_rows(gradients: Tensor, clip: float) -> Tensor:
    """Rows [B, A] shortened to the length `clip` where they are longer."""
    norms: Tensor = torch.linalg.vector_norm(gradients, dim=-1, keepdim=True)
    return gradients * (clip / norms).clamp(max=1.0)


class GaussianExploration(Algorithm):
    """A learner whose `model.actor(obs)` is mu(s) in [-1, 1] and that explores with Gaussian noise."""

    model: Any
    exploration_noise: float  # the deviation of the noise; a schedule may change it
    exploration_noise_min: float | None = None  # with it, every environment has a deviation of its own

    @torch.no_grad()
    def act(
        self, obs: Tensor, carry: Carry = None, *, is_first: Tensor | None = None, deterministic: bool = False, **_: Any
    ) -> ActOutput:  # fmt: skip
        """mu(s), with Gaussian noise unless deterministic; a carry [N, 1] has the deviation of each row."""
        actions = self.model.actor(obs)
        if not deterministic:
            carry = carry if carry is None else self.draw_deviations(carry, is_first)
            noise = torch.randn(actions.shape, generator=self.generator, device=actions.device)
            actions = (actions + (self.exploration_noise if carry is None else carry) * noise).clamp_(-1.0, 1.0)
        return ActOutput(actions, carry=carry)

    def exploring_carry(self, n: int) -> Carry:
        """With `exploration_noise_min`, the deviation of every environment [n, 1]; below 0: not drawn yet."""
        return None if self.exploration_noise_min is None else torch.full((n, 1), -1.0, device=self.device)

    def draw_deviations(self, deviations: Tensor, is_first: Tensor | None) -> Tensor:
        """The deviations [N, 1], new ones between the smallest and the largest where an episode begins."""
        low = self.exploration_noise_min
        drawn = torch.rand(deviations.shape, generator=self.generator, device=deviations.device)
        drawn = low + (self.exploration_noise - low) * drawn  # type: ignore[operator]  # there is one, or no carry
        renewed = deviations < 0.0
        return torch.where(renewed if is_first is None else renewed | is_first.view(-1, 1), drawn, deviations)

    def numpy_policy(self) -> NumpyPolicy | None:
        """The same in numpy, if the acting network has a numpy form; none with deviations that differ."""
        make = getattr(self.acting(), "numpy_policy", None)
        differ = self.exploration_noise_min is not None
        return None if make is None or differ else make(lambda: self.exploration_noise)


class DDPG(GaussianExploration):
    """The DDPG learner. `model` has `actor(obs)`, `critics(features, actions)` [E, B], `features(obs)`, `q_values` [B].

    `action_gradient_clip` bounds the norm of each sample's dQ/da, as in D4PG's public code.

    With `exploration_noise_min`, every environment explores with a deviation of its own, drawn between it and
    `exploration_noise` at the start of each episode. Without a `target_actor`, the actor itself chooses the action of
    the target. `actor_q` is what the actor maximizes: the "first" critic, or the "min" or "mean" of all.
    """

    steps = ("critic_step", "actor_step")
    graphs = ("update_step",)
    target_update_interval: Any = None  # updates between target updates; None: with every actor step
    gamma = Number("in [0, 1]", 0.99)
    tau = Number("in (0, 1]", 0.005)
    exploration_noise = Number(">= 0", 0.1, read="to act")
    exploration_noise_min = Setting(">= 0", None)  # None: the same for all
    target_actor = Setting(default=True)
    actor_q = Setting(default="first")
    policy_noise = Number(">= 0", None)  # None: the target's action has none
    noise_clip = Number(">= 0", 0.5)
    policy_delay = Setting(">= 1", 1)
    augmentation = Setting(default="none")
    shift_pixels = Setting(">= 1", 4)
    action_gradient_clip = Number("> 0", None)
    learning_rate = Number(">= 0", 1e-3)
    critic_learning_rate = Number(">= 0", None)  # None: the learning rate
    actor_learning_rate = Number(">= 0", None)

    def __init__(self, *, model: Any, **settings: Any) -> None:
        super().__init__(**settings)
        if self.augmentation == "shift" and model.actor.observation_input.image_scale is None:
            raise UserError("augmentation is 'shift', but the observations are not images; it must be none.")
        if self.actor_q not in ("first", "min", "mean"):
            raise UserError(f"actor_q is {self.actor_q!r}; it must be 'first', 'min' or 'mean'.")
        self.model = model
        self.critic_optimizer = self.make_optimizer("critic_optimizer", model.critics.parameters())
        self.actor_optimizer = self.make_optimizer("actor_optimizer", model.actor.parameters())
        self._target = TargetNetwork(model)
        self.target_network: Any = self._target.network
        self.last_actor_loss: Tensor
        self.register_buffer("last_actor_loss", torch.zeros((), device=self.device))

    def acting(self) -> nn.Module:
        """The actor without noise."""
        actor: nn.Module = self.model.actor
        return actor

    def draw_noise(self, actions: Tensor) -> Tensor | None:
        """Clipped target noise [B, A]; actions are in [-1, 1], so it needs no scaling."""
        if self.policy_noise is None:
            return None
        noise = torch.randn(actions.shape, generator=self.generator, device=actions.device)
        return noise.mul_(self.policy_noise).clamp_(-self.noise_clip, self.noise_clip)

    def augment(self, batch: Batch) -> Batch:
        """The batch with its images moved, those of `obs` and of `next_obs` by draws of their own."""
        if self.augmentation == "none":
            return batch
        images = {name: batch[name] for name in ("obs", "next_obs")}
        drawn = {name: draw_shifts(len(x), self.shift_pixels, self.generator) for name, x in images.items()}
        return {**batch, **{name: shift_images(x, drawn[name]) for name, x in images.items()}}

    def next_actions(self, next_obs: Tensor, noise: Tensor | None) -> Tensor:
        """clip(mu'(s') + noise) [B, A]; mu instead of mu' without a target actor."""
        actions: Tensor = (self.target_network if self.target_actor else self.model).actor(next_obs)
        return actions if noise is None else (actions + noise).clamp_(-1.0, 1.0)

    def target_values(self, batch: Batch, noise: Tensor | None) -> Tensor:
        """min_i Q'_i(s', clip(mu'(s') + noise)) [B]."""
        actions = self.next_actions(batch["next_obs"], noise)
        values: Tensor = self.target_network.ensemble_values(batch["next_obs"], actions).amin(0)
        return self.correct_values(values, actions, batch)

    def correct_values(self, values: Tensor, actions: Tensor, batch: Batch) -> Tensor:
        """For subclasses: the next values [B] of these actions [B, A] in the targets."""
        return values

    def critic_step(self, batch: Batch, noise: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
        """Take one gradient step on the Bellman error; return metrics and priorities [B]."""
        with torch.no_grad():
            next_values = self.target_values(batch, noise)
            targets = bellman_target(batch, self.gamma, next_values)
        q_values = self.model.ensemble_values(batch["obs"], batch["actions"])
        losses = regression_losses(q_values, targets, batch.get("weights"))
        self.critic_optimizer.step(losses["critic_loss"])
        return losses, (targets - q_values.detach()).abs_().mean(0)

    def climbed(self, obs: Tensor, actions: Tensor) -> Tensor:
        """The values [B] that the actor maximizes."""
        if self.actor_q == "first":
            first: Tensor = self.model.q_values(obs, actions)
            return first
        values: Tensor = self.model.expected_values(obs, actions)
        return values.amin(0) if self.actor_q == "min" else values.mean(0)

    def actor_losses(self, obs: Tensor, actions: Tensor, stored: Tensor) -> dict[str, Tensor]:
        """The actor's loss, given its actions and those that the batch has, [B, A]."""
        return actor_loss(self.climbed(obs, actions))

    def actor_step(self, obs: Tensor, stored: Tensor) -> dict[str, Tensor]:
        """Take one step along the deterministic policy gradient; `stored` are the batch's actions."""
        actions = self.model.actor(obs)
        if self.action_gradient_clip is not None:
            longest = self.action_gradient_clip / len(obs)  # the loss is a mean over rows
            actions.register_hook(lambda gradients: clip_rows(gradients, longest))
        losses = self.actor_losses(obs, actions, stored)
        self.actor_optimizer.step(losses["actor_loss"])
        return losses

    def update_step(self, batch: Batch, with_actor: bool, with_targets: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Take a critic step and, on request, an actor step and a target update; return metrics and priorities [B]."""
        batch = self.augment(batch)
        metrics, priorities = self.critic_step(batch, self.draw_noise(batch["actions"]))
        if with_actor:
            losses = self.actor_step(batch["obs"], batch["actions"])
            self.last_actor_loss.copy_(losses["actor_loss"].detach())
        if with_targets:
            self._target.polyak_(self.tau)
        return {**metrics, "actor_loss": self.last_actor_loss.clone()}, priorities

    def learn(self, batch: Batch) -> UpdateResult:
        """Make one update; every `policy_delay` updates it includes the actor and the targets."""
        with_actor, with_targets = (
            (self.num_updates + 1) % every == 0
            for every in (self.policy_delay, self.target_update_interval or self.policy_delay)
        )
        metrics, priorities = self.update_step(transition_columns(batch), with_actor, with_targets)
        self.model.actor.observation_input.update(batch["obs"])
        return UpdateResult(metrics, priorities=priorities, watch="critic_loss")
