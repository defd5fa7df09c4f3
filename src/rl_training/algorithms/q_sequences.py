"""How the DQN family learns with memory: from replayed sequences (R2D2, Kapturowski et al. 2019, ICLR).

A sequence begins with the state that the memory had there when it was stored. Both networks read its first rows without
a gradient, each with its own weights, to make a state of their own from that one (burn-in). Then they read the others,
of which every step is a transition, with n-step returns as in

    y_t = h(sum_{k<n} gamma^k r_{t+k} + gamma^n h^-1(Q_target(s_{t+n}, argmax_a Q(s_{t+n}, a))))

The loss is summed over the steps and averaged over sequences, weighted by their importance. A sequence's priority is
eta max_t |delta_t| + (1 - eta) mean_t |delta_t|. Rescaling h, double Q-learning and n are axes of their own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.algorithms.base import Batch
from rl_training.speed.optimizer import Backward, Optimizer

COLUMNS = (
    "obs", "starts", "states", "actions", "rewards", "discounts", "next", "taken", "weights", "next_action_masks",
)  # fmt: skip


def sequence_rows(batch: Batch, burn_in: int) -> dict[str, Any]:
    """The batch with the M steps after the burn-in, of B sequences, as rows [M * B] of transitions.

    Their `weights` add up over the steps of a sequence, because a loss is a mean over rows. `next` are the rows of the
    networks' outputs [(M + 1) * B].
    """
    names = ("actions", "rewards", "discounts", "taken", "next_action_masks")
    steps = {name: batch[name][burn_in:] for name in names if name in batch}
    count, size = steps["taken"].shape
    weights = steps["taken"] * count
    if "weights" in batch:
        weights = weights * batch["weights"]
    following = (batch["next"][burn_in:] - burn_in) * size + torch.arange(size, device=weights.device)
    rows = {**steps, "weights": weights, "next": following}
    return {**batch, **{name: part.flatten(0, 1) for name, part in rows.items()}, "steps": (count, size)}


def trace_sequences(
    rows: dict[str, Any], burn_in: int, online: Any, target: Any, optimizer: Optimizer
) -> tuple[Tensor, Backward]:
    """Outputs of the online network [M * B, ...] and their backward function; rows get the outputs of both networks at
    the next observations, `next_online` and `next_target`."""
    obs, starts = rows["obs"], rows["starts"]
    learned = obs[burn_in:].flatten(0, 1)

    def recall(network: Any) -> tuple[Tensor, Tensor]:
        state = rows["states"]
        if burn_in:
            state = network.states(obs[:burn_in].flatten(0, 1), state, starts[:burn_in])[-1]
        return state, starts[burn_in:]

    with torch.no_grad():
        before = recall(online)
        rows["next_target"] = target(learned, *recall(target)).index_select(0, rows["next"])
    outputs, backward = optimizer.trace(online, learned, *before)
    rows["next_online"] = outputs.index_select(0, rows["next"])
    count, last = len(rows["actions"]), len(outputs) - len(rows["actions"])
    padding = (0, 0) * (outputs.dim() - 1) + (0, last)
    return outputs[:count], lambda slopes: backward(F.pad(slopes, padding))


def sequence_priorities(errors: Tensor, taken: Tensor, eta: float | Tensor) -> Tensor:
    """eta max + (1 - eta) mean of |errors| [M, B] over the steps that were taken: [B]."""
    errors = errors.abs() * taken
    return eta * errors.amax(0) + (1.0 - eta) * errors.sum(0) / taken.sum(0).clamp(min=1.0)
