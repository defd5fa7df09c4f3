"""GAIL: generative adversarial imitation learning (Ho and Ermon 2016, arXiv:1606.03476).

A discriminator D(s, a) learns to tell the expert's pairs (label 1) from the policy's (label 0); its output for the
policy's pairs is the reward from which PPO, unchanged, learns. The environment's own reward is never read.

Absorbing states (Kostrikov et al. 2019, arXiv:1809.02925): if episodes can end early, a reward that is always positive
rewards staying alive, and one that is always negative rewards ending, whatever the expert did. So a termination leads
to an absorbing state, in which the episode stays. The discriminator sees this state once per step that expert or policy
would spend there until the horizon, and a termination is worth gamma / (1 - gamma) times the state's reward. That sum
continues past the horizon, because PPO bootstraps the value of a truncated episode as if it never ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.algorithms.actor_critic import PolicyActing, read_ends
from rl_training.algorithms.base import Algorithm, Batch, Number, Setting, UpdateResult
from rl_training.errors import UserError
from rl_training.speed.optimizer import PLAIN_ADAM

# From the logit l of D: -log(1 - D), log D, and log D - log(1 - D).
REWARD_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "softplus": F.softplus, "log_d": F.logsigmoid, "logit": lambda logits: logits,
}  # fmt: skip


def gail_loss(batch: Batch, gradient_penalty: float = 0.0) -> dict[str, Tensor]:
    """Binary cross-entropy and accuracy from expert_logits [E] and generator_logits [B], each side weighted by half.

    If `gradient_penalty` is not 0, it weights the mean of `gradient_penalties` [P], which is added.
    """
    expert, generated = batch["expert_logits"], batch["generator_logits"]
    loss = 0.5 * (F.softplus(-expert).mean() + F.softplus(generated).mean())
    if gradient_penalty:
        loss = loss + gradient_penalty * batch["gradient_penalties"].mean()
    accuracy = 0.5 * ((expert > 0).float().mean() + (generated <= 0).float().mean())
    return {"discriminator_loss": loss, "discriminator_accuracy": accuracy}


def penalize_gradient(logits: Tensor, inputs: Sequence[Tensor], target: float = 1.0) -> Tensor:
    """(||dD/d inputs|| - target)^2 per row [B], the norm over all inputs [B, ...] together; has a gradient itself."""
    gradients = torch.autograd.grad(logits.sum(), inputs, create_graph=True)
    squares = torch.stack([gradient.flatten(1).square().sum(-1) for gradient in gradients]).sum(0)
    return ((squares + 1e-12).sqrt() - target).square()  # because the slope of the root is infinite at 0


class Pairs(NamedTuple):
    """The pairs of one side (expert or policy): obs, actions [B, ...], and its total steps in the absorbing state."""

    obs: Tensor
    actions: Tensor
    absorbing_steps: int = 0

    def draw(self, size: int | None, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Draw `size` steps uniformly (None: all of them): obs, actions and whether each is absorbing."""
        count, total = len(self.obs), len(self.obs) + self.absorbing_steps
        device = self.obs.device
        if size is None:
            index = torch.arange(total, device=device)
        else:
            index = torch.randint(total, (size,), generator=generator, device=device)
        rows = index.clamp(max=count - 1)
        return self.obs.index_select(0, rows), self.actions.index_select(0, rows), index >= count


