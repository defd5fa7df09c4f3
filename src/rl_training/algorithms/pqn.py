"""PQN: Q(lambda) on rollouts, without replay and without a target network (Gallici et al. 2025, arXiv:2407.04811).

Many environments in parallel replace the replay buffer, and LayerNorm before every activation keeps Q from diverging
without a target network. Peng's Q(lambda) goes backward through each rollout, through exploratory actions too:

    G_t = r_t + gamma (1 - terminated) [lambda G_{t+1} + (1 - lambda) max_a Q(s_{t+1}, a)]

With V(s) = max_a Q(s, a), this is the return of GAE. In the last row and at a truncation, the bracket is V of the
observation after the step; the authors' code takes a truncation for a termination. The targets are computed once per
rollout. Then Q(s_t, a_t) regresses on them, 1/2 (Q(s_t, a_t) - G_t)^2, in epochs of shuffled minibatches.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.algorithms.actor_critic import ShuffledEpochs
from rl_training.algorithms.base import Batch, Number, UpdateResult
from rl_training.algorithms.q_learning import EpsilonGreedy, choose
from rl_training.ops.policy import mask_actions


def pqn_loss(batch: Batch) -> dict[str, Tensor]:
    """From q_values [B, A], actions [B] and returns [B]."""
    chosen = choose(batch["q_values"], batch["actions"].long())
    return {"loss": 0.5 * (chosen - batch["returns"].detach()).square().mean(), "q_value_mean": chosen.mean()}


class PQN(EpsilonGreedy, ShuffledEpochs):
    """The PQN learner. A batch is a rollout [T, N]; `q_network` is any module [B, ...] -> [B, A]."""

    reads_logprobs = False
    step_metrics = ("loss", "q_value_mean", "grad_norm")
    learning_rate = Number(">= 0", 5e-4)
    gae_lambda = Number("in [0, 1]", 0.65)
    max_grad_norm = Number("> 0", 10.0)
    optimizer_eps = Number("> 0", 1e-8, read="by value")

    def __init__(self, *, q_network: nn.Module, optimizer: str = "radam", **settings: Any) -> None:
        super().__init__(q_network=q_network, optimizer=optimizer, **settings)
        self.optimizer = self.make_optimizer("optimizer", q_network.parameters())

    def state_values(self, obs: Tensor, action_masks: Tensor | None = None) -> Tensor:
        """max_a Q(s, a) [N] over legal actions."""
        return mask_actions(self.q_network(obs), action_masks).amax(-1)

    def sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Epsilon-greedy actions [N] from Gumbel noise [N, A], with their log-probabilities [N]."""
        count = noise.shape[-1]
        best = F.one_hot(self.action_values(obs, False).argmax(-1), count)
        logprobs = (best * (1.0 - self.epsilon) + self.epsilon / count).log()
        actions = (logprobs + noise).argmax(-1)
        return actions, choose(logprobs, actions)

    def minibatch_step(self, rows: Batch) -> Tensor:
        """Take one gradient step on rows [B]; return metrics [3] in the order of `pqn_loss`, then the gradient norm."""
        losses = pqn_loss({**rows, "q_values": self.q_network(rows["obs"])})
        grad_norm = self.optimizer.step(losses["loss"])
        return torch.stack([*(value.detach() for value in losses.values()), grad_norm])

    def learn(self, batch: Batch) -> UpdateResult:
        """Compute the targets, then make `update_epochs` passes over the rollout."""
        rows, indices = self.rows_and_indices(batch)
        steps = torch.cat(list(self.epochs(rows, indices)))
        self.move_normalizers(rows if indices is None else {"obs": rows["obs"][indices]})
        metrics = dict(zip(self.step_metrics, steps.mean(0).unbind(), strict=True))
        return UpdateResult(metrics, num_gradient_steps=len(steps))
