"""TRPO: trust region policy optimization (Schulman et al. 2015, arXiv:1502.05477).

The policy moves by sqrt(2 delta / x'Fx) x, where conjugate gradients solve F x = g and F is the Hessian of the KL
divergence over the whole batch. A line search backtracks until KL <= delta and the surrogate has improved; if it fails,
the policy does not change. The critic's own gradient steps change no parameter that the policy depends on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.algorithms.actor_critic import ActorCriticAlgorithm, select_rows
from rl_training.algorithms.base import Batch, Number, Setting, UpdateResult
from rl_training.ops.losses import squared_error
from rl_training.ops.policy import conjugate_gradient
from rl_training.speed.optimizer import flatten_parameters, join_parameters


def surrogate(new_logprobs: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
    """The objective of the policy's step: the mean of r A (eq. 14), all [B]."""
    return ((new_logprobs - logprobs).exp() * advantages).mean()


def trpo_loss(batch: Batch) -> dict[str, Tensor]:
    """From new_logprobs, logprobs, advantages, values, returns, entropy, all [B]; a step's statistics pass through."""
    gain = surrogate(batch["new_logprobs"], batch["logprobs"], batch["advantages"])
    losses = {
        "surrogate_gain": gain, "policy_loss": -gain, "value_loss": squared_error(batch["values"], batch["returns"])[0],
        "entropy": batch["entropy"].mean(),
    }  # fmt: skip
    step = ("approx_kl", "accepted_step", "step_norm", "backtrack_steps", "cg_iterations")
    return losses | {name: batch[name] for name in step if name in batch}


class TRPO(ActorCriticAlgorithm):
    """The TRPO learner. A batch is a rollout [T, N], or flat rows [B] with advantages, returns and logprobs."""

    steps = ("value_step",)
    eager_part = "the policy's step, whose line search reads the KL"
    value_learning_rate = Number("> 0", 1e-3)
    learning_rate = Number("> 0", of="value_learning_rate")  # the only learning rate
    max_kl = Number("> 0", 0.01)
    cg_damping = Number("> 0", 0.1)
    line_search_shrink = Number("in (0, 1)", 0.8)
    cg_iterations = Setting(">= 1", 15)
    line_search_steps = Setting(">= 1", 10)
    value_updates = Setting(">= 1", 80)
    value_minibatch_size = Setting(">= 1", 128)
    normalize_advantages = Setting(default=True)

    def __init__(self, *, policy: nn.Module, **settings: Any) -> None:
        super().__init__(policy=policy, **settings)
        self._actor_params, self._actor_flat = flatten_parameters(self.policy.actor_parameters())
        self.value_optimizer = self.make_optimizer("value_optimizer", self.policy.critic.parameters())

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Join the parameters of a copy again, as `Optimizer.__setstate__` does."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._actor_flat = join_parameters(self._actor_params)

    def _actor_gradient(self, scalar: Tensor, create_graph: bool = False) -> Tensor:
        """Gradient of a scalar with respect to the policy, flat [P]; the graph is kept for the next call."""
        gradients = torch.autograd.grad(scalar, self._actor_params, retain_graph=True, create_graph=create_graph)
        return torch.cat([g.reshape(-1) for g in gradients])

    def policy_step(self, rows: Batch) -> dict[str, Any]:
        """Take the trust-region step on all rows [B]."""
        obs, actions, masks = rows["obs"], rows["actions"], rows.get("action_masks")
        advantages = self.scale_advantages(rows["advantages"])
        policy = self.policy.distribution(obs, masks)
        gain = surrogate(policy.log_prob(actions), rows["logprobs"], advantages)
        gradient = self.joint(self._actor_gradient(gain))
        old = policy.detach()
        kl_gradient = self._actor_gradient(old.kl(policy).mean(), create_graph=True)

        def fisher(vector: Tensor) -> Tensor:
            return self.joint(self._actor_gradient(kl_gradient.dot(vector))).add_(vector, alpha=self.cg_damping)

        direction = conjugate_gradient(fisher, gradient, self.cg_iterations)
        curvature = direction.dot(fisher(direction)).clamp(min=1e-12)
        full_step = direction * (2.0 * self.max_kl / curvature).sqrt()
        start, before = self._actor_flat.clone(), self.joint(gain.detach())
        fraction, backtracks, accepted = 1.0, 0, False
        while not accepted and backtracks < self.line_search_steps:
            self._actor_flat.copy_(start + fraction * full_step)
            with torch.no_grad():
                policy = self.policy.distribution(obs, masks)
                gain = self.joint(surrogate(policy.log_prob(actions), rows["logprobs"], advantages))
                kl = self.joint(old.kl(policy).mean())
            accepted = bool((kl <= self.max_kl) & (gain > before))
            if not accepted:
                fraction, backtracks = fraction * self.line_search_shrink, backtracks + 1
        if not accepted:
            self._actor_flat.copy_(start)
            policy, gain, kl, fraction = old, before, torch.zeros_like(kl), 0.0
        return {
            "surrogate_gain": gradient.dot(full_step) * fraction, "surrogate_improvement": gain - before,
            "policy_loss": -gain, "entropy": policy.entropy().mean(), "approx_kl": kl,
            "accepted_step": float(accepted), "step_norm": full_step.norm() * fraction, "backtrack_steps": backtracks,
            "line_search_fraction": fraction, "cg_iterations": self.cg_iterations,
        }  # fmt: skip

    def value_step(self, features: Tensor, returns: Tensor) -> Tensor:
        """Take one gradient step of the critic on rows [B]; return half the mean squared error before it."""
        values, backward = self.policy.trace_values(features)
        loss, slopes = squared_error(values, returns)
        self.value_optimizer.apply_gradients(backward(slopes))
        return loss

    def _value_minibatches(self, rows: Batch) -> Iterator[dict[str, Tensor]]:
        """`value_updates` minibatches, reshuffled whenever the rows are used up."""
        count = len(rows["returns"])
        size = min(self.value_minibatch_size or count, count)
        served = 0
        while served < self.value_updates:
            shuffled = select_rows(rows, torch.randperm(count, generator=self.generator, device=rows["returns"].device))
            for start in range(0, count - size + 1, size):
                if served == self.value_updates:
                    return
                served += 1
                yield {name: value[start : start + size] for name, value in shuffled.items()}

    def learn(self, batch: Batch) -> UpdateResult:
        """Take one trust-region step, then `value_updates` gradient steps of the critic."""
        rows = self.rows(batch)
        metrics = self.policy_step(rows)
        with torch.no_grad():
            features = self.policy.features(rows["obs"])
        value_rows = {"features": features, "returns": rows["returns"]}
        losses = []
        for minibatch in self._value_minibatches(value_rows):
            losses.append(self.value_step(minibatch["features"], minibatch["returns"]))
        self.move_normalizers(rows)
        metrics |= {
            "value_loss": torch.stack(losses).mean(), "final_value_loss": losses[-1],
            "value_updates": self.value_updates,
        }  # fmt: skip
        return UpdateResult(metrics, num_gradient_steps=1 + self.value_updates, watch="surrogate_gain")