class GAIL(PolicyActing):
    """The GAIL learner. A batch is a rollout [T, N] as for PPO, with expert_obs and expert_actions [E].

    With `absorbing_states` it also has `absorbing_steps` [T, N] and `expert_absorbing_steps` [E]: how many steps until
    the horizon follow a row that terminated. With `discriminator_updates` 0 the discriminator is not trained; a new
    `MLPGAILDiscriminator` is constant.
    """

    steps = ("discriminator_step",)
    gamma = Number("in [0, 1]")
    discriminator_learning_rate = Number(">= 0")
    gradient_penalty = Number(">= 0", read="by value")
    discriminator_updates = Setting(">= 0")
    discriminator_batch_size = Setting(">= 1")

    def __init__(
        self, *, ppo: Algorithm, discriminator: nn.Module, discriminator_learning_rate: float = 5e-4,
        discriminator_updates: int = 2, discriminator_batch_size: int | None = None, reward_form: str = "softplus",
        gradient_penalty: float = 0.0, absorbing_states: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if reward_form not in REWARD_FORMS:
            raise UserError(f"reward_form is {reward_form!r}; it must be one of {', '.join(REWARD_FORMS)}.")
        self.ppo: Any = ppo
        ppo.numbers.read = {**ppo.numbers.read, **self.numbers.read}
        self.numbers = ppo.numbers  # one table for both
        self.discriminator_learning_rate, self.gradient_penalty = discriminator_learning_rate, gradient_penalty
        self.discriminator: Any = discriminator
        self.discriminator_updates, self.discriminator_batch_size = discriminator_updates, discriminator_batch_size
        self.reward_form = reward_form
        self.absorbing_states = absorbing_states
        parameters = discriminator.parameters()
        self.discriminator_optimizer = self.make_optimizer("discriminator_optimizer", parameters, **PLAIN_ADAM)

    @property
    def policy(self) -> Any:
        """PPO's policy; here it acts with this learner's generator."""
        return self.ppo.policy

    def learn(self, batch: Batch) -> UpdateResult:
        """Train the discriminator, replace the environment's rewards with its rewards, then call PPO's `learn`."""
        expert, generated = self.sides(batch)
        observation_input = getattr(self.discriminator, "observation_input", None)
        if observation_input is not None:
            for side in (expert, generated):
                observation_input.update(side.obs)
        for _ in range(self.discriminator_updates):
            self.discriminator_step(*self.draw(expert, generated, bool(self.gradient_penalty)))
        with torch.no_grad():
            losses = self.discriminator_losses(*self.draw(expert, generated, False))
            rewards = self.rewards(batch)
        result: UpdateResult = self.ppo.learn({**batch, "rewards": self.with_ends(rewards, batch)})
        learned = rewards if batch.get("valid") is None else rewards[batch["valid"].bool()]
        result.metrics |= {**losses, "reward_mean": learned.mean()}
        result.num_gradient_steps += self.discriminator_updates
        return result

    def sides(self, batch: Batch) -> tuple[Pairs, Pairs]:
        """The pairs of expert and policy, without an engine's reset rows."""
        obs, actions = batch["obs"].flatten(0, 1), batch["actions"].flatten(0, 1)
        if batch.get("valid") is not None:
            valid = batch["valid"].flatten().nonzero().squeeze(-1)
            obs, actions = obs.index_select(0, valid), actions.index_select(0, valid)
        names = ("expert_absorbing_steps", "absorbing_steps") if self.absorbing_states else ()
        expert_steps, steps = [int(batch[name].sum()) for name in names] or (0, 0)
        return Pairs(batch["expert_obs"], batch["expert_actions"], expert_steps), Pairs(obs, actions, steps)

    def draw(self, expert: Pairs, generated: Pairs, penalizes: bool) -> tuple[list[Any], Tensor | None]:
        """Draw steps of both sides, and the interpolation shares at which the gradient is penalized."""
        drawn = [side.draw(self.discriminator_batch_size, self.generator) for side in (expert, generated)]
        obs, pairs = drawn[0][0], min(len(side[0]) for side in drawn)
        return drawn, torch.rand(pairs, generator=self.generator, device=obs.device) if penalizes else None

    def discriminator_step(self, drawn: Sequence[Any], shares: Tensor | None) -> None:
        """Take one gradient step of the discriminator."""
        self.discriminator_optimizer.step(self.discriminator_losses(drawn, shares)["discriminator_loss"])

    def discriminator_losses(self, drawn: Sequence[Any], shares: Tensor | None) -> dict[str, Tensor]:
        """`gail_loss` of steps from both sides, with a gradient penalty at `shares` [P] of the way between them."""
        obs, actions, absorbing = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        count = len(drawn[0][0])
        logits = self.discriminator(obs, actions, *[absorbing] * self.absorbing_states)
        terms = {"expert_logits": logits[:count], "generator_logits": logits[count:]}
        if shares is None:
            return gail_loss(terms)
        between = self.interpolate(self.discriminator.prepare(obs, actions, absorbing), count, shares)
        penalties = penalize_gradient(self.discriminator.logits(*between), between)
        return gail_loss({**terms, "gradient_penalties": penalties}, self.gradient_penalty)

    def interpolate(self, inputs: Sequence[Tensor], count: int, shares: Tensor) -> list[Tensor]:
        """Points at `shares` [P] of the way from the first `count` rows of every input, the expert's, to the others."""
        pairs = len(shares)
        ends = [(x[:pairs], x[count : count + pairs], shares.view(-1, *[1] * (x.dim() - 1))) for x in inputs]
        return [torch.lerp(*end).requires_grad_() for end in ends]

    @torch.no_grad()
    def rewards(self, batch: Batch) -> Tensor:
        """The discriminator's reward for every pair of a rollout [T, N]; 0 on an engine's reset rows."""
        logits = self.discriminator(batch["obs"].flatten(0, 1), batch["actions"].flatten(0, 1))
        rewards = REWARD_FORMS[self.reward_form](logits).view(batch["obs"].shape[:2])
        return rewards if batch.get("valid") is None else torch.where(batch["valid"].bool(), rewards, 0.0)

    @torch.no_grad()
    def with_ends(self, rewards: Tensor, batch: Batch) -> Tensor:
        """The rewards [T, N]; a termination adds the absorbing state's rewards, forever."""
        if not self.absorbing_states:
            return rewards
        one = batch["obs"][0, :1], batch["actions"][0, :1]  # any row: its values are not read
        absorbing = self.discriminator(*one, torch.ones(1, dtype=torch.bool, device=rewards.device))
        worth = REWARD_FORMS[self.reward_form](absorbing) * (self.gamma / (1.0 - self.gamma))
        return torch.where(read_ends(batch)[0], rewards + worth, rewards)
