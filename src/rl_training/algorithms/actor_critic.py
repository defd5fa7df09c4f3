"""Shared by the rollout family: acting, rollout batches, advantages, minibatch epochs, and normalizer updates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import ActOutput, Algorithm, Batch, Carry, Number, Setting
from rl_training.algorithms.reward_scale import RewardScale
from rl_training.ops.returns import gae
from rl_training.speed.optimizer import Backward, Optimizer

MOST_STEPS = 32  # in one graph
MOST_NUMBERS = 16  # per row; a GPU gathers these one by one, because `index_select` spends a block of threads on a row


class PolicyActing(Algorithm):
    """A learner of a `policy` that samples (`act`) and estimates values: the rollout family, GAIL."""

    policy: Any

    def acting(self) -> nn.Module:
        """Policy and normalizer."""
        policy: nn.Module = self.policy
        return policy

    @torch.no_grad()
    def act(
        self, obs: Tensor, carry: Carry = None, *, is_first: Tensor | None = None, deterministic: bool = False,
        action_masks: Tensor | None = None,
    ) -> ActOutput:  # fmt: skip
        """Actions, with the log-probabilities and values that a rollout stores with them."""
        out = self.policy.act(obs, deterministic=deterministic, generator=self.generator, action_masks=action_masks)
        return ActOutput(out.actions, {"logprobs": out.logprobs, "values": out.values})

    def sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [N, ...] from standard Gaussian or Gumbel noise [N, A], with their log-probabilities [N]."""
        chosen = self.policy.distribution(obs)
        actions = chosen.sample(noise=noise)
        return actions, chosen.log_prob(actions)

    def state_values(self, obs: Tensor, action_masks: Tensor | None = None) -> Tensor:
        """The critic's values [N] of observations [N, ...], in which these actions [N, A] are legal."""
        values: Tensor = self.policy.values(obs)
        return values


