"""APPO: PPO's clipped surrogate on V-trace targets, for experience from an older policy.

Two versions exist. The default has no target network, like Sample Factory (Petrenko et al. 2020, arXiv:2006.11751): the
ratio is pi/mu with mu the policy that acted, and V-trace uses the same ratio. Its advantage is V-trace's without the
factor rho, since the surrogate multiplies by the ratio already; Sample Factory multiplies by both. With `target_policy`
it is RLlib's (after Luo et al. 2019, IMPACT, arXiv:1912.00167): V-trace uses pi_T/mu with a slowly copied pi_T, the
surrogate's ratio is clip(mu/pi_T, 0, 2) * pi/mu, and KL(pi_T || pi) is penalized with a coefficient that adapts to
`kl_target`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import Batch, Number, Setting, UpdateResult, check_bound
from rl_training.algorithms.impala import IMPALA, flat_obs, vtrace_losses
from rl_training.ops.losses import Losses, approx_kl, clipped_surrogate, means, ratio_statistics

METRICS = (
    "loss", "policy_loss", "value_loss", "entropy_loss", "rho_mean", "vtrace_target_mean", "pg_advantage_mean",
    "approx_kl", "clip_fraction", "target_kl", "grad_norm",
)  # fmt: skip


def appo_loss(batch: Batch, clip_coef: float, ent_coef: float, vf_coef: float) -> Losses:
    """Takes the inputs of `impala_loss`; the surrogate's ratio is target over behavior probability.

    Optional: `reference_logprobs` to use in this ratio instead of the behavior policy's, and `scaled_advantages`.
    """
    logratio = batch["target_logprobs"] - batch.get("reference_logprobs", batch["behavior_logprobs"])
    gain = clipped_surrogate(logratio, batch.get("scaled_advantages", batch["pg_advantages"]), clip_coef)
    apart = batch["target_logprobs"].detach() - batch["behavior_logprobs"]
    statistics = ratio_statistics(logratio, clip_coef) | {"approx_kl": approx_kl(apart)}
    return vtrace_losses(batch, gain, ent_coef, vf_coef, statistics)


class APPO(IMPALA):
    """The APPO learner. Batches are those of IMPALA. Minibatches are whole trajectories: each recomputes V-trace."""

    steps = ("minibatch_step",)
    learning_rate = Number(">= 0", 5e-4)
    ent_coef = Number(">= 0", 0.01)
    clip_coef = Number("> 0", 0.2)
    kl_target = Number("> 0", 0.01)
    update_epochs = Setting(">= 1", 1)
    minibatch_size = Setting(">= 1", None)  # None: the whole rollout
    normalize_advantages = Setting(default=False)
    target_update_interval = Setting(">= 1", 4)

    def __init__(
        self, *, policy: nn.Module, target_policy: bool = False, kl_coef: float = 1.0, **settings: Any
    ) -> None:
        super().__init__(policy=policy, **settings)
        self.target: Any = copy.deepcopy(policy).requires_grad_(False) if target_policy else None
        check_bound("kl_coef", ">= 0", kl_coef)
        self.kl_coef: Tensor
        self.register_buffer("kl_coef", torch.tensor(kl_coef))

    def minibatches(self, rollout: Batch) -> Iterator[dict[str, Tensor]]:
        """Shuffled groups of trajectories, about `minibatch_size` rows each."""
        length, count = rollout["rewards"].shape
        size = count if self.minibatch_size is None else max(1, min(count, self.minibatch_size // length))
        if size == count:
            yield dict(rollout)
            return
        order = torch.randperm(count, generator=self.generator, device=rollout["rewards"].device)
        for chosen in order.split(size):
            yield {name: x.index_select(0 if "bootstrap" in name else 1, chosen) for name, x in rollout.items()}

    def minibatch_step(self, rollout: Batch) -> Tensor:
        """Take one gradient step on trajectories [T, B]; return its metrics in the order of METRICS."""
        (policy, backward), weights = self.trace_rollout(rollout), rollout.get("weights")
        terms = rollout = {**rollout, **policy}
        if self.target is None:
            targets, advantages = self.vtrace(rollout, policy["target_logprobs"], policy["values"], None)
            kl = torch.zeros((), device=targets.device)
        else:
            reference, kls = self.compare_with_target(rollout)
            targets, advantages = self.vtrace(rollout, reference, policy["values"], self.pg_rho_clip)
            correction = (rollout["behavior_logprobs"] - reference).clamp(max=math.log(2.0))  # of the log-ratio
            terms["reference_logprobs"] = rollout["behavior_logprobs"] - correction
            (kl,) = means(kls, weights=weights)
        terms |= {"vtrace_targets": targets, "pg_advantages": advantages}
        terms["scaled_advantages"] = self.scale_advantages(advantages, weights)
        losses = appo_loss(terms, self.clip_coef, self.ent_coef, self.vf_coef)
        gradients = backward(*losses.slopes)
        if self.target is not None:
            penalty = self.kl_coef * kl
            losses["loss"] = losses["loss"] + penalty.detach()
            gradients = self.optimizer.add_gradients(gradients, penalty)
        grad_norm = self.optimizer.apply_gradients(gradients)
        return torch.stack([*losses.values(), kl.detach(), grad_norm])

    def compare_with_target(self, rollout: Batch) -> tuple[Tensor, Tensor]:
        """The target policy's log-probabilities [T, B], and KL(pi_T || pi) [T, B] with a gradient."""
        names, shape = ("obs", "actions", "action_masks"), rollout["rewards"].shape
        obs, actions, masks = (rollout[name].flatten(0, 1) if name in rollout else None for name in names)
        with torch.no_grad():
            target = self.target.distribution(obs, masks)
            logprobs = target.log_prob(actions).view(shape)
        return logprobs, target.kl(self.policy.distribution(obs, masks)).view(shape)

    @torch.no_grad()
    def _copy_target(self, kl: Tensor) -> None:
        """Copy pi to pi_T and adapt the KL coefficient: times 1.5 above twice the target, halved below half of it."""
        self.kl_coef.mul_(torch.where(kl > 2 * self.kl_target, 1.5, torch.where(kl < 0.5 * self.kl_target, 0.5, 1.0)))
        self.target.load_state_dict(self.policy.state_dict())

    def learn(self, batch: Batch) -> UpdateResult:
        """Make `update_epochs` passes over the rollout; each minibatch recomputes V-trace, since the values change."""
        rollout = self.trajectories(batch)
        steps: list[Tensor] = []
        for _ in range(self.update_epochs):
            for minibatch in self.minibatches(rollout):
                steps.append(self.minibatch_step(self.value_finals(minibatch)))
        metrics = dict(zip(METRICS, torch.stack(steps).mean(0).unbind(), strict=True))
        if self.target is not None and (self.num_updates + 1) % self.target_update_interval == 0:
            self._copy_target(self.joint(metrics["target_kl"]))
        self.move_normalizers(flat_obs(batch))
        return UpdateResult(metrics, num_gradient_steps=len(steps))
