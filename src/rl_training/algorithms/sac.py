"""SAC: soft actor-critic with a tuned temperature (Haarnoja et al. 2018, arXiv:1812.05905).

The critics regress on y = r + g (min_i Q'_i(s', a') - alpha log pi(a'|s')), the actor minimizes
alpha log pi(a|s) - min_i Q_i(s, a) with a reparametrized, and alpha holds the policy's entropy at `target_entropy`.

What a critic predicts is an axis (`critic_heads.py`), and so are the number of critics, the subset of them whose
minimum is the target, dropout, how often the actor learns, whether there are target networks, what is evaluated in one
pass, and running statistics. TQC, REDQ, DroQ, CrossQ, SimBa, SimbaV2, FlashSAC and RLPD are settings of these axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import ActOutput, Algorithm, Batch, Carry, Number, Setting, UpdateResult, check_bound
from rl_training.algorithms.critic_heads import CategoricalHead, Head, QuantileHead, ValueHead, least
from rl_training.algorithms.reward_scale import ReturnScale
from rl_training.errors import UserError
from rl_training.ops.losses import bellman_target, critic_losses, transition_columns
from rl_training.speed.optimizer import TargetNetwork
from rl_training.speed.passes import NumpyPolicy

CHOICES = {  # what settings that are words may be
    "actor_q": ("min", "mean"), "joint_forward": ("none", "critics", "both"),
    "observation_statistics": ("batches", "steps"),
}  # fmt: skip
Masks = tuple[Tensor, ...] | None  # dropout masks [E, B, H] of an ensemble's hidden layers; None without dropout


def actor_loss(q_values: Tensor, logprobs: Tensor, alpha: Tensor | float) -> dict[str, Tensor]:
    """Eq. 9, from the values [B] that the actor maximizes and log-probabilities [B] of its actions."""
    entropy_term = (alpha * logprobs).mean()
    return {"actor_loss": entropy_term - q_values.mean(), "entropy_term": entropy_term}


def temperature_loss(log_alpha: Tensor, logprobs: Tensor, target_entropy: float | Tensor) -> Tensor:
    """Eq. 18, in log alpha."""
    return -log_alpha * (logprobs.detach().mean() + target_entropy)


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
    """The SAC learner. `model` has `features(obs)`, `critics(features, actions, subset, masks)` [E, B] (for K quantiles
    [E, B, K]), and an `actor` with `sample(obs, noise)` and `draw(obs, noise)`, which returns only actions. If its
    networks normalize `by_batch`, critics that learn and the actor's `sample` are called with that mode where they
    learn, and everything else reads running statistics.

    `alpha` is a number, or "auto": tuned from `initial_alpha` so that the entropy stays at `target_entropy` (unless
    given, |A| times `target_entropy_per_dimension`, which is -1). Without `backup_entropy` the critics' targets leave
    the entropy out. With `own_targets`, each critic learns the target of its own copy, not of the smallest. The target
    is made of `critic_subset_size` critics, drawn for each update (None: of all), and leaves out
    `top_quantiles_to_drop` quantiles per critic. `actor_q` is what the actor maximizes, the "min" or the
    "mean" of the critics' values; None: the mean where a subset is drawn or quantiles are predicted.

    With `num_atoms`, critics predict probabilities of returns from `v_min` to `v_max`. A `return_bound` divides rewards
    so that returns stay within it, and is where the atoms end unless they have ends of their own.

    With `noise_repeat`, the noise of actions is held for up to so many steps (`hold`). With `actor_first`, actor and
    temperature take their steps before the critics, not after them. The statistics of normalized observations are those
    of "batches", or those of "steps", each of which counts once, when it is taken.

    Without `target_networks` the critics themselves value (s', a'). With batch statistics, a `joint_forward` evaluates
    the "critics", or "both" critics and actor, on (s, a) and (s', a') in one pass, so that both are normalized by the
    statistics of both.
    """

    num_atoms = Setting(">= 1", None)
    v_min = Setting(default=None)
    v_max = Setting(default=None)
    return_bound = Setting("> 0", None)
    actor_first = Setting(default=False)
    noise_repeat = Setting(">= 1", 1)
    observation_statistics = Setting(default="batches")
    target_entropy_per_dimension = Setting(default=None)
    target_networks = Setting(default=True)
    joint_forward = Setting(default="none")
    actor_update_interval = Setting(">= 1", 1)
    critic_subset_size = Setting(">= 1", None)
    own_targets = Setting(default=False)
    actor_q = Setting(default=None)
    top_quantiles_to_drop = Setting(">= 0", 2)
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
        self.num_critics: int = model.critics.num_members
        self.head = self.make_head()
        self.check_axes()
        if self.target_entropy is None:
            each = self.target_entropy_per_dimension
            self.target_entropy = model.action_dim * (-1.0 if each is None else each)
        self.critic_optimizer = self.make_optimizer("critic_optimizer", model.critics)
        self.actor_optimizer = self.make_optimizer("actor_optimizer", model.actor)
        start = torch.tensor(math.log(self.initial_alpha), device=self.device)
        self.log_alpha = nn.Parameter(start) if alpha == "auto" else None
        if self.log_alpha is not None:
            plain = {"beta1": 0.9, "weight_decay": 0.0}  # which the networks' options are not meant for
            self.alpha_optimizer = self.make_optimizer("alpha_optimizer", [self.log_alpha], **plain)
        else:
            check_bound("alpha", ">= 0", alpha)
            self.numbers["alpha"] = float(alpha)
        self._target = TargetNetwork(model.critics) if self.target_networks else None
        if self._target is not None:
            self.target_critics = self._target.network
        by_batch = bool(getattr(model, "by_batch", False))
        self.learning: dict[str, bool] = {"by_batch": True} if by_batch else {}  # the mode of networks that learn
        self.one_pass = by_batch and self.joint_forward != "none"
        self.return_scale = None if self.return_bound is None else ReturnScale(self.return_bound).to(self.device)
        self.norm_observes = self.observation_statistics == "steps" and model.actor.observation_input.norm is not None
        if self.norm_observes or self.return_scale is not None:
            self.observes, self.graphs = True, (*self.graphs, "observe_step")
        self.last_actor: Tensor  # actor_loss and entropy_term of the last actor step
        self.register_buffer("last_actor", torch.zeros(2, device=self.device))

    def make_head(self) -> Head:
        """What the critics predict: a value, or as many probabilities or quantiles as they have outputs."""
        outputs = self.model.critics.outputs
        if self.num_atoms is None:
            return QuantileHead(self.top_quantiles_to_drop) if outputs > 1 else ValueHead()
        low, high, bound = self.v_min, self.v_max, self.return_bound
        if bound is not None:
            low, high = -bound if low is None else low, bound if high is None else high
        if low is None or high is None or low >= high:
            raise UserError(f"v_min is {low} and v_max {high}; num_atoms needs two ends, or a return_bound.")
        return CategoricalHead(torch.linspace(low, high, outputs, device=self.device))

    def check_axes(self) -> None:
        """Refuse settings that do not fit the critics, and decide those that are None."""
        size, count = self.critic_subset_size, self.num_critics
        self.critic_subset_size = count if size is None else size
        if self.critic_subset_size > count:
            raise UserError(f"critic_subset_size is {size}; from 1 to {count} are possible.")
        if self.own_targets and (isinstance(self.head, QuantileHead) or self.critic_subset_size < count):
            raise UserError("own_targets is true; it must be false with quantiles, or with a critic_subset_size.")
        outputs, dropped = self.model.critics.outputs, self.top_quantiles_to_drop
        if isinstance(self.head, QuantileHead) and dropped >= outputs:
            raise UserError(f"top_quantiles_to_drop is {dropped}; it must be below num_quantiles ({outputs}).")
        for name, choices in CHOICES.items():
            if (given := getattr(self, name)) not in (*choices, None):
                raise UserError(f"{name} is {given!r}; it must be {' or '.join(map(repr, choices))}.")
        if self.actor_q is None:
            averages = isinstance(self.head, QuantileHead) or self.critic_subset_size < count
            self.actor_q = "mean" if averages else "min"

    @property
    def alpha(self) -> Tensor | float:
        """The temperature, fixed or tuned."""
        return self.numbers["alpha"] if self.log_alpha is None else self.log_alpha.detach().exp()

    @property
    def next_critics(self) -> Any:
        """The critics that value the next state."""
        return self.model.critics if self._target is None else self.target_critics

    def acting(self) -> nn.Module:
        """The actor."""
        actor: nn.Module = self.model.actor
        return actor

    @torch.no_grad()
    def act(self, obs: Tensor, carry: Carry = None, *, deterministic: bool = False, **_: Any) -> ActOutput:
        """A sample of the policy, or tanh(mean)."""
        if deterministic:
            return ActOutput(self.model.actor(obs), carry=carry)
        noise = self.draw_noise(obs)
        if carry is not None:
            carry = self.hold(noise, carry)
            noise = carry[:, :-1]
        return ActOutput(self.model.actor.draw(obs, noise), carry=carry)

    def exploring_carry(self, n: int) -> Carry:
        """With `noise_repeat`, the noise [n, A] and the steps for which it is still held [n, 1]."""
        held = self.noise_repeat > 1
        return torch.zeros(n, self.model.action_dim + 1, device=self.device) if held else None

    def hold(self, noise: Tensor, carry: Tensor) -> Tensor:
        """The noise of the carry, or new noise for n steps, in all environments the same n, with chance ~ 1 / n^2."""
        lengths = torch.arange(1, self.noise_repeat + 1, device=noise.device)
        chances = lengths.double().square().reciprocal().cumsum(0)
        drawn = torch.rand((), generator=self.generator, dtype=torch.float64, device=noise.device)
        length = 1.0 + (chances < drawn * chances[-1]).sum()
        renew = carry[:, -1:] < 0.5
        left = torch.where(renew, length, carry[:, -1:]) - 1.0
        return torch.cat([torch.where(renew, noise, carry[:, :-1]), left.to(noise.dtype)], -1)

    def numpy_policy(self) -> NumpyPolicy | None:
        """As the base class; none with `noise_repeat`, which numpy has not."""
        return None if self.noise_repeat > 1 else super().numpy_policy()

    def draw_noise(self, obs: Tensor) -> Tensor:
        """Standard normal noise [B, A] for actions at these observations."""
        return torch.randn(len(obs), self.model.action_dim, generator=self.generator, device=obs.device)

    def draw_subset(self) -> Tensor | None:
        """Indices [M] of the critics whose minimum is the target, the same for all rows; None for all critics."""
        if self.critic_subset_size == self.num_critics:
            return None
        order = torch.rand(self.num_critics, generator=self.generator, device=self.generator.device).argsort()
        return order[: self.critic_subset_size]

    def draw_masks(self, obs: Tensor, members: int) -> Masks:
        """Dropout masks for this many critics at these observations."""
        masks: Masks = self.model.critics.draw_masks(members, len(obs), self.generator)
        return masks

    def climbed(self, q_values: Tensor) -> Tensor:
        """The values [B] that the actor maximizes, from those of all critics [E, B]."""
        return least(q_values) if self.actor_q == "min" else q_values.mean(0)

    def critic_outputs(
        self, batch: Batch, next_actions: Tensor, subset: Tensor | None, masks: tuple[Masks, Masks]
    ) -> tuple[Tensor, Tensor]:
        """What the critics predict at (s, a), and the target critics in the subset at (s', a')."""
        model, (live, target), mode, critics = self.model, masks, self.learning, self.next_critics
        now, later = (model.features(batch["obs"]), batch["actions"]), (model.features(batch["next_obs"]), next_actions)
        if not self.one_pass:
            with torch.no_grad():
                next_outputs = critics(*later, subset, target, **mode)
            return model.critics(*now, None, live, **mode), next_outputs
        rows, both = len(next_actions), [torch.cat(pair) for pair in zip(now, later, strict=True)]
        outputs = model.critics(*both, None, live, **mode)
        if self._target is None:
            next_outputs = outputs.detach() if subset is None else outputs.detach()[subset]
        else:
            with torch.no_grad():
                next_outputs = critics(*both, subset, target, **mode)
        return outputs[:, :rows], next_outputs[:, rows:]

    def critic_step(
        self, batch: Batch, noise: Tensor, subset: Tensor | None = None, masks: tuple[Masks, Masks] = (None, None)
    ) -> tuple[dict[str, Any], Tensor]:
        """Take one gradient step on the soft Bellman error (eq. 5 and 6); return metrics and priorities [B]."""
        alpha = self.alpha
        with torch.no_grad():
            next_actions, next_logprobs = self.next_actions(batch, noise)
        outputs, next_outputs = self.critic_outputs(batch, next_actions, subset, masks)

        def backup(next_values: Tensor) -> Tensor:
            if self.backup_entropy:
                next_values = next_values - (alpha * next_logprobs).view(-1, *[1] * (next_values.dim() - 1))
            return bellman_target(batch, self.gamma, next_values)

        with torch.no_grad():
            parts = next_outputs.split(1) if self.own_targets else (next_outputs,)
            each = [self.head.targets(part, backup) for part in parts]
            targets = torch.stack(each) if self.own_targets else each[0]
        losses, priorities = self.head.losses(outputs, targets, batch.get("weights"))
        losses = self.add_penalty(losses, outputs, batch)
        self.critic_optimizer.step(losses["critic_loss"])
        return {**losses, "alpha": alpha}, priorities

    def next_actions(self, batch: Batch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The actions [B, A] at s' of the targets, and their log-probabilities [B]."""
        sampled: tuple[Tensor, Tensor] = self.model.actor.sample(batch["next_obs"], noise)
        return sampled

    def add_penalty(self, losses: dict[str, Tensor], outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """For subclasses: losses whose `critic_loss` includes a penalty, given the critics' outputs at (s, a)."""
        return losses

    def actor_step(
        self, obs: Tensor, noise: Tensor, masks: Masks = None, next_obs: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Take one gradient step of the actor (eq. 9), then one of the temperature (eq. 18).

        Batch statistics are those of `obs`, or with `next_obs` those of both.
        """
        if next_obs is None:
            actions, logprobs = self.model.actor.sample(obs, noise, **self.learning)
        else:
            sampled = self.model.actor.sample(torch.cat([obs, next_obs]), noise.repeat(2, 1), **self.learning)
            actions, logprobs = (half[: len(obs)] for half in sampled)
        outputs = self.model.critics(self.model.features(obs), actions, None, masks)
        losses = actor_loss(self.climbed(self.head.values(outputs)), logprobs, self.alpha)
        self.actor_optimizer.step(losses["actor_loss"])
        if self.log_alpha is not None:
            self.alpha_optimizer.step(temperature_loss(self.log_alpha, logprobs, self.target_entropy))
        return losses

    def actor_part(self, batch: Batch) -> None:
        """Draw, take the steps of actor and temperature, and keep their metrics."""
        obs, next_obs = batch["obs"], batch["next_obs"] if self.one_pass and self.joint_forward == "both" else None
        losses = self.actor_step(obs, self.draw_noise(obs), self.draw_masks(obs, self.num_critics), next_obs)
        torch.stack([losses["actor_loss"].detach(), losses["entropy_term"].detach()], out=self.last_actor)

    def update_step(self, batch: Batch, with_actor: bool) -> tuple[dict[str, Any], Tensor]:
        """Critic step, actor and temperature steps on request before or after it, target update.

        Return metrics and priorities [B].
        """
        obs, every = batch["obs"], self.num_critics
        if self.return_scale is not None:
            batch = {**batch, "rewards": batch["rewards"] / self.return_scale.divisor()}
        if with_actor and self.actor_first:
            self.actor_part(batch)
        noise, subset = self.draw_noise(obs), self.draw_subset()
        masks = self.draw_masks(obs, every), self.draw_masks(obs, self.critic_subset_size)
        metrics, priorities = self.critic_step(batch, noise, subset, masks)
        if with_actor and not self.actor_first:
            self.actor_part(batch)
        if self._target is not None:
            self._target.polyak_(self.tau)
        last = dict(zip(("actor_loss", "entropy_term"), self.last_actor.clone().unbind(), strict=True))
        return {**metrics, **last}, priorities

    def observe(self, row: Mapping[str, Any]) -> None:
        """Move the running statistics."""
        scale, envs, count = self.return_scale, row.get("envs"), len(row["rewards"])
        names = ("rewards", "terminated", "truncated", *["obs"] * self.norm_observes)
        columns = {name: torch.as_tensor(row[name], device=self.device) for name in names}
        valid = torch.ones(count, dtype=torch.bool) if row["valid"] is None else torch.as_tensor(row["valid"])
        columns["valid"] = valid.to(self.device)
        if scale is not None:
            columns["returns"] = scale.returns_of(count, envs)
        returns = self.observe_step(columns)
        if scale is not None and returns is not None:
            scale.keep(returns, envs)

    @torch.no_grad()
    def observe_step(self, columns: Batch) -> Tensor | None:
        """Add the valid ones of rows [N] to the statistics of observations and returns; give the returns after them."""
        if "obs" in columns:
            self.model.actor.observation_input.update(columns["obs"], columns["valid"])
        if self.return_scale is None:
            return None
        ends = columns["terminated"] | columns["truncated"]
        after: Tensor = self.return_scale.add(
            columns["returns"], columns["rewards"], ends, columns["valid"], self.gamma
        )
        return after

    def learn(self, batch: Batch) -> UpdateResult:
        """Make one update; one of every `actor_update_interval` updates, the first or the last, includes the actor."""
        interval = self.actor_update_interval
        with_actor = self.num_updates % interval == (0 if self.actor_first else interval - 1)
        metrics, priorities = self.update_step(transition_columns(batch), with_actor)
        if self.observation_statistics == "batches":
            self.model.actor.observation_input.update(batch["obs"])
        return UpdateResult(metrics, priorities=priorities, watch="critic_loss")
