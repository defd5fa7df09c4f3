"""Losses, most of them with their slopes, and one-step targets for learners from replay.

A loss and its derivative come together, and tests check the derivative by autograd. For a few small tensors, autograd
takes longer to differentiate the loss than a small network's passes take. Where that matters, a learner takes the
slopes at the network's outputs from here and passes them to the network's own backward pass (`Optimizer.trace`).
Autograd can differentiate the values too; slopes never have an autograd graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

RESCALING = 1e-3  # of returns: the share of h that is linear
COLUMNS = (
    "obs", "actions", "rewards", "next_obs", "weights", "action_masks", "next_action_masks", "next_actions",
    "returns_to_go",
)  # fmt: skip


class Losses(dict[str, Tensor]):
    """Named losses; `slopes` are the gradients of `loss` at the network's outputs, None where its weight is 0."""

    def __init__(self, losses: Mapping[str, Tensor], slopes: tuple[Tensor | None, ...]) -> None:
        super().__init__(losses)
        self.slopes = slopes


def actor_critic_losses(
    gain: tuple[Tensor, Tensor], error: tuple[Tensor, Tensor], entropy: Tensor, ent_coef: float, vf_coef: float,
    weights: Tensor | None = None, statistics: Mapping[str, Tensor] | None = None,
) -> Losses:  # fmt: skip
    """The loss of the rollout family: -mean gain + c_v mean error - c_e mean entropy; slopes in that order.

    `gain` comes with its slope in the log-probabilities, `error` with its slope in the values. All [...]; rows of
    weight 0 do not count. The means of `statistics` are added.
    """
    statistics = statistics or {}
    share = shares(entropy, weights)
    mean_gain, value_loss, mean_entropy, *others = means(
        gain[0], error[0], entropy, *statistics.values(), weights=weights
    )
    policy_loss, entropy_loss = -mean_gain, -mean_entropy
    losses = {
        "loss": policy_loss + vf_coef * value_loss + ent_coef * entropy_loss,
        "policy_loss": policy_loss, "value_loss": value_loss, "entropy_loss": entropy_loss,
    }  # fmt: skip
    is_used = isinstance(ent_coef, Tensor) or ent_coef  # a captured step cannot read a tensor
    on_entropy = torch.empty_like(entropy).fill_(-ent_coef) * share if is_used else None
    slopes = gain[1] * -share, error[1] * (vf_coef * share), on_entropy
    return Losses(losses | dict(zip(statistics, others, strict=True)), slopes)


def means(*columns: Tensor, weights: Tensor | None = None) -> tuple[Tensor, ...]:
    """The mean of each over rows of nonzero weight; 0 if there are none, as in a minibatch of reset rows."""
    table = torch.stack(columns).flatten(1)
    return (table.mean(1) if weights is None else table @ shares(table[0], weights.flatten())).unbind()


def shares(x: Tensor, weights: Tensor | None = None) -> Any:
    """The share of each row in a mean: one number for all, or a tensor by weight."""
    return 1.0 / x.numel() if weights is None else weights / weights.sum().clamp(min=1e-8)