class RolloutLearner(Algorithm):
    """A learner from rollouts [T, N], with `state_values` for advantages and returns."""

    gamma = Number("in [0, 1]", 0.99)
    gae_lambda = Number("in [0, 1]", 0.95)
    optimizer_eps = Number("> 0", 1e-5, read="by value")
    optimizer: Optimizer

    def __init__(self, *, normalize_rewards: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self.reward_scale = RewardScale(self.gamma) if normalize_rewards else None

    def state_values(self, obs: Tensor, action_masks: Tensor | None = None) -> Tensor:
        """Values [N] of observations [N, ...], in which these actions [N, A] are legal."""
        raise NotImplementedError

    def time_major(self, batch: Batch) -> dict[str, Tensor]:
        """The inputs for computing returns, all [T, N]: rewards, discounts and cuts."""
        terminated, cuts = read_ends(batch)
        rewards = batch["rewards"].float()
        if self.reward_scale is not None:
            self.reward_scale.gamma = self.gamma  # a schedule may have changed it
            rewards = self.reward_scale(rewards, cuts, batch.get("valid"))
        return {"rewards": rewards, "discounts": self.gamma * (~terminated).to(rewards.dtype), "cuts": cuts}

    @torch.no_grad()
    def successor_values(self, values: Tensor, batch: Batch) -> Tensor:
        """Value of each row's successor [T, N]: the final observation's at a truncation, the bootstrap in the last row.

        The learner's critic evaluates `bootstrap_obs` [N, ...]; without it the batch has `bootstrap_value`.
        """
        given = "bootstrap_obs" not in batch
        last = batch["bootstrap_value"].to(values.dtype) if given else self.state_values(batch["bootstrap_obs"])
        following = torch.cat([values[1:], last.unsqueeze(0)])
        if "truncation_values" not in batch:
            return following
        return torch.where(batch["truncated"].bool(), batch["truncation_values"], following)

    @torch.no_grad()
    def value_finals(self, batch: Batch) -> dict[str, Tensor]:
        """Replace `final_obs` in the batch with `truncation_values` [T, N] from the learner's critic."""
        others = {name: value for name, value in batch.items() if name != "final_obs"}
        if "final_obs" not in batch:
            return others
        truncated = batch["truncated"]
        if batch["final_obs"].dim() == 3 and not truncated.is_cpu:  # finding these rows would make the host wait
            values = self.state_values(batch["final_obs"].flatten(0, 1))
            return others | {"truncation_values": values.view_as(truncated)}
        rows = truncated.flatten().nonzero().squeeze(-1)
        finals = self.state_values(batch["final_obs"].flatten(0, 1).index_select(0, rows))
        values = finals.new_zeros(truncated.numel()).index_copy_(0, rows, finals)
        return others | {"truncation_values": values.view_as(truncated)}

    def advantages(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """GAE advantages and returns [T, N] from the behavior critic's values."""
        values = batch.get("values")
        if values is None:
            flat = batch["obs"].flatten(0, 1)
            legal = batch["action_masks"].flatten(0, 1) if "action_masks" in batch else None
            with torch.no_grad():
                values = self.state_values(flat, legal).view(batch["obs"].shape[:2])
        next_values = self.successor_values(values, self.value_finals(batch))
        advantages = gae(values=values, next_values=next_values, lambda_=self.gae_lambda, **self.time_major(batch))
        return advantages, advantages + values

    def rows(self, batch: Batch) -> dict[str, Tensor]:
        """The batch as flat rows [B, ...] with `advantages` and `returns`, reset rows left out."""
        rows, indices = self.rows_and_indices(batch)
        return rows if indices is None else select_rows(rows, indices)

    def rows_and_indices(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor | None]:
        """All rows of the batch, flat, and the indices of the rows that are not resets (None if no row is one)."""
        if "rewards" in batch and "advantages" not in batch:
            advantages, returns = self.advantages(batch)
            batch = {**batch, "advantages": advantages, "returns": returns}
        lead = batch["advantages"].dim()
        names = ("obs", "actions", "logprobs", "values", "advantages", "returns", "action_masks")
        rows = {name: batch[name] if lead == 1 else batch[name].flatten(0, 1) for name in names if name in batch}
        valid = batch.get("valid")
        return rows, None if valid is None else valid.flatten().nonzero().squeeze(-1)

    def move_normalizers(self, rows: Batch) -> None:
        """Add the observations just learned from to the running statistics.

        Call it after learning: while it learns, a policy must see observations as the policy that acted saw them.
        """
        observation_input = getattr(self.acting(), "observation_input", None)
        if observation_input is not None:
            observation_input.update(rows["obs"])


class ActorCriticAlgorithm(PolicyActing, RolloutLearner):
    """A learner of a policy with `act`, `evaluate_actions`, `distribution` and `values` (see `models`)."""

    normalize_advantages: Any

    def __init__(self, *, policy: nn.Module, **settings: Any) -> None:
        super().__init__(**settings)
        self.policy = policy

    def trace(self, rows: Batch) -> tuple[Any, Backward]:
        """Log-probabilities, values and entropy [B] of rows, and a function that maps their slopes to gradients."""
        inputs = rows["obs"], rows["actions"], rows.get("action_masks")
        return self.optimizer.trace(self.policy, *inputs, call=self.policy.evaluate_actions)

    def scale_advantages(self, advantages: Tensor, weights: Tensor | None = None) -> Tensor:
        """Advantages for the loss, normalized over all ranks if `normalize_advantages` is set."""
        return normalize(advantages, weights, self.ranks) if self.normalize_advantages else advantages


class ShuffledEpochs(RolloutLearner):
    """A rollout learner that makes passes over shuffled rows; a subclass writes `minibatch_step`."""

    steps: tuple[str, ...] = ("minibatch_step",)
    graphs: tuple[str, ...] = ("shuffled_steps",)
    update_epochs = Setting(">= 1", 1)
    minibatch_size = Setting(">= 1", None)  # None: the whole batch

    def minibatch_step(self, rows: Batch) -> Tensor:
        """Take one gradient step on rows [B]; return its metrics [K]."""
        raise NotImplementedError

    def shuffled_steps(self, rows: Batch, order: Tensor) -> Tensor:
        """Take a gradient step on every `minibatch_size` rows in the given order; return the steps' metrics [S, K]."""
        chosen = select_rows(rows, order)
        pieces = zip(*(value.split(self.minibatch_size or len(order)) for value in chosen.values()), strict=True)
        return torch.stack([self.minibatch_step(dict(zip(chosen, piece, strict=True))) for piece in pieces])

    def whole_minibatches(self, count: int) -> tuple[int, int]:
        """How many of `count` shuffled rows are in minibatches of full size, and in any: a last single row is dropped.

        The smaller last minibatch runs separately: without an engine's reset rows, its size varies.
        """
        size = self.minibatch_size or count
        kept = count - (count > 1 and (count - 1) % size == 0)
        return kept - kept % size, kept

    def epochs(self, rows: Batch, indices: Tensor | None) -> Iterator[Tensor]:
        """Make `update_epochs` passes over the rows of these indices (None: all); yield each one's metrics [S, K]."""
        count, device = len(rows["returns"] if indices is None else indices), rows["returns"].device
        whole, kept = self.whole_minibatches(count)
        for _ in range(self.update_epochs):
            order = torch.randperm(count, generator=self.generator, device=device)
            order = order if indices is None else indices[order]
            parts = [*order[:whole].split((self.minibatch_size or count) * MOST_STEPS), order[whole:kept]]
            yield torch.cat([self.shuffled_steps(rows, part) for part in parts if len(part)])


def read_ends(batch: Batch) -> tuple[Tensor, Tensor]:
    """Whether each row terminated, and whether it terminated or was truncated.

    Without `terminated`, rows with `dones` but not `truncated` terminated.
    """
    ended = terminated = batch["terminated" if "terminated" in batch else "dones"].bool()
    if "truncated" in batch:
        truncated = batch["truncated"].bool()
        ended = terminated | truncated
        terminated = terminated if "terminated" in batch else terminated & ~truncated
    return terminated, ended


def select_rows(rows: Batch, index: Tensor) -> dict[str, Tensor]:
    """The given rows of every tensor."""
    return {name: _select(value, index) for name, value in rows.items()}


def _select(x: Tensor, index: Tensor) -> Tensor:
    if x.is_cpu or x.dim() != 2 or x.shape[1] > MOST_NUMBERS:
        return x.index_select(0, index)
    columns = torch.arange(x.shape[1], device=x.device)
    return x.take(torch.add(columns, index.unsqueeze(1), alpha=x.shape[1]))


def normalize(x: Tensor, weights: Tensor | None = None, ranks: Any = None) -> Tensor:
    """Zero mean and unit deviation, over rows of nonzero weight or over all ranks; a single row is unchanged."""
    if x.numel() < 2:
        return x
    if weights is None:
        deviation, mean = torch.std_mean(x) if ranks is None else ranks.std_mean(x)
        return (x - mean) / (deviation + 1e-8)
    count = weights.sum().clamp(min=1.0)
    x = x - (x * weights).sum() / count
    return x / (((x.square() * weights).sum() / (count - 1.0).clamp(min=1.0)).sqrt() + 1e-8)
