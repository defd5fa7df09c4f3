"""IMPALA: actor-critic with V-trace off-policy correction (Espeholt et al. 2018, arXiv:1802.01561).

The policy that acted may be older than the policy that learns; V-trace weights each temporal difference by the clipped
ratio pi/mu. Losses are means over the rollout, not sums as in the paper, so learning rates are like other learners'.
With memory, the learner reads each rollout again from the state that the actor had at its start, and the observation
after it too, for the bootstrap value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_training.algorithms.actor_critic import ActorCriticAlgorithm
from rl_training.algorithms.base import Batch, Number, Setting, UpdateResult
from rl_training.ops.losses import Losses, actor_critic_losses, policy_gradient, value_error
from rl_training.ops.returns import vtrace
from rl_training.speed.optimizer import Backward


def impala_loss(batch: Batch, ent_coef: float, vf_coef: float) -> Losses:
    """From target_logprobs, behavior_logprobs, vtrace_targets, values, pg_advantages, entropy; `weights` optional."""
    return vtrace_losses(batch, policy_gradient(batch["target_logprobs"], batch["pg_advantages"]), ent_coef, vf_coef)


def vtrace_losses(
    batch: Batch, gain: tuple[Tensor, Tensor], ent_coef: float, vf_coef: float,
    statistics: dict[str, Tensor] | None = None,
) -> Losses:  # fmt: skip
    """The losses of a policy's gain, with V-trace targets for the critic and statistics of the V-trace ratios."""
    targets = batch["vtrace_targets"].detach()
    did = {
        "rho_mean": (batch["target_logprobs"].detach() - batch["behavior_logprobs"]).exp(),
        "vtrace_target_mean": targets, "pg_advantage_mean": batch["pg_advantages"].detach(),
    }  # fmt: skip
    error, statistics = value_error(batch["values"], targets), did | (statistics or {})
    return actor_critic_losses(gain, error, batch["entropy"], ent_coef, vf_coef, batch.get("weights"), statistics)


class IMPALA(ActorCriticAlgorithm):
    """The IMPALA learner. A batch is a rollout [T, B] with the actor's `behavior_logprobs` and the `bootstrap_obs`
    [B, ...] after it, which the learner's critic evaluates at every step (or a given `bootstrap_value` [B]).

    `gae_lambda` below 1 shortens the traces (not in the paper). Without `importance_correction` every ratio is 1; this
    is a control that shows what V-trace contributes.
    """

    reads_values = False
    steps: tuple[str, ...] = ("gradient_step",)
    learning_rate = Number(">= 0", 7e-4)
    ent_coef = Number(">= 0", 0.0)
    vf_coef = Number(">= 0", 0.5)
    rho_clip = Number("> 0", 1.0)
    c_clip = Number("> 0", 1.0)
    pg_rho_clip = Number("> 0", 1.0)
    gae_lambda = Number("in [0, 1]", 1.0)
    max_grad_norm = Number("> 0", 0.5)
    importance_correction = Setting(default=True)

    def __init__(self, *, policy: nn.Module, **settings: Any) -> None:
        super().__init__(policy=policy, **settings)
        self.optimizer = self.make_optimizer("optimizer", policy.parameters())

    def trajectories(self, batch: Batch) -> dict[str, Tensor]:
        """The rollout [T, B] with the inputs of V-trace: rewards, discounts, cuts, weights, log-probabilities of mu."""
        names = (
            "obs", "actions", "action_masks", "behavior_logprobs", "truncated", "states", "starts",
            "bootstrap_obs", "bootstrap_value", "final_obs", "truncation_values",
        )  # fmt: skip
        rollout = {name: batch[name] for name in names if name in batch} | self.time_major(batch)
        if "valid" in batch:
            rollout["weights"] = batch["valid"].float()
        if self.has_memory:  # which reads the observation after the rollout too
            rollout["obs"] = torch.cat([rollout["obs"], rollout.pop("bootstrap_obs").unsqueeze(0)])
        return rollout

    def trace_rollout(self, rollout: Batch) -> tuple[dict[str, Tensor], Backward]:
        """target_logprobs, values and entropy [T, B] of the learner's policy, and the backward pass, as in `trace`.

        With memory, the learner's `bootstrap_value` [B] too.
        """
        if self.has_memory:
            return self._trace_sequences(rollout)
        rows = {name: rollout[name].flatten(0, 1) for name in ("obs", "actions", "action_masks") if name in rollout}
        policy, backward = self.trace(rows)
        shape = rollout["rewards"].shape
        outputs = {
            "target_logprobs": policy.logprobs.view(shape), "values": policy.values.view(shape),
            "entropy": policy.entropy.reshape(shape),
        }  # fmt: skip
        return outputs, lambda *slopes: backward(*(None if slope is None else slope.flatten() for slope in slopes))

    def _trace_sequences(self, rollout: Batch) -> tuple[dict[str, Tensor], Backward]:
        names = "obs", "actions", "action_masks", "starts"
        obs, actions, masks, starts = (rollout[name].transpose(0, 1) if name in rollout else None for name in names)
        inputs = obs, actions, masks, rollout["states"][0], starts
        policy, backward = self.optimizer.trace(self.policy, *inputs, call=self.policy.evaluate_rollout)
        outputs = {
            "target_logprobs": policy.logprobs.t(), "values": policy.values.t(), "entropy": policy.entropy.t(),
            "bootstrap_value": policy.last_values,
        }  # fmt: skip
        return outputs, lambda *slopes: backward(*(None if slope is None else slope.t() for slope in slopes), None)

    def vtrace(
        self, rollout: Batch, logprobs: Tensor, values: Tensor, pg_rho_clip: float | None
    ) -> tuple[Tensor, Tensor]:
        """V-trace targets and advantages [T, B] with ratios of `logprobs` to the behavior policy's."""
        log_rhos = logprobs - rollout["behavior_logprobs"]
        if not self.importance_correction:
            log_rhos = torch.zeros_like(log_rhos)
        return vtrace(
            log_rhos=log_rhos, values=values, next_values=self.successor_values(values, rollout),
            rewards=rollout["rewards"], discounts=rollout["discounts"], cuts=rollout["cuts"],
            rho_clip=self.rho_clip, c_clip=self.c_clip, pg_rho_clip=pg_rho_clip, lambda_=self.gae_lambda,
        )  # fmt: skip

    def gradient_step(self, rollout: Batch) -> dict[str, Tensor]:
        """Take one gradient step on trajectories [T, B] and return its metrics."""
        policy, backward = self.trace_rollout(rollout)
        rollout = {**rollout, **policy}
        targets, advantages = self.vtrace(rollout, policy["target_logprobs"], policy["values"], self.pg_rho_clip)
        terms = {**rollout, "vtrace_targets": targets, "pg_advantages": advantages}
        losses = impala_loss(terms, self.ent_coef, self.vf_coef)
        return {**losses, "grad_norm": self.optimizer.apply_gradients(backward(*losses.slopes))}

    def learn(self, batch: Batch) -> UpdateResult:
        """Take one gradient step on the whole rollout."""
        metrics = self.gradient_step(self.value_finals(self.trajectories(batch)))
        self.move_normalizers(flat_obs(batch))
        return UpdateResult(metrics)


def flat_obs(batch: Batch) -> dict[str, Tensor]:
    """Observations of the rows that are not an engine's reset rows, flat."""
    obs = batch["obs"].flatten(0, 1)
    return {"obs": obs[batch["valid"].flatten()] if "valid" in batch else obs}