def squared_error(values: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Half the mean squared error, and its slopes: [B], [B] -> [], [B]."""
    errors = values - targets
    return errors.dot(errors) * (0.5 / len(errors)), errors.detach() / len(errors)


def value_error(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, clip_coef: float | Tensor = 0.0
) -> tuple[Tensor, Tensor]:
    """Half the squared error per sample, and its slope.

    With `old_values`, the larger of it and the error of values clipped to within `clip_coef` of them, as in the
    original PPO code.
    """
    errors = values - returns
    halves = 0.5 * errors.square()
    if old_values is None:
        return halves, errors.detach()
    moved = values - old_values
    excess = moved - moved.clamp(-clip_coef, clip_coef)  # type: ignore[arg-type]  # floats or tensors
    held = 0.5 * (errors - excess).square()  # exactly `halves` inside the clip, where the excess is 0
    return torch.maximum(halves, held), errors.detach().masked_fill(held > halves, 0.0)


def policy_gradient(logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """log pi(a|s) A per sample, to be maximized, and its slope in log pi; A is a constant."""
    return logprobs * advantages.detach(), advantages.detach()


def clipped_surrogate(logratio: Tensor, advantages: Tensor, clip_coef: float | Tensor) -> tuple[Tensor, Tensor]:
    """PPO's objective per sample, min(r A, clip(r, 1 - e, 1 + e) A), to be maximized (Schulman et al. 2017, eq. 7).

    `logratio` is log pi(a|s) - log pi_old(a|s); all tensors have one shape [...]. With its slope in `logratio`:
    r A, and 0 where the clip is active.
    """
    ratio, advantages = logratio.exp(), advantages.detach()
    moved = ratio * advantages
    held = ratio.clamp(1.0 - clip_coef, 1.0 + clip_coef) * advantages  # type: ignore[arg-type]  # floats or tensors
    return torch.minimum(moved, held), moved.detach().masked_fill(moved > held, 0.0)


def approx_kl(logratio: Tensor) -> Tensor:
    """(r - 1) - log r per sample, never negative; its mean over actions of the old policy is KL(old || new)."""
    return logratio.expm1() - logratio


def ratio_statistics(logratio: Tensor, clip_coef: float) -> dict[str, Tensor]:
    """Per-sample distance from the policy that acted: `approx_kl`, and whether the ratio left its clip range."""
    apart = logratio.detach()
    return {"approx_kl": approx_kl(apart), "clip_fraction": (apart.expm1().abs() > clip_coef).to(apart.dtype)}


def huber(values: Tensor, targets: Tensor, delta: float | Tensor | None = 1.0) -> tuple[Tensor, Tensor]:
    """Huber losses and their slopes, elementwise: x^2 / 2 for |x| <= delta, or everywhere if it is None; else
    delta (|x| - delta / 2)."""
    errors = values - targets
    held = errors if delta is None else errors.clamp(-delta, delta)  # type: ignore[arg-type]  # floats or tensors
    return held * torch.sub(errors, held, alpha=0.5), held.detach()


def weighted_mean(losses: Tensor, weights: Tensor | None) -> Tensor:
    """Mean of losses [..., B], each times its importance weight [B]."""
    return losses.mean() if weights is None else (losses * weights).mean()


def critic_losses(q_values: Tensor, targets: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
    """Mean squared error over batch and critics, weighted by importance: [..., B], [B], [B] -> []."""
    targets = targets.detach()
    return {"critic_loss": weighted_mean((q_values - targets).square(), weights), "target_q_mean": targets.mean()}


def chosen_slopes(slopes: Tensor, actions: Tensor, outputs: Tensor, weights: Tensor | None) -> Tensor:
    """Slopes of a weighted mean at outputs [B, A] or [B, A, K], from each loss's [B] or [B, K] at the taken action."""
    share: Any = 1.0 / len(slopes)
    if weights is not None:
        share = (weights / len(slopes)).view(-1, *[1] * (slopes.dim() - 1))
    return torch.zeros_like(outputs).scatter_(1, index_actions(actions, outputs), (slopes * share).unsqueeze(1))


def index_actions(actions: Tensor, outputs: Tensor) -> Tensor:
    """Index of the taken actions [B] in outputs [B, A] or [B, A, K], for `gather` and `scatter`."""
    if outputs.dim() == 2:
        return actions.unsqueeze(1)
    return actions.view(-1, 1, 1).expand(-1, 1, outputs.shape[2])


class _Sloped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Tensor, Tensor]], x: Tensor, *others: Any) -> Tensor:
        values, ctx.slopes = function(x, *others)
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        missing = ctx.slopes.dim() - grad.dim()
        return None, grad.view(*grad.shape, *[1] * missing) * ctx.slopes, *[None] * (len(ctx.needs_input_grad) - 2)


def with_slope(function: Callable[..., tuple[Tensor, Tensor]], x: Tensor, *others: Any) -> Tensor:
    """The values [B, ...] of a function that also returns its slopes (in the shape of x); autograd uses them for x."""
    values: Tensor = _Sloped.apply(function, x, *others)  # type: ignore[no-untyped-call]
    return values


def bellman_target(batch: Mapping[str, Tensor], gamma: float | Tensor, next_values: Tensor) -> Tensor:
    """r + g V(s') of a batch of transitions, from next values [B], or [B, K] (or [1, K]) for K targets each."""
    rewards, discounts = batch["rewards"], fold_discounts(batch, gamma)
    if next_values.dim() == 2:
        rewards, discounts = rewards.unsqueeze(1), discounts.unsqueeze(1)
    return torch.addcmul(rewards, discounts, next_values)


def double_q_values(q_selector: Tensor, q_value: Tensor) -> Tensor:
    """One network's value of the action that another prefers: [B, A], [B, A] -> [B] (van Hasselt et al. 2016)."""
    return q_value.gather(-1, q_selector.argmax(-1, keepdim=True)).squeeze(-1)


def rescale(x: Tensor) -> Tensor:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x with eps 1e-3 (Pohlen et al. 2018, arXiv:1805.11593), for returns."""
    return x / ((x.abs() + 1.0).sqrt() + 1.0) + RESCALING * x


def unscale(x: Tensor) -> Tensor:
    """The inverse of `rescale`: sign(x) (((sqrt(1 + 4 eps (|x| + 1 + eps)) - 1) / (2 eps))^2 - 1).

    The fraction is 2 (|x| + 1 + eps) / (sqrt(...) + 1), which does not lose digits near 0.
    """
    y = x.abs() + (1.0 + RESCALING)
    root = 2.0 * y / ((1.0 + 4.0 * RESCALING * y).sqrt() + 1.0)
    return x.sign() * (root - 1.0) * (root + 1.0)


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
