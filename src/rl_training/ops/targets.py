"""One-step targets for learners that bootstrap from a replayed batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

COLUMNS = ("obs", "actions", "rewards", "next_obs", "weights", "next_action_masks")


def bellman_target(batch: Mapping[str, Tensor], gamma: float | Tensor, next_values: Tensor) -> Tensor:
    """r + g V(s') of a batch of transitions, from next values [B], or [B, K] (or [1, K]) for K targets each."""
    rewards, discounts = batch["rewards"], fold_discounts(batch, gamma)
    if next_values.dim() == 2:
        rewards, discounts = rewards.unsqueeze(1), discounts.unsqueeze(1)
    return torch.addcmul(rewards, discounts, next_values)


def double_q_values(q_selector: Tensor, q_value: Tensor) -> Tensor:
    """One network's value of the action that another prefers: [B, A], [B, A] -> [B] (van Hasselt et al. 2016)."""
    return q_value.gather(-1, q_selector.argmax(-1, keepdim=True)).squeeze(-1)


def transition_columns(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The columns that a step reads from a batch of transitions; a captured step copies nothing else."""
    end = "discounts" if "discounts" in batch else "terminated" if "terminated" in batch else "dones"
    return {name: batch[name] for name in (*COLUMNS, end) if name in batch}


def fold_discounts(batch: Mapping[str, Tensor], gamma: float | Tensor) -> Tensor:
    """The batch's own `discounts`, else gamma * (1 - terminated), where a plain batch's `dones` mean terminated."""
    if "discounts" in batch:
        return batch["discounts"]
    terminated = batch["terminated"] if "terminated" in batch else batch["dones"]
    if not terminated.is_floating_point():
        terminated = terminated.float()
    return gamma * (1.0 - terminated)
