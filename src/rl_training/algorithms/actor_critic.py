"""Shared by the rollout family: acting, rollout batches, advantages, minibatch epochs, and normalizer updates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import ActOutput, Algorithm, Batch, Carry, Number, Setting
from rl_training.algorithms.reward_scale import RewardScale
from rl_training.errors import UserError
from rl_training.ops.returns import gae
from rl_training.speed.optimizer import Backward, Optimizer

ROWS = ("obs", "actions", "logprobs", "values", "advantages", "returns", "action_masks")
MOST_STEPS = 32  # in one graph
MOST_NUMBERS = 16  # per row; a GPU gathers these one by one, because `index_select` spends a block of threads on a row


class PolicyActing(Algorithm):
    """A learner of a `policy` that samples (`act`) and estimates values: the rollout family, GAIL.

    A policy with memory has `heads`, which act and estimate values from what the memory makes of observations
    (`remember`); `sample` takes that in place of observations.
    """

    policy: Any
    has_memory = False

    def acting(self) -> nn.Module:
        """Policy and normalizer."""
        policy: nn.Module = self.policy
        return policy

    @property
    def heads(self) -> Any:
        """What acts and estimates values: the policy, or its heads on the output of a memory."""
        return self.policy.heads if self.has_memory else self.policy

    def initial_carry(self, n: int) -> Carry:
        """Zeros [n, S]; None without a memory."""
        return self.policy.memory.initial_state(n) if self.has_memory else None

    def remember(self, obs: Tensor, carry: Carry, is_first: Tensor | None) -> tuple[Tensor, Carry]:
        """What the heads read for observations [N, ...], and the memory after them; without a memory, `obs`."""
        if not self.has_memory:
            return obs, None
        carry = self.initial_carry(len(obs)) if carry is None else carry
        is_first = torch.zeros_like(carry[:, 0], dtype=torch.bool) if is_first is None else is_first
        found: tuple[Tensor, Carry] = self.policy.remember(obs, carry, is_first)
        return found

    @torch.no_grad()
    def act(
        self, obs: Tensor, carry: Carry = None, *, is_first: Tensor | None = None, deterministic: bool = False,
        action_masks: Tensor | None = None,
    ) -> ActOutput:  # fmt: skip
        """Actions, with the log-probabilities, values and states of a memory that a rollout stores with them."""
        obs, carry = self.remember(obs, carry, is_first)
        out = self.heads.act(obs, deterministic=deterministic, generator=self.generator, action_masks=action_masks)
        extras = {"logprobs": out.logprobs, "values": out.values}
        return ActOutput(out.actions, extras if carry is None else {**extras, "states": carry}, carry)

    def sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [N, ...] from standard Gaussian or Gumbel noise [N, A], with their log-probabilities [N]."""
        chosen = self.heads.distribution(obs)
        actions = chosen.sample(noise=noise)
        return actions, chosen.log_prob(actions)

    def state_values(
        self, obs: Tensor, action_masks: Tensor | None = None, states: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The critic's values [N] of observations [N, ...], in which these actions [N, A] are legal.

        With memory, `states` [N, S] is the memory before them, and `starts` [N] is true where an episode starts.
        """
        values: Tensor = self.heads.values(self.remember(obs, states, starts)[0])
        return values


class RolloutLearner(Algorithm):
    """A learner from rollouts [T, N], with `state_values` for advantages and returns."""

    gamma = Number("in [0, 1]", 0.99)
    gae_lambda = Number("in [0, 1]", 0.95)
    optimizer_eps = Number("> 0", 1e-5, read="by value")
    optimizer: Optimizer
    sequence_length = Setting(">= 1", None)  # of a policy with memory; None: the rollout
    refresh_memory = Setting(default=False)

    def __init__(self, *, normalize_rewards: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self.reward_scale = RewardScale(self.gamma) if normalize_rewards else None

    def state_values(self, obs: Tensor, action_masks: Tensor | None = None) -> Tensor:
        """Values [N] of observations [N, ...], in which these actions [N, A] are legal."""
        raise NotImplementedError

    def first_states(self, rollout: Batch, length: int) -> Tensor:
        """The states [M, S] before sequences of that length, read again from a rollout."""
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
        if "bootstrap_obs" in batch:
            memory = (None, batch["states"][-1], batch["starts"][-1]) if "states" in batch else ()
            last = self.state_values(batch["bootstrap_obs"], *memory)
        else:
            last = batch["bootstrap_value"].to(values.dtype)
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
        truncated, given = batch["truncated"], {"obs": batch["final_obs"].flatten(0, 1)}
        if "states" in batch:  # the memory after the last observation before it
            given["states"] = batch["states"][1:].flatten(0, 1)
        if batch["final_obs"].dim() == 3 and not truncated.is_cpu:  # finding these rows would make the host wait
            return others | {"truncation_values": self.state_values(**given).view_as(truncated)}
        rows = truncated.flatten().nonzero().squeeze(-1)
        finals = self.state_values(**{name: column.index_select(0, rows) for name, column in given.items()})
        values = finals.new_zeros(truncated.numel()).index_copy_(0, rows, finals)
        return others | {"truncation_values": values.view_as(truncated)}

    def advantages(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """GAE advantages and returns [T, N] from the behavior critic's values."""
        values = batch.get("values")
        if values is None:
            shape = batch["obs"].shape[:2]
            names = [name for name in ("obs", "action_masks", "states", "starts") if name in batch]
            with torch.no_grad():
                values = self.state_values(**{name: batch[name][: shape[0]].flatten(0, 1) for name in names})
            values = values.view(shape)
        next_values = self.successor_values(values, self.value_finals(batch))
        advantages = gae(values=values, next_values=next_values, lambda_=self.gae_lambda, **self.time_major(batch))
        return advantages, advantages + values

    def rows(self, batch: Batch) -> dict[str, Tensor]:
        """The batch as flat rows [B, ...] with `advantages` and `returns`, reset rows left out."""
        rows, indices = self.rows_and_indices(batch)
        return rows if indices is None else select_rows(rows, indices)

    def rows_and_indices(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor | None]:
        """All rows of the batch, flat, and the indices of the rows that are not resets (None if no row is one).

        With memory, the rows are whole sequences (`sequences`), and `weights` says which rows are resets.
        """
        if "rewards" in batch and "advantages" not in batch:
            advantages, returns = self.advantages(batch)
            batch = {**batch, "advantages": advantages, "returns": returns}
        if "states" in batch:
            return sequences(batch, self.sequence_length or len(batch["advantages"])), None
        lead = batch["advantages"].dim()
        rows = {name: batch[name] if lead == 1 else batch[name].flatten(0, 1) for name in ROWS if name in batch}
        valid = batch.get("valid")
        return rows, None if valid is None else valid.flatten().nonzero().squeeze(-1)

    def move_normalizers(self, rows: Batch) -> None:
        """Add the observations just learned from to the running statistics.

        Call it after learning: while it learns, a policy must see observations as the policy that acted saw them.
        """
        observation_input = getattr(self.acting(), "observation_input", None)
        if observation_input is not None:
            is_flat, is_real = "starts" not in rows, rows.get("weights")
            obs = rows["obs"]
            observation_input.update(obs if is_flat else obs.flatten(0, 1) if is_real is None else obs[is_real > 0])


class ActorCriticAlgorithm(PolicyActing, RolloutLearner):
    """A learner of a policy with `act`, `evaluate_actions`, `distribution` and `values` (see `models`)."""

    normalize_advantages: Any

    def __init__(self, *, policy: nn.Module, **settings: Any) -> None:
        super().__init__(**settings)
        self.policy = policy
        self.has_memory = hasattr(policy, "remember")

    def trace(self, rows: Batch) -> tuple[Any, Backward]:
        """Log-probabilities, values and entropy [B] of rows, and a function that maps their slopes to gradients.

        All of them are [M, L] for whole sequences.
        """
        inputs = rows["obs"], rows["actions"], rows.get("action_masks")
        if self.has_memory:
            inputs = *inputs, rows["state"], rows["starts"]  # type: ignore[assignment]
        return self.optimizer.trace(self.policy, *inputs, call=self.policy.evaluate_actions)

    def first_states(self, rollout: Batch, length: int) -> Tensor:
        """As `RolloutLearner`; the first state of the rollout stays."""
        before, starts = rollout["states"][:1], rollout["starts"][:-1]
        after = self.policy.states(rollout["obs"], before[0], starts)
        return torch.cat([before, after[length - 1 : -1 : length]]).flatten(0, 1)

    def scale_advantages(self, advantages: Tensor, weights: Tensor | None = None) -> Tensor:
        """Advantages for the loss, normalized over all ranks if `normalize_advantages` is set."""
        return normalize(advantages, weights, self.ranks) if self.normalize_advantages else advantages


class ShuffledEpochs(RolloutLearner):
    """A rollout learner that makes passes over shuffled rows; a subclass writes `minibatch_step`."""

    step_metrics: ClassVar[tuple[str, ...]]  # names of the K numbers that `minibatch_step` returns
    steps: tuple[str, ...] = ("minibatch_step",)
    graphs: tuple[str, ...] = ("shuffled_steps",)
    update_epochs = Setting(">= 1", 1)
    minibatch_size = Setting(">= 1", None)  # None: the whole batch

    def minibatch_step(self, rows: Batch) -> Tensor:
        """Take one gradient step on rows [B]; return its `step_metrics` [K]."""
        raise NotImplementedError

    def checked_step(self, rows: Batch) -> Tensor:
        """`minibatch_step`, which a user may have written: what it returns must be K numbers."""
        found: Any = self.minibatch_step(rows)
        if isinstance(found, Tensor) and found.shape == (len(self.step_metrics),):
            return found
        kind = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        what = f"{type(self).__name__}.minibatch_step returned {'None' if found is None else kind}"
        wanted = f"a tensor of {len(self.step_metrics)} numbers: {', '.join(self.step_metrics)}"
        raise UserError(f"{what}; it must return {wanted}.")

    def entries(self, rows: Batch, count: int) -> int:
        """How many of `count` rows, or whole sequences, a minibatch has: `minibatch_size` rows, or about as many."""
        return count if self.minibatch_size is None else max(1, self.minibatch_size // length_of(rows))

    def shuffled_steps(self, rows: Batch, order: Tensor) -> Tensor:
        """Take a gradient step on every `minibatch_size` rows in the given order; return the steps' metrics [S, K]."""
        chosen, size = select_rows(rows, order), self.entries(rows, len(order))
        pieces = zip(*(value.split(size) for value in chosen.values()), strict=True)
        return torch.stack([self.checked_step(dict(zip(chosen, piece, strict=True))) for piece in pieces])

    def whole_minibatches(self, rows: Batch, count: int) -> tuple[int, int]:
        """How many of `count` shuffled rows are in minibatches of full size, and in any: a last single row is dropped.

        The smaller last minibatch runs separately: without an engine's reset rows, its size varies.
        """
        size, is_row = self.entries(rows, count), length_of(rows) == 1
        kept = count - (is_row and count > 1 and (count - 1) % size == 0)
        return kept - kept % size, kept

    def epochs(self, rows: Batch, indices: Tensor | None, rollout: Batch | None = None) -> Iterator[Tensor]:
        """Make `update_epochs` passes over the rows of these indices (None: all); yield each one's metrics [S, K].

        With `refresh_memory`, later passes read their states again from the `rollout`.
        """
        count, device = len(rows["returns"] if indices is None else indices), rows["returns"].device
        whole, kept = self.whole_minibatches(rows, count)
        most = self.entries(rows, count) * max(1, MOST_STEPS // length_of(rows))
        for epoch in range(self.update_epochs):
            if epoch and self.refresh_memory and rollout is not None and "states" in rollout:
                rows = {**rows, "state": self.first_states(rollout, length_of(rows))}
            order = torch.randperm(count, generator=self.generator, device=device)
            order = order if indices is None else indices[order]
            parts = [*order[:whole].split(most), order[whole:kept]]
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


def sequences(batch: Batch, length: int) -> dict[str, Tensor]:
    """A rollout [T, N] as whole sequences [M, length, ...], with the `state` [M, S] that its memory had before each.

    M = N T / length. `starts` are true where an episode starts, `weights` are 0 on an engine's reset rows.
    """
    steps = len(batch["advantages"])
    columns = {name: batch[name] for name in ROWS if name in batch} | {"starts": batch["starts"][:steps]}
    if "valid" in batch:
        columns["weights"] = batch["valid"].float()
    rows = {name: x.unflatten(0, (-1, length)).transpose(1, 2).flatten(0, 1) for name, x in columns.items()}
    return {**rows, "state": batch["states"][:steps:length].flatten(0, 1)}


def length_of(rows: Batch) -> int:
    """Steps of each sequence [M, L]; 1 for flat rows."""
    returns = rows["returns"]
    return 1 if returns.dim() == 1 else returns.shape[1]


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
